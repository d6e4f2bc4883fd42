//! Products with weights, and the sums that calibration gathers.

use super::super::Done;
use super::super::tensor::Tensor;
use super::weights::DeviceMatrix;
use super::{Buffer, Precision};

/// x W' + bias for a weight of `rows` outputs.
pub fn linear(
    x: &Tensor,
    weight: &DeviceMatrix,
    rows: usize,
    bias: Option<&Buffer>,
    precision: Precision,
) -> Done<Tensor> {
    let _ = (weight, rows, bias, precision);
    Err(x.buffer().device().failed("to be written"))
}

/// The lower triangle of X'X in f32, on the device of `x`.
pub fn gram(x: &Tensor) -> Done<Buffer> {
    Err(x.buffer().device().failed("to be written"))
}

/// sum += part, f64 += f32, element by element; both on one device.
pub fn accumulate(sum: &Buffer, part: &Buffer) -> Done<()> {
    let _ = part;
    Err(sum.device().failed("to be written"))
}

/// X'(O - X) in f32, on the device of `x`.
pub fn cross(x: &Tensor, original: &Tensor) -> Done<Buffer> {
    let _ = original;
    Err(x.buffer().device().failed("to be written"))
}
