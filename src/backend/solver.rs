//! GPTQ's arithmetic on a device that has its own: what `quantize` decides goes in, codes come out. The
//! mathematics is that of `quantize::pass`, which is the reference.

use super::{Done, Drift, Gram, Matrix, cuda};
use crate::scheme::Scheme;

/// The order in which columns are taken.
#[derive(Clone, Copy, Debug)]
pub struct Ordered<'a> {
    /// `columns[i]` is the stored column taken i-th.
    pub columns: &'a [usize],
    /// `groups[i]` is its group.
    pub groups: &'a [usize],
    /// Stored columns whose weights count as zero.
    pub dead: &'a [bool],
}

/// Columns between two updates of all that follow.
pub const BLOCK: usize = 128;

/// Where a block of columns that begins at `start` ends: where no group is cut, so that a group's grid sees weights
/// that are up to date, unless that may be `anywhere` or the group is longer than a block.
pub fn block_end(groups: &[usize], start: usize, anywhere: bool) -> usize {
    let furthest = (start + BLOCK).min(groups.len());
    if anywhere || furthest == groups.len() {
        return furthest;
    }
    (start + 1..=furthest).rev().find(|&i| groups[i] != groups[i - 1]).unwrap_or(furthest)
}

/// One way to set the levels of a group; see `quantize::scale_search`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Factor of the range.
    pub shrink: f32,
    /// 1, or -1 for a mirrored grid.
    pub sign: f32,
    /// Moves an asymmetric zero point.
    pub shift: f32,
}

/// How weights are rounded.
#[derive(Clone, Debug)]
pub struct Rounding<'a> {
    pub scheme: Scheme,
    pub static_groups: bool,
    pub sweeps: usize,
    /// The smallest zero point allowed.
    pub least_zero: u8,
    /// In the order they are tried; the first is taken unless a later one has a smaller error.
    pub candidates: &'a [Candidate],
    /// Weight of each ordered column in a candidate's error.
    pub importance: &'a [f32],
}

/// A Hessian's inverse factor, where the solver keeps it.
pub struct Factor(pub(super) cuda::solver::Factor);

/// A quantized linear as the solver gives it back.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// `[rows, columns]` in stored order.
    pub codes: Vec<u8>,
    /// `[groups, rows]`, representable in f16.
    pub scales: Vec<f32>,
    /// `[groups, rows]`.
    pub zeros: Vec<u8>,
    /// Half of (w - q)' H (w - q), summed over rows.
    pub loss: f64,
}

/// A device's own GPTQ.
pub trait Solver {
    /// The factor U with H^-1 = U'U of `scale X'X` in the order given, with `diagonal` (ordered) in place of its
    /// own; `None` where that is not positive definite. `scale` also goes for the drift. `whole` keeps H itself,
    /// which sweeps need.
    fn factor(
        &self,
        gram: &Gram,
        drift: Option<&Drift>,
        order: Ordered,
        scale: f64,
        diagonal: &[f64],
        whole: bool,
    ) -> Done<Option<Factor>>;

    /// Rounds one floating-point weight.
    fn solve(&self, weight: &Matrix, factor: &Factor, order: Ordered, rounding: &Rounding) -> Done<Solution>;
}
