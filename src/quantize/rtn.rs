//! Round to nearest: the control method. Each group's grid is chosen, each weight rounded, nothing mended.

use super::grid::{Grid, candidates};
use super::order::{Order, sequence};
use super::tile::{self, Tile};
use super::{Quantized, Report};
use crate::backend::solver::Rounding;
use crate::scheme::Scheme;

/// Quantizes `weight` (`rows` x `cols`, row-major). `diagonal`, that of the Hessian, serves the Hessian grid; zero
/// points are at least `least_zero`.
pub fn rtn(
    weight: &[f32],
    rows: usize,
    cols: usize,
    diagonal: Option<&[f64]>,
    scheme: Scheme,
    grid: Grid,
    least_zero: u8,
) -> (Quantized, Report) {
    let diag: Vec<f64> = diagonal.map_or_else(|| vec![1.0; cols], <[f64]>::to_vec);
    // A channel that calibration never saw is not known to be dead: its weights are rounded like the rest.
    let dead = vec![false; cols];
    let importance: Vec<f32> = diag.iter().map(|d| *d as f32).collect();
    let sequence = sequence(Order::Natural, false, &diag, scheme.group_size);
    let ones = vec![1.0; cols];
    let rounding = Rounding {
        scheme,
        static_groups: true,
        sweeps: 0,
        least_zero,
        candidates: &candidates(scheme, grid),
        importance: if grid == Grid::Hessian { &importance } else { &ones },
    };
    tile::quantize(weight, rows, cols, scheme, &sequence, &dead, |tile: &mut Tile| {
        tile.round_to_nearest(&importance, &rounding);
    })
}
