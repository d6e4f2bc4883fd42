//! E4M3 under scales that are given: those of whole weights, output channels or blocks. Consumers share them among rows
//! and linears, so the pass leaves them alone, and columns can be taken in any order.

use std::convert::Infallible;
use std::ops::Range;

use super::{Grid, LANES, Lane, lanes};
use crate::num::e4m3;

/// The scales of a tile's rows.
pub struct E4m3Grid<'a> {
    /// The stored column of each column as taken.
    columns: &'a [usize],
    /// Stored columns that share scales.
    width: usize,
    /// Scales and their inverses (0 for 0), by run of `width` stored columns.
    scales: Vec<(Lane, Lane)>,
}

impl<'a> E4m3Grid<'a> {
    /// For `rows` of a weight whose tiles of `tile` rows and columns have `scales`, row by row of tiles. The rows are
    /// [`LANES`] at most.
    pub fn new(columns: &'a [usize], rows: Range<usize>, tile: (usize, usize), scales: &[f32]) -> Self {
        let across = columns.len().div_ceil(tile.1);
        let of_run = |run: usize| {
            let mut scale = [0.0; LANES];
            rows.clone().zip(&mut scale).for_each(|(row, scale)| *scale = scales[row / tile.0 * across + run]);
            (scale, lanes(|l| if scale[l] == 0.0 { 0.0 } else { 1.0 / scale[l] }))
        };
        Self { columns, width: tile.1, scales: (0..across).map(of_run).collect() }
    }
}

impl Grid for E4m3Grid<'_> {
    type Error = Infallible;
    const RESCALES: bool = false;
    const KEEPS_DEAD: bool = true;

    fn fit(&mut self, _: Range<usize>, _: &[Lane]) -> Result<(), Infallible> {
        Ok(())
    }

    #[inline(always)]
    fn nearest(&self, i: usize, w: &Lane) -> Lane {
        let (_, inverse) = &self.scales[self.columns[i] / self.width];
        lanes(|l| e4m3::round(w[l] * inverse[l]))
    }

    #[inline(always)]
    fn values(&self, i: usize, codes: &Lane) -> Lane {
        let (scale, _) = &self.scales[self.columns[i] / self.width];
        // The sum makes a negative zero positive.
        lanes(|l| scale[l] * codes[l] + 0.0)
    }

    #[inline(always)]
    fn steps(&self, _: usize, codes: &Lane) -> Lane {
        *codes
    }

    #[inline(always)]
    fn rescale(&mut self, _: usize, _: &Lane, _: &Lane) -> Lane {
        [0.0; LANES]
    }

    fn byte(&self, code: f32) -> u8 {
        e4m3::encode(code)
    }
}
