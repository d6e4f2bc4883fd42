//! Integers of a few bits with a scale and a zero point for each group.

use std::convert::Infallible;
use std::ops::Range;

use half::f16;

use super::{Grid, LANES, Lane, lanes};
use crate::backend::solver::Rounding;
use crate::num::simd::vectorized;
use crate::quantize::order::Sequence;
use crate::quantize::pass::{RowTile, codes, loss, tiles};
use crate::quantize::scale_search::{IntegerLevels, levels, round_scales};
use crate::quantize::{Quantized, Report};

/// The grids of the groups of a tile's rows.
pub struct IntegerGrid<'a> {
    /// The group of each column.
    groups: &'a [usize],
    rounding: &'a Rounding<'a>,
    /// The largest code.
    top: f32,
    /// By group.
    levels: Vec<IntegerLevels>,
}

impl<'a> IntegerGrid<'a> {
    /// Grids that are yet to be fitted.
    fn new(groups: &'a [usize], rounding: &'a Rounding<'a>) -> Self {
        let empty = IntegerLevels { scale: [1.0; LANES], zero: [0.0; LANES] };
        let count = rounding.scheme.group_size.count(groups.len());
        Self { groups, rounding, top: rounding.scheme.top() as f32, levels: vec![empty; count] }
    }
}

impl Grid for IntegerGrid<'_> {
    type Error = Infallible;
    const RESCALES: bool = true;
    const KEEPS_DEAD: bool = false;

    fn fit(&mut self, taken: Range<usize>, w: &[Lane]) -> Result<(), Infallible> {
        let Rounding { scheme, candidates, importance, least_zero, .. } = *self.rounding;
        let search = |columns: &[Lane], importance: &[f32]| {
            vectorized(|| levels(columns, importance, scheme, candidates, least_zero))
        };
        if let [group, others @ ..] = &self.groups[taken.clone()]
            && others.iter().all(|other| other == group)
        {
            self.levels[*group] = search(&w[taken.clone()], &importance[taken]);
            return Ok(());
        }
        for (g, found) in self.levels.iter_mut().enumerate() {
            let members = taken.clone().filter(|&i| self.groups[i] == g);
            let (columns, weights): (Vec<Lane>, Vec<f32>) = members.map(|i| (w[i], importance[i])).unzip();
            if !columns.is_empty() {
                *found = search(&columns, &weights);
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn nearest(&self, i: usize, w: &Lane) -> Lane {
        let levels = &self.levels[self.groups[i]];
        lanes(|l| levels.code(l, w[l], self.top))
    }

    #[inline(always)]
    fn values(&self, i: usize, codes: &Lane) -> Lane {
        let levels = &self.levels[self.groups[i]];
        lanes(|l| levels.value(l, codes[l]))
    }

    #[inline(always)]
    fn steps(&self, i: usize, codes: &Lane) -> Lane {
        let levels = &self.levels[self.groups[i]];
        lanes(|l| codes[l] - levels.zero[l])
    }

    /// Taken where it helps after rounding to f16.
    #[inline(always)]
    fn rescale(&mut self, i: usize, slope: &Lane, curve: &Lane) -> Lane {
        let levels = &mut self.levels[self.groups[i]];
        let old = levels.scale;
        let mut scale = lanes(|l| if curve[l] > 0.0 { old[l] + slope[l] / curve[l] } else { old[l] });
        round_scales(&mut scale);
        let mut change = [0.0f32; LANES];
        for l in 0..LANES {
            let delta = scale[l] - old[l];
            if delta * delta * curve[l] < 2.0 * delta * slope[l] {
                levels.scale[l] = scale[l];
                change[l] = delta;
            }
        }
        change
    }

    fn byte(&self, code: f32) -> u8 {
        code as u8
    }
}

/// Cuts a weight (`rows` x columns of the sequence, row-major) into tiles, lets `work` choose codes, levels and loss, and
/// puts the result together in stored column order.
pub fn quantize(
    weight: &[f32],
    rows: usize,
    sequence: &Sequence,
    dead: &[bool],
    rounding: &Rounding,
    work: impl Fn(&mut RowTile<IntegerGrid>) -> Result<(), Infallible> + Sync,
) -> (Quantized, Report) {
    let n = sequence.columns.len();
    let grid = |_: Range<usize>| IntegerGrid::new(&sequence.groups, rounding);
    let Ok(tiles) = tiles(weight, sequence, dead, grid, work);
    let group_count = rounding.scheme.group_size.count(n);
    let mut out = Quantized {
        rows,
        cols: n,
        scheme: rounding.scheme,
        codes: codes(&tiles),
        scales: vec![f16::ZERO; group_count * rows],
        zeros: vec![0; group_count * rows],
        g_idx: vec![0; n],
    };
    for (&column, &group) in sequence.columns.iter().zip(&sequence.groups) {
        out.g_idx[column] = group as u32;
    }
    for (t, tile) in tiles.iter().enumerate() {
        for (g, levels) in tile.grid.levels.iter().enumerate() {
            for lane in 0..LANES.min(rows - t * LANES) {
                let at = g * rows + t * LANES + lane;
                out.scales[at] = f16::from_f32(levels.scale[lane]);
                out.zeros[at] = levels.zero[lane] as u8;
            }
        }
    }
    (out, Report { loss: loss(&tiles) })
}
