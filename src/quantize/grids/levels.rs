//! Levels that something else stores: a block format fixes scales and offsets, the pass chooses codes among them.
//!
//! The file stays what it was, in type, size and layout; only the codes are chosen better.

use std::ops::Range;

use super::{Grid, LANES, Lane, lanes};
use crate::backend::{Drift, Gram};
use crate::num::simd::round;
use crate::quantize::curvature::{Curvature, CurvatureError, PassOptions};
use crate::quantize::order::Order;
use crate::quantize::pass::{RowTile, codes, loss, tiles};
use crate::scheme::GroupSize;

/// The whole numbers that codes stand for: a value is `scale * point + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Points {
    /// Every number from `low` to `high`; code `zero` is 0.
    Even { low: i32, high: i32, zero: i32 },
    /// Code by code, ascending.
    Table(&'static [i8; 16]),
}

impl Points {
    /// The point of a code.
    pub fn point(self, code: u8) -> i32 {
        match self {
            Points::Even { zero, .. } => code as i32 - zero,
            Points::Table(points) => points[code as usize] as i32,
        }
    }

    fn code(self, point: f32) -> u8 {
        match self {
            Points::Even { zero, .. } => (point as i32 + zero) as u8,
            Points::Table(points) => points.iter().take_while(|p| (**p as f32) < point).count() as u8,
        }
    }
}

/// How a format lays levels over the columns of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LevelLayout {
    /// What codes stand for.
    pub points: Points,
    /// Columns that share scale and offset.
    pub run: usize,
    /// Columns that are stored together: a whole number of runs.
    pub block: usize,
}

/// Levels for some rows and columns, and the blocks that store them.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// `[rows, runs]` scale and offset.
    pub levels: Vec<(f32, f32)>,
    /// `[rows, blocks]`, each of some bytes, where the format has such.
    pub bytes: Vec<u8>,
}

/// The codes that [`choose`] found.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// `[rows, columns]`.
    pub codes: Vec<u8>,
    /// The blocks of the fits, `[rows, blocks]`; their own codes are void.
    pub bytes: Vec<u8>,
    /// Half of (w - q)' H (w - q), H damped, summed over rows; channels that never were anything but zero do not count.
    pub loss: f64,
}

/// Factors a Hessian for [`choose`] with blocks of `block` columns, in host memory. The columns of a block stay together
/// unless groups are static: `Order::Activation` is taken for `Order::GroupAware`.
///
/// # Errors
/// When no damping makes the Hessian positive definite, or the device that has the sums fails.
pub fn curvature(
    gram: &Gram,
    diagonal: &[f64],
    drift: Option<&Drift>,
    block: usize,
    options: &PassOptions,
) -> Result<Curvature, CurvatureError> {
    let group_size = i32::try_from(block).ok().and_then(GroupSize::new).unwrap_or(GroupSize::CHANNEL);
    let together = !options.static_groups && options.order == Order::Activation;
    let order = if together { Order::GroupAware } else { options.order };
    Curvature::on_host(gram, diagonal, drift, group_size, &PassOptions { order, ..*options })
}

/// Chooses codes for `weight` (`rows` x columns of the curvature, row-major). `fit` is given some columns and the weights
/// of some rows there, row-major.
///
/// # Errors
/// Those of `fit`.
///
/// # Panics
/// If sizes do not belong together, or `curvature` was not made by [`curvature`] with these options.
pub fn choose<E: Send>(
    weight: &[f32],
    rows: usize,
    curvature: &Curvature,
    layout: LevelLayout,
    options: &PassOptions,
    fit: &(impl Fn(Range<usize>, &[f32]) -> Result<Fit, E> + Sync),
) -> Result<Chosen, E> {
    let n = curvature.n;
    assert!(weight.len() == rows * n && n.is_multiple_of(layout.block) && layout.block.is_multiple_of(layout.run));
    match layout.points {
        Points::Even { low, high, .. } => {
            let (low, high) = (low as f32, high as f32);
            let nearest = |x: f32| {
                let x = if x < low { low } else { x };
                round(if x > high { high } else { x })
            };
            with_points(weight, curvature, layout, options, fit, nearest)
        }
        Points::Table(points) => {
            let nearest = |x: f32| {
                let mut point = points[0] as f32;
                for pair in points.windows(2) {
                    let middle = (pair[0] as f32 + pair[1] as f32) / 2.0;
                    point = if x >= middle { pair[1] as f32 } else { point };
                }
                point
            };
            with_points(weight, curvature, layout, options, fit, nearest)
        }
    }
}

/// `nearest` is the point nearest to a number.
fn with_points<E: Send>(
    weight: &[f32],
    curvature: &Curvature,
    layout: LevelLayout,
    options: &PassOptions,
    fit: &(impl Fn(Range<usize>, &[f32]) -> Result<Fit, E> + Sync),
    nearest: impl Fn(f32) -> f32 + Copy + Sync + Send,
) -> Result<Chosen, E> {
    let sequence = &curvature.sequence;
    let none = RunLevels { scale: [0.0; LANES], inverse: [0.0; LANES], offset: [0.0; LANES] };
    let grid = |rows: Range<usize>| LevelGrid {
        columns: &sequence.columns,
        layout,
        rows: rows.len(),
        runs: vec![none.clone(); curvature.n / layout.run],
        bytes: Vec::new(),
        fit,
        nearest,
    };
    let tiles = tiles(weight, sequence, &curvature.dead, grid, |tile: &mut RowTile<_>| {
        tile.pass(curvature, options.static_groups, options.sweeps)
    })?;
    let bytes = tiles.iter().flat_map(|tile| &tile.grid.bytes).copied().collect();
    Ok(Chosen { codes: codes(&tiles), bytes, loss: loss(&tiles) })
}

/// Scale, its inverse (0 for 0) and offset of columns that share them.
#[derive(Clone)]
struct RunLevels {
    scale: Lane,
    inverse: Lane,
    offset: Lane,
}

/// The levels of a tile's rows; codes are points.
struct LevelGrid<'a, F, N> {
    /// The stored column of each column as taken.
    columns: &'a [usize],
    layout: LevelLayout,
    rows: usize,
    /// In stored order.
    runs: Vec<RunLevels>,
    /// The blocks of the rows, once there are any.
    bytes: Vec<u8>,
    fit: &'a F,
    nearest: N,
}

impl<F, N> LevelGrid<'_, F, N> {
    /// Takes over the levels of some stored columns.
    fn take(&mut self, columns: Range<usize>, fit: Fit) {
        let (run, n) = (self.layout.run, self.columns.len());
        let (first, runs) = (columns.start / run, columns.len() / run);
        assert_eq!(fit.levels.len(), self.rows * runs);
        for (lane, levels) in fit.levels.chunks_exact(runs).enumerate() {
            for (to, &(scale, offset)) in self.runs[first..].iter_mut().zip(levels) {
                to.scale[lane] = scale;
                to.inverse[lane] = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                to.offset[lane] = offset;
            }
        }
        let part = fit.bytes.len() / self.rows;
        if part == 0 {
            return;
        }
        let row = part * n / columns.len();
        self.bytes.resize(self.rows * row, 0);
        for (to, from) in self.bytes.chunks_exact_mut(row).zip(fit.bytes.chunks_exact(part)) {
            let at = columns.start * row / n;
            to[at..at + part].copy_from_slice(from);
        }
    }
}

impl<E: Send, F, N> Grid for LevelGrid<'_, F, N>
where
    F: Fn(Range<usize>, &[f32]) -> Result<Fit, E>,
    N: Fn(f32) -> f32,
{
    type Error = E;
    const RESCALES: bool = false;
    const KEEPS_DEAD: bool = true;

    fn fit(&mut self, taken: Range<usize>, w: &[Lane]) -> Result<(), E> {
        // Whole blocks that lie side by side when stored.
        let columns = &self.columns[taken.clone()];
        let (start, count) = (columns.iter().copied().min().unwrap_or(0), columns.len());
        let mut weights = vec![0.0; self.rows * count];
        for (w, &column) in w[taken].iter().zip(columns) {
            for (lane, row) in weights.chunks_exact_mut(count).enumerate() {
                row[column - start] = w[lane];
            }
        }
        let fit = (self.fit)(start..start + count, &weights)?;
        self.take(start..start + count, fit);
        Ok(())
    }

    #[inline(always)]
    fn nearest(&self, i: usize, w: &Lane) -> Lane {
        let run = &self.runs[self.columns[i] / self.layout.run];
        lanes(|l| (self.nearest)((w[l] - run.offset[l]) * run.inverse[l]))
    }

    #[inline(always)]
    fn values(&self, i: usize, codes: &Lane) -> Lane {
        let run = &self.runs[self.columns[i] / self.layout.run];
        lanes(|l| run.scale[l] * codes[l] + run.offset[l])
    }

    #[inline(always)]
    fn steps(&self, _: usize, codes: &Lane) -> Lane {
        *codes
    }

    /// Scales are as the blocks store them.
    #[inline(always)]
    fn rescale(&mut self, _: usize, _: &Lane, _: &Lane) -> Lane {
        [0.0; LANES]
    }

    fn byte(&self, code: f32) -> u8 {
        self.layout.points.code(code)
    }
}
