//! Products with signed bytes and with E4M3 numbers.
//!
//! Bytes whose inputs are bytes as well are multiplied as integers. All else goes through the products of 16-bit planes:
//! both kinds of numbers fit those exactly, and scales are applied to the outputs; only where scales change along a row
//! do weights become the sum of two planes, as those of 32 bits do.

use std::sync::Arc;

use super::super::Done;
use super::super::tensor::Tensor;
use super::super::weight::Inputs;
use super::ggml::by_panels;
use super::linear::{BIG_TILE, FEW_ROWS, GEMV_ROWS, Planes, SMALL_ROWS, SMALL_TILE, dense, gemv_grid};
use super::weights::{Bytes, Floats, Plane, UNIT};
use super::{BLOCK, Buffer, Device, Precision, floats as fresh};

/// Dynamic shared memory of the products of bytes for many rows.
const SHARED: usize = 64 << 10;

/// How inputs find their scale, as the kernels have it, with what is given.
fn kind(inputs: Inputs) -> (i32, f32, i32) {
    match inputs {
        Inputs::Float | Inputs::Token | Inputs::Group(_) => (0, 0.0, 0),
        Inputs::TokenAsymmetric => (1, 0.0, 0),
        Inputs::Tensor { scale, zero } => (2, scale, zero),
    }
}

/// The plane that weights go to, for inputs that are not rounded.
fn plane(precision: Precision) -> (Plane, &'static str, &'static str) {
    match precision {
        Precision::Double => (Plane::Bf16, "decode_int8_bf16", "decode_fp8_bf16"),
        Precision::Single => (Plane::F16, "decode_int8_f16", "decode_fp8_f16"),
    }
}

/// Fresh memory for the planes of some rows.
fn planes(device: &Arc<Device>, plane: Plane, count: usize, rows: usize, cols: usize) -> Done<Planes> {
    let stride = cols.next_multiple_of(UNIT);
    let high = device.alloc(rows * stride * 2)?;
    let low = if count == 2 { Some(device.alloc(rows * stride * 2)?) } else { None };
    Ok(Planes { plane, high, low, stride, of_rows: None })
}

/// Applies what was left out of the products, and adds the bias.
pub(super) fn scale_outputs(
    out: &Tensor,
    of_rows: Option<&Buffer>,
    of_outputs: Option<&Buffer>,
    bias: Option<&Buffer>,
) -> Done<()> {
    let grid = [out.rows, out.cols.div_ceil(BLOCK), 1];
    let launch = out.buffer().device().launch("scale_outputs", grid, BLOCK).buffer(out.buffer());
    launch.optional(of_rows).optional(of_outputs).optional(bias).u32(out.cols).go()
}

/// `out` = x W' + bias for W in signed bytes.
pub fn bytes(x: &Tensor, w: &Bytes, bias: Option<&Buffer>, precision: Precision, out: &Tensor) -> Done<()> {
    let (device, n, cols) = (x.buffer().device(), out.cols, x.cols);
    let (segment, width) = (w.inputs.segment(cols), w.segments * w.padded);
    if w.inputs == Inputs::Float {
        let (plane, kernel, _) = plane(precision);
        let decode = |first: usize, rows: usize| {
            let weight = planes(device, plane, 1, rows, cols)?;
            let launch = device.launch(kernel, [rows, weight.stride.div_ceil(BLOCK), 1], BLOCK);
            let launch = launch.buffer_at(&w.values, first * width).buffer(&weight.high).u32(cols);
            launch.u32(segment).u32(w.padded).u32(width).u32(weight.stride).go()?;
            Ok(weight)
        };
        by_panels(cols * 2, None, out, decode, |weight, bias, out| dense(x, weight, bias, precision, out))?;
        return scale_outputs(out, None, Some(&w.scales), bias);
    }
    let group = w.inputs.group(cols);
    let (kind, scale, zero) = kind(w.inputs);
    let q = device.alloc(x.rows * width)?;
    let (scales, zeros) = (device.alloc(x.rows * w.segments * 4)?, device.alloc(x.rows * w.segments * 4)?);
    let launch = device.launch("round_int8", [x.rows, cols.div_ceil(group), 1], BLOCK).buffer(x.buffer());
    let launch = launch.buffer(&q).buffer(&scales).buffer(&zeros).u32(cols).u32(group).u32(segment);
    launch.u32(w.padded).i32(kind).f32(scale).i32(zero).go()?;

    // All of these give the same bits.
    let (kernel, grid, threads, shared) = if x.rows <= GEMV_ROWS {
        ("gemv_int8", [n.div_ceil(4), 1, 1], 128, 0)
    } else if x.rows <= SMALL_ROWS {
        ("gemm_int8_small", [x.rows.div_ceil(SMALL_TILE), n.div_ceil(32), 1], 128, 0)
    } else {
        let kernel = if w.segments == 1 { "gemm_int8" } else { "gemm_int8_segments" };
        (kernel, [x.rows.div_ceil(BIG_TILE), n.div_ceil(BIG_TILE), 1], BLOCK, SHARED)
    };
    let launch = device.launch(kernel, grid, threads).shared(shared).buffer(&q).buffer(&w.values);
    let launch = launch.buffer(&scales).buffer(&zeros).buffer(&w.scales).optional(w.sums.as_ref()).optional(bias);
    launch.buffer(out.buffer()).u32(x.rows).u32(n).u32(w.segments).u32(w.padded).go()
}

/// Inputs rounded to E4M3 numbers: by themselves and one scale a row, or times their scales.
fn rounded(x: &Tensor, inputs: Inputs, apart: bool) -> Done<(Tensor, Option<Buffer>)> {
    let device = x.buffer().device();
    let out = Tensor::cuda(x.rows, x.cols, fresh(device, x.rows, x.cols)?);
    let scales = if apart { Some(fresh(device, x.rows, 1)?) } else { None };
    let group = inputs.group(x.cols);
    let (kind, scale, _) = kind(inputs);
    let launch = device.launch("round_fp8", [x.rows, x.cols.div_ceil(group), 1], BLOCK).buffer(x.buffer());
    let launch = launch.buffer(out.buffer()).optional(scales.as_ref()).u32(x.cols).u32(group);
    // Without zero points a range has no more to tell than its largest magnitude.
    launch.i32(if kind == 2 { 2 } else { 0 }).f32(scale).go()?;
    Ok((out, scales))
}

/// `out` = x W' + bias for W in E4M3.
pub fn floats(x: &Tensor, w: &Floats, bias: Option<&Buffer>, precision: Precision, out: &Tensor) -> Done<()> {
    let (device, n, cols) = (x.buffer().device(), out.cols, x.cols);
    let (few, rounding) = (x.rows <= FEW_ROWS, w.inputs != Inputs::Float);
    // One scale a row and one an output leave plain E4M3 numbers, which a 16-bit plane holds exactly.
    let apart = rounding && !few && w.of_outputs.is_some() && !matches!(w.inputs, Inputs::Group(_));
    let made = if rounding { Some(rounded(x, w.inputs, apart)?) } else { None };
    let (x, of_rows) = match &made {
        Some((x, scales)) => (x, scales.as_ref()),
        None => (x, None),
    };
    if few {
        let launch = device.launch("gemv_fp8", gemv_grid(x.rows, n, 4), 128).buffer(&w.values).buffer(&w.scales);
        let launch = launch.buffer(x.buffer()).optional(bias).buffer(out.buffer());
        return launch.u32(x.rows).u32(n).u32(cols).u32(w.tile.0).u32(w.tile.1).go();
    }
    let precision = match (apart, rounding) {
        (true, _) => Precision::Single,
        // A scale times an E4M3 number needs more bits than one plane has, and the artifact rounds only once.
        (false, true) => Precision::Double,
        (false, false) => precision,
    };
    let multiply = |weight: &Planes, bias: Option<&Buffer>, out: &Tensor| dense(x, weight, bias, precision, out);
    if w.of_outputs.is_none() {
        let decode = |first: usize, rows: usize| {
            let weight = planes(device, Plane::Bf16, 2, rows, cols)?;
            let launch = device.launch("decode_fp8_planes", [rows, weight.stride.div_ceil(BLOCK), 1], BLOCK);
            let launch = launch.buffer_at(&w.values, first * cols).buffer(&w.scales).buffer(&weight.high);
            let launch = launch.optional(weight.low.as_ref()).u32(first).u32(cols);
            launch.u32(w.tile.0).u32(w.tile.1).u32(weight.stride).go()?;
            Ok(weight)
        };
        return by_panels(cols * 4, bias, out, decode, multiply);
    }
    let (plane, _, kernel) = plane(precision);
    let decode = |first: usize, rows: usize| {
        let weight = planes(device, plane, 1, rows, cols)?;
        let launch = device.launch(kernel, [rows, weight.stride.div_ceil(BLOCK), 1], BLOCK);
        let launch = launch.buffer_at(&w.values, first * cols).buffer(&weight.high);
        launch.u32(cols).u32(weight.stride).go()?;
        Ok(weight)
    };
    by_panels(cols * 2, None, out, decode, multiply)?;
    scale_outputs(out, of_rows, w.of_outputs.as_ref(), bias)
}
