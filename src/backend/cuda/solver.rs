//! GPTQ on the device.

use super::super::solver::{Factor as AnyFactor, Ordered, Rounding, Solution, Solver};
use super::super::{Done, Drift, Gram, Matrix};
use super::{Buffer, Cuda};

/// What the solver keeps of a Hessian.
pub struct Factor {
    /// Upper triangle U, f32 row-major, in order.
    pub u: Buffer,
    /// The whole damped H in order, where sweeps want it.
    pub h: Option<Buffer>,
    /// The drift in order.
    pub drift: Option<Buffer>,
}

/// The diagonal of a lower triangle of `n` rows.
pub fn diagonal(lower: &Buffer, n: usize) -> Done<Vec<f64>> {
    let _ = n;
    Err(lower.device().failed("to be written"))
}

impl Solver for Cuda {
    fn factor(
        &self,
        gram: &Gram,
        drift: Option<&Drift>,
        order: Ordered,
        scale: f64,
        diagonal: &[f64],
        whole: bool,
    ) -> Done<Option<AnyFactor>> {
        let _ = (gram, drift, order, scale, diagonal, whole);
        Err(self.first().failed("to be written"))
    }

    fn solve(&self, weight: &Matrix, factor: &AnyFactor, order: Ordered, rounding: &Rounding) -> Done<Solution> {
        let _ = (weight, factor, order, rounding);
        Err(self.first().failed("to be written"))
    }
}
