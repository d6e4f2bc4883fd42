//! What formats round weights to, as GPTQ's pass sees it.

pub mod e4m3;
pub mod integer;
pub mod levels;

use std::ops::Range;

/// Rows that are quantized together, one to a vector lane.
pub const LANES: usize = 64;

/// One value for each row of a tile.
pub type Lane = [f32; LANES];

/// The numbers that the rows of a tile can be rounded to. Columns are named by their place in the order in which the
/// pass takes them. Codes are whole numbers or floats of few bits, and stay `f32` until the pass is over.
pub trait Grid {
    /// Why levels cannot be chosen.
    type Error: Send;

    /// Whether [`Self::rescale`] changes scales. Then the blocks of a sweep do not cut groups.
    const RESCALES: bool;

    /// What becomes of weights whose inputs never were anything but zero: they are rounded as they are and do not
    /// count in the loss. Otherwise they are set to zero.
    const KEEPS_DEAD: bool;

    /// Chooses the levels of the groups whose columns are `taken`, for the weights `w` of all columns. Nothing where
    /// levels are given.
    ///
    /// # Errors
    /// As the format says.
    fn fit(&mut self, taken: Range<usize>, w: &[Lane]) -> Result<(), Self::Error>;

    /// The codes whose values in column `i` are nearest to `w`.
    fn nearest(&self, i: usize, w: &Lane) -> Lane;

    /// The values of codes in column `i`.
    fn values(&self, i: usize, codes: &Lane) -> Lane;

    /// By how much those values grow with the scale.
    fn steps(&self, i: usize, codes: &Lane) -> Lane;

    /// Moves the scales of the group of column `i` by about `slope / curve`, where the loss changes by
    /// `delta² curve - 2 delta slope`, and returns by how much.
    fn rescale(&mut self, i: usize, slope: &Lane, curve: &Lane) -> Lane;

    /// A code as it is stored.
    fn byte(&self, code: f32) -> u8;
}

/// `of(lane)` for every lane.
#[inline(always)]
pub(super) fn lanes(of: impl Fn(usize) -> f32) -> Lane {
    let mut out = [0.0; LANES];
    (0..LANES).for_each(|l| out[l] = of(l));
    out
}
