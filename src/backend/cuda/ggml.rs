//! Products with weights in ggml blocks, and embedding tables of them.
//!
//! Blocks stay as the file holds them. Up to [`FEW_ROWS`] rows are multiplied straight from the blocks, in f32. For
//! more, a panel of the weight's rows at a time is decoded to 16-bit planes and goes to the tensor cores as such.

use super::super::Done;
use super::super::tensor::Tensor;
use super::linear::{FEW_ROWS, Planes, gemv_grid, tensor_cores};
use super::weights::Plane;
use super::{BLOCK, Buffer, Precision, floats};
use crate::num::ggml::GgmlType;

/// Bytes of the planes that a panel is decoded to.
const PANEL_BYTES: usize = 64 << 20;
/// Panels are whole tiles of the products.
const PANEL_STEP: usize = 128;
/// Values that a thread decodes.
const CHUNK: usize = 16;

/// The kernels of a type.
struct Kernels {
    gemv: &'static str,
    decode: &'static str,
    embed: &'static str,
}

macro_rules! kernels {
    ($kind:expr, $($type:ident $name:literal,)*) => {
        match $kind {
            $(GgmlType::$type => Some(Kernels {
                gemv: concat!("ggml_gemv_", $name),
                decode: concat!("ggml_decode_", $name),
                embed: concat!("ggml_embed_", $name),
            }),)*
            // Plain floats become planes when they are brought in.
            GgmlType::F32 | GgmlType::F16 | GgmlType::BF16 => None,
        }
    };
}

fn kernels(kind: GgmlType, blocks: &Buffer) -> Done<Kernels> {
    let found = kernels!(
        kind,
        Q4_0 "q4_0", Q4_1 "q4_1", Q5_0 "q5_0", Q5_1 "q5_1", Q8_0 "q8_0",
        Q2_K "q2_k", Q3_K "q3_k", Q4_K "q4_k", Q5_K "q5_k", Q6_K "q6_k",
        IQ1_S "iq1_s", IQ1_M "iq1_m", IQ2_XXS "iq2_xxs", IQ2_XS "iq2_xs", IQ2_S "iq2_s",
        IQ3_XXS "iq3_xxs", IQ3_S "iq3_s", IQ4_NL "iq4_nl", IQ4_XS "iq4_xs",
        TQ1_0 "tq1_0", TQ2_0 "tq2_0", MXFP4 "mxfp4",
    );
    found.ok_or_else(|| blocks.device().failed(format!("no kernel reads blocks of {kind}")))
}

/// `out` = x W' + bias for W in blocks of `kind`.
pub fn linear(
    x: &Tensor,
    kind: GgmlType,
    blocks: &Buffer,
    bias: Option<&Buffer>,
    precision: Precision,
    out: &Tensor,
) -> Done<()> {
    let (device, n, cols) = (x.buffer().device(), out.cols, x.cols);
    let kernels = kernels(kind, blocks)?;
    if x.rows <= FEW_ROWS {
        let launch = device.launch(kernels.gemv, gemv_grid(x.rows, n, 8), 128).buffer(blocks);
        let launch = launch.buffer(x.buffer()).optional(bias).buffer(out.buffer());
        return launch.u32(x.rows).u32(n).u32(cols).go();
    }
    // As for GPTQ integers: two bf16 planes have the range of f32; of one plane, f16 has eight times the precision.
    let (plane, planes) = match precision {
        Precision::Double => (Plane::Bf16, 2),
        Precision::Single => (Plane::F16, 1),
    };
    let x = Planes::of(x, plane, precision, None, cols)?;
    let row_bytes = cols / kind.block() * kind.bytes();
    by_panels(
        cols * 2 * planes,
        bias,
        out,
        |first, rows| decoded(kernels.decode, blocks, first * row_bytes, rows, cols, plane),
        |weight, bias, out| tensor_cores(&x, weight, bias, out),
    )
}

/// Outputs a panel of the weight's rows at a time: `decode` gives those from a row on, as many as it is told, which take
/// `row_bytes` each; `multiply` adds the bias where it is given one.
pub(super) fn by_panels(
    row_bytes: usize,
    bias: Option<&Buffer>,
    out: &Tensor,
    decode: impl Fn(usize, usize) -> Done<Planes>,
    multiply: impl Fn(&Planes, Option<&Buffer>, &Tensor) -> Done<()>,
) -> Done<()> {
    let (device, n) = (out.buffer().device(), out.cols);
    let height = (PANEL_BYTES / row_bytes.max(1) / PANEL_STEP * PANEL_STEP).clamp(PANEL_STEP, n.max(PANEL_STEP));
    for first in (0..n).step_by(height) {
        let width = height.min(n - first);
        let weight = decode(first, width)?;
        if width == n {
            return multiply(&weight, bias, out);
        }
        let part = Tensor::cuda(out.rows, width, floats(device, out.rows, width)?);
        multiply(&weight, None, &part)?;
        let launch = device.launch("ggml_place", [out.rows, width.div_ceil(BLOCK), 1], BLOCK);
        let launch = launch.buffer(part.buffer()).optional(bias).buffer(out.buffer());
        launch.u32(width).u32(first).u32(n).go()?;
    }
    Ok(())
}

/// The planes of `rows` rows of blocks, the first of them `at` bytes from the start.
fn decoded(kernel: &'static str, blocks: &Buffer, at: usize, rows: usize, cols: usize, plane: Plane) -> Done<Planes> {
    let device = blocks.device();
    let values = rows * cols;
    let high = device.alloc(values * 2)?;
    let low = if plane == Plane::Bf16 { Some(device.alloc(values * 2)?) } else { None };
    let chunks = values / CHUNK;
    let launch = device.launch(kernel, [chunks.div_ceil(BLOCK), 1, 1], BLOCK).buffer_at(blocks, at);
    launch.buffer(&high).optional(low.as_ref()).u32(chunks).go()?;
    Ok(Planes { plane, high, low, stride: cols, of_rows: None })
}

/// Rows `ids` of a table, times `scale`.
pub fn embed(kind: GgmlType, table: &Buffer, ids: &Buffer, scale: f32, out: &Tensor) -> Done<()> {
    let launch = table.device().launch(kernels(kind, table)?.embed, [out.rows, 1, 1], 128);
    launch.buffer(table).buffer(ids).buffer(out.buffer()).f32(scale).u32(out.cols).go()
}
