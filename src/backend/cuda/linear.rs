//! Products with weights, and the sums that calibration gathers.
//!
//! Up to [`FEW_ROWS`] rows, as in decoding, are multiplied in f32, each in the same order of sums whatever else there
//! is. More go to the tensor cores, which take
//! 16-bit numbers: activations are first split into one or two planes of those. See `kernels/gemm_tile.cuh`.

use std::sync::Arc;

use cudarc::cublas::sys::cudaDataType_t;

use super::super::Done;
use super::super::tensor::Tensor;
use super::blas::{Blas, BlasError};
use super::weights::{DeviceMatrix, Plane, Quant, UNIT};
use super::{BLOCK, Buffer, Device, Precision, blocks, eight_bits, floats, ggml};

/// Rows that the kernels for decoding take, each with the same results as alone.
pub(super) const FEW_ROWS: usize = 16;
/// Rows that a block of those kernels takes; blocks of the same outputs follow one another.
pub(super) const GEMV_ROWS: usize = 4;
/// Rows up to which the kernels that spread one output over a block are the better ones.
pub(super) const SMALL_ROWS: usize = 64;
/// Rows and outputs of a block in the kernels for many rows.
pub(super) const BIG_TILE: usize = 128;
/// Rows of a block in the kernels for few rows.
pub(super) const SMALL_TILE: usize = 16;

/// A kernel for many rows and its kin for few.
struct Pair {
    big: &'static str,
    small: &'static str,
    /// Dynamic shared memory of the first.
    shared: usize,
    /// Outputs of a block of the second.
    outputs: usize,
}

impl Pair {
    /// The name, grid and dynamic shared memory for `rows` rows and `n` outputs.
    fn shape(&self, rows: usize, n: usize) -> (&'static str, [usize; 3], usize) {
        if rows <= SMALL_ROWS {
            (self.small, [rows.div_ceil(SMALL_TILE), n.div_ceil(self.outputs), 1], 0)
        } else {
            (self.big, [rows.div_ceil(BIG_TILE), n.div_ceil(BIG_TILE), 1], self.shared)
        }
    }
}

/// Blocks of a kernel for decoding, which has `outputs` a block.
pub(super) fn gemv_grid(rows: usize, n: usize, outputs: usize) -> [usize; 3] {
    [n.div_ceil(outputs) * rows.div_ceil(GEMV_ROWS), 1, 1]
}

/// Bytes of dynamic shared memory that the large kernels for dense weights take.
const DENSE_SHARED: usize = 96 << 10;

macro_rules! pair {
    ($name:literal, $shared:expr, $outputs:expr) => {
        Pair { big: $name, small: concat!($name, "_small"), shared: $shared, outputs: $outputs }
    };
}

fn dense_kernels(plane: Plane, x_planes: usize, w_planes: usize) -> Pair {
    match (plane, x_planes, w_planes) {
        (Plane::F16, 1, _) => pair!("gemm_f16_x1", DENSE_SHARED, 32),
        (Plane::F16, ..) => pair!("gemm_f16_x2", DENSE_SHARED, 32),
        (Plane::Bf16, 1, _) => pair!("gemm_bf16_x1", DENSE_SHARED, 32),
        (Plane::Bf16, _, 1) => pair!("gemm_bf16_x2", DENSE_SHARED, 32),
        (Plane::Bf16, ..) => pair!("gemm_bf16_x3", DENSE_SHARED, 32),
    }
}

/// Two bf16 planes have the range of f32 and enough bits; of one plane, f16 has eight times the precision.
fn quant_kernels(bits: u8, precision: Precision) -> Option<(Plane, Pair)> {
    Some(match (bits, precision) {
        (2, Precision::Double) => (Plane::Bf16, pair!("gemm_q2_bf16_x2", 64 << 10, 64)),
        (3, Precision::Double) => (Plane::Bf16, pair!("gemm_q3_bf16_x2", 64 << 10, 64)),
        (4, Precision::Double) => (Plane::Bf16, pair!("gemm_q4_bf16_x2", 64 << 10, 64)),
        (8, Precision::Double) => (Plane::Bf16, pair!("gemm_q8_bf16_x2", 64 << 10, 64)),
        (2, Precision::Single) => (Plane::F16, pair!("gemm_q2_f16_x1", 32 << 10, 64)),
        (3, Precision::Single) => (Plane::F16, pair!("gemm_q3_f16_x1", 32 << 10, 64)),
        (4, Precision::Single) => (Plane::F16, pair!("gemm_q4_f16_x1", 32 << 10, 64)),
        (8, Precision::Single) => (Plane::F16, pair!("gemm_q8_f16_x1", 32 << 10, 64)),
        _ => return None,
    })
}

/// x W' + bias for a weight of `rows` outputs.
pub fn linear(
    x: &Tensor,
    weight: &DeviceMatrix,
    rows: usize,
    bias: Option<&Buffer>,
    precision: Precision,
) -> Done<Tensor> {
    let out = Tensor::cuda(x.rows, rows, floats(x.buffer().device(), x.rows, rows)?);
    match weight {
        DeviceMatrix::Dense { plane, high, low, stride } => {
            let (high, low) = (high.clone(), low.clone());
            let weight = Planes { plane: *plane, high, low, stride: *stride, of_rows: None };
            dense(x, &weight, bias, precision, &out)?;
        }
        DeviceMatrix::Quant(weight) => quant(x, weight, bias, precision, &out)?,
        DeviceMatrix::Ggml { kind, blocks } => ggml::linear(x, *kind, blocks, bias, precision, &out)?,
        DeviceMatrix::Int8(weight) => eight_bits::bytes(x, weight, bias, precision, &out)?,
        DeviceMatrix::Fp8(weight) => eight_bits::floats(x, weight, bias, precision, &out)?,
    }
    Ok(out)
}

/// A row-major matrix in 16-bit numbers: rounded, or as the sum of two.
pub(super) struct Planes {
    pub plane: Plane,
    pub high: Buffer,
    pub low: Option<Buffer>,
    pub stride: usize,
    /// Units of the rows, f32 and powers of two; none: all are 1. Activations in f16 have them, weights do not.
    pub of_rows: Option<Buffer>,
}

impl Planes {
    /// The planes of activations, columns in the order of `gather`, filled up to `stride`.
    pub fn of(x: &Tensor, plane: Plane, precision: Precision, gather: Option<&Buffer>, stride: usize) -> Done<Self> {
        let device = x.buffer().device();
        let bytes = x.rows * stride * 2;
        let high = device.alloc(bytes)?;
        let low = if precision == Precision::Double { Some(device.alloc(bytes)?) } else { None };
        let of_rows = match plane {
            Plane::F16 => {
                let of_rows = floats(device, x.rows, 1)?;
                let launch = device.launch("split_f16", [x.rows, 1, 1], BLOCK).buffer(x.buffer()).buffer(&high);
                let launch = launch.optional(low.as_ref()).buffer(&of_rows).optional(gather);
                launch.u32(x.cols).u32(stride).go()?;
                Some(of_rows)
            }
            Plane::Bf16 => {
                let launch = device.launch("split_bf16", [x.rows, stride.div_ceil(256), 1], 128).buffer(x.buffer());
                let launch = launch.buffer(&high).optional(low.as_ref()).optional(gather);
                launch.u32(x.rows).u32(x.cols).u32(stride).go()?;
                None
            }
        };
        Ok(Self { plane, high, low, stride, of_rows })
    }

    fn count(&self) -> usize {
        1 + usize::from(self.low.is_some())
    }
}

/// x times the planes of a weight.
pub(super) fn dense(
    x: &Tensor,
    weight: &Planes,
    bias: Option<&Buffer>,
    precision: Precision,
    out: &Tensor,
) -> Done<()> {
    let (device, n) = (x.buffer().device(), out.cols);
    if x.rows <= FEW_ROWS {
        let kernel = match (weight.plane, &weight.low) {
            (Plane::F16, _) => "gemv_f16",
            (Plane::Bf16, None) => "gemv_bf16",
            (Plane::Bf16, Some(_)) => "gemv_f32",
        };
        let launch = device.launch(kernel, gemv_grid(x.rows, n, 8), 128).buffer(&weight.high);
        let launch = if let Some(low) = &weight.low { launch.buffer(low) } else { launch };
        let launch = launch.buffer(x.buffer()).optional(bias).buffer(out.buffer());
        return launch.u32(x.rows).u32(n).u32(x.cols).u32(weight.stride).go();
    }
    // An f32 weight was not to be rounded; then activations are not either.
    let precision = if weight.low.is_some() { Precision::Double } else { precision };
    tensor_cores(&Planes::of(x, weight.plane, precision, None, weight.stride)?, weight, bias, out)
}

/// The planes of x times those of a weight.
pub(super) fn tensor_cores(x: &Planes, weight: &Planes, bias: Option<&Buffer>, out: &Tensor) -> Done<()> {
    let (device, n) = (out.buffer().device(), out.cols);
    if let Some(blas) = library(device) {
        return dense_blas(blas, x, weight, bias, out);
    }
    let kernels = dense_kernels(weight.plane, x.count(), weight.count());
    let (kernel, grid, shared) = kernels.shape(out.rows, n);
    let launch = device.launch(kernel, grid, BLOCK).shared(shared).buffer(&x.high).optional(x.low.as_ref());
    let launch = launch.buffer(&weight.high).optional(weight.low.as_ref()).optional(bias);
    let launch = launch.optional(x.of_rows.as_ref()).buffer(out.buffer());
    launch.u32(out.rows).u32(n).u32(weight.stride).go()
}

fn quant(x: &Tensor, weight: &Quant, bias: Option<&Buffer>, precision: Precision, out: &Tensor) -> Done<()> {
    let (device, n) = (x.buffer().device(), out.cols);
    let unknown = || device.failed(format!("no kernel multiplies {}-bit weights", weight.bits));
    let gather = weight.gather.as_ref();
    if x.rows <= FEW_ROWS {
        let kernel = match weight.bits {
            2 => "gemv_q2",
            3 => "gemv_q3",
            4 => "gemv_q4",
            8 => "gemv_q8",
            _ => return Err(unknown()),
        };
        let launch = device.launch(kernel, gemv_grid(x.rows, n, 32), 512);
        let launch = launch.buffer(&weight.q).buffer(&weight.scales).buffer(&weight.zeros);
        let launch = launch.buffer(x.buffer()).optional(gather).optional(bias).buffer(out.buffer());
        return launch.u32(x.rows).u32(n).u32(x.cols).u32(weight.units).u32(weight.units_per_group).go();
    }
    let (plane, kernels) = quant_kernels(weight.bits, precision).ok_or_else(unknown)?;
    let x = Planes::of(x, plane, precision, gather, weight.units * UNIT)?;
    let (kernel, grid, shared) = kernels.shape(out.rows, n);
    let launch = device.launch(kernel, grid, BLOCK).shared(shared).buffer(&x.high).optional(x.low.as_ref());
    let launch = launch.buffer(&weight.q).buffer(&weight.scales).buffer(&weight.zeros);
    let launch = launch.optional(bias).optional(x.of_rows.as_ref()).buffer(out.buffer());
    launch.u32(out.rows).u32(n).u32(weight.units).u32(weight.units_per_group).go()
}

/// X'X on the device of `x`, in f64: sums of products of some rows each; only the lower triangle means anything.
pub fn gram(x: &Tensor) -> Done<Buffer> {
    let (device, n) = (x.buffer().device(), x.cols);
    let sum = device.alloc(n * n * 8)?;
    // What is not computed is added up as well, and must be numbers.
    device.zero(&sum)?;
    let launch = device.launch("gram", [n.div_ceil(128), n.div_ceil(64), 1], BLOCK);
    launch.buffer(&sum).buffer(x.buffer()).u32(x.rows).u32(n).go()?;
    Ok(sum)
}

/// sum += part in f64, element by element; both on one device.
pub fn accumulate(sum: &Buffer, part: &Buffer) -> Done<()> {
    let n = part.bytes() / 8;
    sum.device().launch("accumulate", blocks(n), BLOCK).buffer(sum).buffer(part).u64(n).go()
}

/// X'(O - X) in f32, on the device of `x`.
pub fn cross(x: &Tensor, original: &Tensor) -> Done<Buffer> {
    let (device, n) = (x.buffer().device(), x.cols);
    let (values, out) = (x.rows * n, floats(device, n, n)?);
    let original = device.fetch_shared(original.buffer())?;
    let moved = floats(device, x.rows, n)?;
    let launch = device.launch("subtract", blocks(values), BLOCK);
    launch.buffer(&original).buffer(x.buffer()).buffer(&moved).u64(values).go()?;
    match library(device) {
        Some(blas) => blas_cross(blas, x, &moved, &out)?,
        None => product(device, &out, x.buffer(), &moved, x.rows, n)?,
    }
    Ok(out)
}

/// out = a' b for row-major a and b `[rows, n]`, in f32 without tensor cores.
fn product(device: &Arc<Device>, out: &Buffer, a: &Buffer, b: &Buffer, rows: usize, n: usize) -> Done<()> {
    let launch = device.launch("sgemm", [n.div_ceil(128), n.div_ceil(64), 1], BLOCK);
    let launch = launch.buffer(out).buffer(a).buffer(b).u32(n).u32(n).u32(rows).u64(n);
    launch.u64(1).u64(n).u64(n).u64(1).f32(1.0).i32(0).go()
}

// ---- cuBLAS.

/// cuBLAS, where it is used. Decoding steps do without, whether they are recorded or not: their bits must not depend on
/// that, and cuBLAS allocates and loads as it likes, which a recording must not.
fn library(device: &Device) -> Option<&Blas> {
    device.blas.as_ref().ok().filter(|_| !device.decoding())
}

fn failed(device: &Device, error: BlasError) -> super::super::DeviceError {
    device.failed(format!("cuBLAS: {error}"))
}

/// Columns that one cuBLAS call sums in `Precision::Double`. Tensor cores do not round sums to nearest, and long ones drift
/// (see `CHAIN` in `kernels/gemm_tile.cuh`): this keeps the drift of a sum whose products have one sign at 1e-5. Fewer would
/// be better, but results go to memory and back each time.
const BLAS_COLUMNS: usize = 1024;

/// The planes' products one after the other, large ones first.
fn dense_blas(blas: &Blas, x: &Planes, weight: &Planes, bias: Option<&Buffer>, out: &Tensor) -> Done<()> {
    let device = out.buffer().device();
    device.bind()?;
    let kind = match weight.plane {
        Plane::F16 => cudaDataType_t::CUDA_R_16F,
        Plane::Bf16 => cudaDataType_t::CUDA_R_16BF,
    };
    let mut products = vec![(&x.high, &weight.high)];
    products.extend(x.low.as_ref().map(|low| (low, &weight.high)));
    products.extend(weight.low.as_ref().map(|low| (&x.high, low)));
    let step = if x.low.is_some() { BLAS_COLUMNS } else { weight.stride };
    let mut beta = 0.0;
    for (x, w) in products {
        for first in (0..weight.stride).step_by(step) {
            let (columns, at) = (step.min(weight.stride - first), 2 * first as u64);
            let places = [x.pointer() + at, w.pointer() + at, out.buffer().pointer()];
            // SAFETY: w is [n][k], x [rows][k] and out [rows][n], all freed in the order of the stream, and the columns
            // from `first` on lie within k.
            unsafe { blas.product([out.rows, out.cols, columns], weight.stride, kind, places, beta) }
                .map_err(|e| failed(device, e))?;
            beta = 1.0;
        }
    }
    if x.of_rows.is_some() {
        return eight_bits::scale_outputs(out, x.of_rows.as_ref(), None, bias);
    }
    let Some(bias) = bias else { return Ok(()) };
    let launch = device.launch("add_row", [out.rows, out.cols.div_ceil(BLOCK), 1], BLOCK);
    launch.buffer(out.buffer()).buffer(bias).u64(out.rows * out.cols).u32(out.cols).go()
}

/// X' `moved`.
fn blas_cross(blas: &Blas, x: &Tensor, moved: &Buffer, out: &Buffer) -> Done<()> {
    let device = out.device();
    device.bind()?;
    // SAFETY: x and moved are [rows][n] and out [n][n]; all are freed in the order of the stream.
    unsafe { blas.across(x.rows, x.cols, [x.buffer().pointer(), moved.pointer(), out.pointer()]) }
        .map_err(|e| failed(device, e))
}
