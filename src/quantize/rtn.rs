//! Round to nearest: the control method. Each group's grid is chosen, each weight rounded, nothing mended.

use super::grid::Grid;
use super::order::{Order, sequence};
use super::tile::{self, Tile};
use super::{Quantized, Report};
use crate::backend::Gram;
use crate::scheme::Scheme;

/// Quantizes `weight` (`rows` x `cols`, row-major). `gram` serves the Hessian grid; zero points are
/// at least `least_zero`.
pub fn rtn(
    weight: &[f32],
    rows: usize,
    cols: usize,
    gram: Option<&Gram>,
    scheme: Scheme,
    grid: Grid,
    least_zero: u8,
) -> (Quantized, Report) {
    let diag: Vec<f64> = match gram {
        Some(gram) => (0..cols).map(|i| gram.lower[i * cols + i] * 2.0 / gram.tokens.max(1) as f64).collect(),
        None => vec![1.0; cols],
    };
    // A channel that calibration never saw is not known to be dead: its weights are rounded like the rest.
    let dead = vec![false; cols];
    let importance: Vec<f32> = diag.iter().map(|d| *d as f32).collect();
    let sequence = sequence(Order::Natural, false, &diag, scheme.group_size);
    tile::quantize(weight, rows, cols, scheme, &sequence, &dead, |tile: &mut Tile| {
        tile.round_to_nearest(&importance, scheme, grid, least_zero);
    })
}
