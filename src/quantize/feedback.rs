//! GPTQ (Frantar et al., 2210.17323) on levels that something else stores: a block format fixes scales and offsets,
//! columns are rounded to its levels one after another, and what each rounding breaks is mended in the columns not yet
//! taken. Afterwards, coordinate descent over the codes.
//!
//! The file stays what it was, in type, size and layout; only the codes are chosen better.

use std::ops::Range;

use rayon::prelude::*;

use super::curvature::{Curvature, CurvatureError, GptqOptions};
use super::grid::{Grid, LANES, Lane};
use super::order::Order;
use crate::backend::Gram;
use crate::backend::cpu::Cpu;
use crate::backend::solver::{BLOCK, block_end};
use crate::num::e4m3;
use crate::num::matmul::{View, product};
use crate::num::simd::{round, vectorized};
use crate::scheme::{GroupSize, Scheme};

/// What may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeedbackOptions {
    /// With `refit`, `Activation` is taken for `GroupAware`: columns of a block stay together.
    pub order: Order,
    /// Share of the mean Hessian diagonal that is added to the diagonal.
    pub damp_percent: f64,
    /// How much damping grows when the Hessian cannot be factored.
    pub damp_auto_increment: f64,
    /// Levels of a block are fitted when the pass reaches it, to the weights as mended by then; otherwise to the
    /// original ones, before the pass.
    pub refit: bool,
    /// Sweeps of coordinate descent over the codes.
    pub sweeps: usize,
}

/// What had the least loss on the layers of the demo checkpoint, for every type.
impl Default for FeedbackOptions {
    fn default() -> Self {
        Self { order: Order::GroupAware, damp_percent: 0.01, damp_auto_increment: 0.01, refit: true, sweeps: 3 }
    }
}

/// Factors a Hessian for [`feedback`] with blocks of `block` columns. `gram` is in host memory, `diagonal` its diagonal.
pub fn curvature(
    gram: &Gram,
    diagonal: &[f64],
    block: usize,
    options: &FeedbackOptions,
) -> Result<Curvature, CurvatureError> {
    let group_size = i32::try_from(block).ok().and_then(GroupSize::new).unwrap_or(GroupSize::CHANNEL);
    let options = GptqOptions {
        scheme: Scheme { bits: 4, group_size, sym: true },
        order: if options.refit && options.order == Order::Activation { Order::GroupAware } else { options.order },
        static_groups: !options.refit,
        damp_percent: options.damp_percent,
        damp_auto_increment: options.damp_auto_increment,
        grid: Grid::Hessian,
        sweeps: options.sweeps,
        least_zero: 0,
    };
    Curvature::new(&Cpu, gram, diagonal, None, &options)
}

/// The whole numbers that codes stand for: a value is `scale * point + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Points {
    /// Every number from `low` to `high`; code `zero` is 0.
    Even { low: i32, high: i32, zero: i32 },
    /// Code by code, ascending.
    Table(&'static [i8; 16]),
    /// Floats of 8 bits, in steps of the smallest.
    E4m3,
}

/// The smallest E4M3 number is one part in so many.
pub const E4M3_STEPS: f32 = 512.0;

impl Points {
    /// The point of a code.
    pub fn point(self, code: u8) -> i32 {
        match self {
            Points::Even { zero, .. } => code as i32 - zero,
            Points::Table(points) => points[code as usize] as i32,
            Points::E4m3 => (e4m3::decode(code) * E4M3_STEPS) as i32,
        }
    }

    fn code(self, point: f32) -> u8 {
        match self {
            Points::Even { zero, .. } => (point as i32 + zero) as u8,
            Points::Table(points) => points.iter().take_while(|p| (**p as f32) < point).count() as u8,
            Points::E4m3 => e4m3::encode(point / E4M3_STEPS),
        }
    }
}

/// How a format lays levels over the columns of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layout {
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

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// `[rows, columns]`.
    pub codes: Vec<u8>,
    /// The blocks of the fits, `[rows, blocks]`; their own codes are void.
    pub bytes: Vec<u8>,
    /// Half of (w - q)' H (w - q), H damped, summed over rows; channels that never were anything but zero do not count.
    pub loss: f64,
}

/// Chooses codes for `weight` (`rows` x columns of the curvature, row-major). `fit` is given some columns and the weights
/// of some rows there, row-major.
///
/// # Panics
/// If sizes do not belong together, or `curvature` was not made by [`curvature`] with these options.
pub fn feedback<E: Send>(
    weight: &[f32],
    rows: usize,
    curvature: &Curvature,
    layout: Layout,
    options: &FeedbackOptions,
    fit: &(impl Fn(Range<usize>, &[f32]) -> Result<Fit, E> + Sync),
) -> Result<Solution, E> {
    let n = curvature.n;
    assert!(weight.len() == rows * n && n.is_multiple_of(layout.block) && layout.block.is_multiple_of(layout.run));
    let tiles: Vec<Tile> = weight
        .par_chunks(LANES * n)
        .map(|weight| {
            let mut tile = Tile::new(weight, curvature, layout);
            match layout.points {
                Points::Even { low, high, .. } => {
                    let (low, high) = (low as f32, high as f32);
                    let nearest = |x: f32| {
                        let x = if x < low { low } else { x };
                        round(if x > high { high } else { x })
                    };
                    tile.work(weight, options, fit, nearest)?;
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
                    tile.work(weight, options, fit, nearest)?;
                }
                Points::E4m3 => {
                    tile.work(weight, options, fit, |x| e4m3::round(x / E4M3_STEPS) * E4M3_STEPS)?;
                }
            }
            Ok(tile)
        })
        .collect::<Result<_, E>>()?;
    let mut out = Solution { codes: vec![0; rows * n], bytes: Vec::new(), loss: 0.0 };
    for (tile, codes) in tiles.iter().zip(out.codes.chunks_mut(LANES * n)) {
        for (lane, codes) in codes.chunks_exact_mut(n).enumerate() {
            out.loss += tile.loss[lane] as f64;
            for (points, &column) in tile.points.iter().zip(&curvature.sequence.columns) {
                codes[column] = layout.points.code(points[lane]);
            }
        }
        out.bytes.extend_from_slice(&tile.bytes);
    }
    Ok(out)
}

/// Scale, its inverse (0 for 0) and offset of a run.
#[derive(Clone)]
struct Levels {
    scale: Lane,
    inverse: Lane,
    offset: Lane,
}

impl Levels {
    #[inline(always)]
    fn value(&self, lane: usize, point: f32) -> f32 {
        self.scale[lane] * point + self.offset[lane]
    }

    #[inline(always)]
    fn steps(&self, lane: usize, w: f32) -> f32 {
        (w - self.offset[lane]) * self.inverse[lane]
    }
}

/// Up to [`LANES`] rows, a row a lane; columns in the order they are taken.
struct Tile<'a> {
    curvature: &'a Curvature,
    layout: Layout,
    rows: usize,
    original: Vec<Lane>,
    /// The chosen point of each column.
    points: Vec<Lane>,
    /// By run, in stored order.
    levels: Vec<Levels>,
    bytes: Vec<u8>,
    loss: Lane,
}

impl<'a> Tile<'a> {
    fn new(weight: &[f32], curvature: &'a Curvature, layout: Layout) -> Self {
        let n = curvature.n;
        let mut original = vec![[0.0; LANES]; n];
        for (lane, row) in weight.chunks_exact(n).enumerate() {
            for (w, &column) in original.iter_mut().zip(&curvature.sequence.columns) {
                w[lane] = row[column];
            }
        }
        let none = Levels { scale: [0.0; LANES], inverse: [0.0; LANES], offset: [0.0; LANES] };
        Self {
            curvature,
            layout,
            rows: weight.len() / n,
            original,
            points: vec![[0.0; LANES]; n],
            levels: vec![none; n / layout.run],
            bytes: Vec::new(),
            loss: [0.0; LANES],
        }
    }

    fn work<E>(
        &mut self,
        weight: &[f32],
        options: &FeedbackOptions,
        fit: &impl Fn(Range<usize>, &[f32]) -> Result<Fit, E>,
        nearest: impl Fn(f32) -> f32 + Copy,
    ) -> Result<(), E> {
        if !options.refit {
            let n = self.curvature.n;
            self.take(0..n, fit(0..n, weight)?);
        }
        self.compensate(options.refit.then_some(fit), nearest)?;
        for _ in 0..options.sweeps {
            self.sweep(nearest);
        }
        Ok(())
    }

    /// Takes up the levels of some columns.
    fn take(&mut self, columns: Range<usize>, fit: Fit) {
        let (run, n) = (self.layout.run, self.curvature.n);
        let (first, runs) = (columns.start / run, columns.len() / run);
        assert_eq!(fit.levels.len(), self.rows * runs);
        for (lane, levels) in fit.levels.chunks_exact(runs).enumerate() {
            for (to, &(scale, offset)) in self.levels[first..].iter_mut().zip(levels) {
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

    /// Fits the block whose columns are taken from `first` on to the weights `w`.
    fn refit<E>(
        &mut self,
        first: usize,
        w: &[Lane],
        fit: &impl Fn(Range<usize>, &[f32]) -> Result<Fit, E>,
    ) -> Result<(), E> {
        let block = self.layout.block;
        let columns = &self.curvature.sequence.columns[first..first + block];
        let start = columns[0] / block * block;
        let mut weights = vec![0.0; self.rows * block];
        for (w, &column) in w[first..].iter().zip(columns) {
            for (lane, row) in weights.chunks_exact_mut(block).enumerate() {
                row[column - start] = w[lane];
            }
        }
        let fit = fit(start..start + block, &weights)?;
        self.take(start..start + block, fit);
        Ok(())
    }

    /// GPTQ's pass.
    fn compensate<E>(
        &mut self,
        fit: Option<&impl Fn(Range<usize>, &[f32]) -> Result<Fit, E>>,
        nearest: impl Fn(f32) -> f32 + Copy,
    ) -> Result<(), E> {
        let (n, factor) = (self.curvature.n, &self.curvature.host().u);
        let sequence = &self.curvature.sequence;
        let mut w = self.original.clone();
        let mut errors = vec![[0.0; LANES]; BLOCK];
        let mut start = 0;
        while start < n {
            let end = block_end(&sequence.groups, start, fit.is_none());
            for i in start..end {
                if let Some(fit) = fit
                    && (i == 0 || sequence.groups[i - 1] != sequence.groups[i])
                {
                    self.refit(i, &w, fit)?;
                }
                let column = sequence.columns[i];
                let u = &factor[i * n..(i + 1) * n];
                let levels = &self.levels[column / self.layout.run];
                let counted = if self.curvature.dead[column] { 0.0 } else { 0.5 };
                let (done, rest) = w.split_at_mut(i + 1);
                vectorized(|| {
                    let error = &mut errors[i - start];
                    for l in 0..LANES {
                        let point = nearest(levels.steps(l, done[i][l]));
                        self.points[i][l] = point;
                        error[l] = (done[i][l] - levels.value(l, point)) / u[i];
                        self.loss[l] += counted * error[l] * error[l];
                    }
                    for (w, &u) in rest.iter_mut().zip(&u[i + 1..end]) {
                        for l in 0..LANES {
                            w[l] -= error[l] * u;
                        }
                    }
                });
            }
            if end < n {
                let block = View::new(&factor[start * n + end..], end - start, n - end, n).t();
                let errors = View::new(errors.as_flattened(), end - start, LANES, LANES);
                product(w[end..].as_flattened_mut(), LANES, true, -1.0, block, errors);
            }
            start = end;
        }
        Ok(())
    }

    /// One sweep of coordinate descent on (w - q)' H (w - q): the best code of each column, given all others.
    fn sweep(&mut self, nearest: impl Fn(f32) -> f32 + Copy) {
        let n = self.curvature.n;
        let h = &self.curvature.host().h;
        let columns = &self.curvature.sequence.columns;
        // gradient = H (w - q), kept up to date as q changes.
        let residual: Vec<Lane> = (0..n).map(|i| self.residual(i)).collect();
        let mut gradient = vec![[0.0; LANES]; n];
        let residual = View::new(residual.as_flattened(), n, LANES, LANES);
        product(gradient.as_flattened_mut(), LANES, false, 1.0, View::new(h, n, n, n), residual);
        let mut changes = vec![[0.0f32; LANES]; BLOCK];
        for start in (0..n).step_by(BLOCK) {
            let end = (start + BLOCK).min(n);
            vectorized(|| {
                for i in start..end {
                    let levels = &self.levels[columns[i] / self.layout.run];
                    let inverse = 1.0 / h[i * n + i];
                    let change = &mut changes[i - start];
                    for l in 0..LANES {
                        let old = levels.value(l, self.points[i][l]);
                        let point = nearest(levels.steps(l, old + gradient[i][l] * inverse));
                        self.points[i][l] = point;
                        change[l] = levels.value(l, point) - old;
                    }
                    for (g, &h) in gradient[start..end].iter_mut().zip(&h[i * n + start..i * n + end]) {
                        for l in 0..LANES {
                            g[l] -= change[l] * h;
                        }
                    }
                }
            });
            let moved = View::new(changes.as_flattened(), end - start, LANES, LANES);
            for part in [0..start, end..n] {
                if !part.is_empty() {
                    let rows = View::new(&h[part.start * n + start..], part.len(), end - start, n);
                    product(gradient[part].as_flattened_mut(), LANES, true, -1.0, rows, moved);
                }
            }
        }
        self.loss = [0.0; LANES];
        for (i, g) in gradient.iter().enumerate().filter(|(i, _)| !self.curvature.dead[columns[*i]]) {
            let d = self.residual(i);
            (0..LANES).for_each(|l| self.loss[l] += 0.5 * d[l] * g[l]);
        }
    }

    fn residual(&self, i: usize) -> Lane {
        let levels = &self.levels[self.curvature.sequence.columns[i] / self.layout.run];
        let mut out = [0.0; LANES];
        (0..LANES).for_each(|l| out[l] = self.original[i][l] - levels.value(l, self.points[i][l]));
        out
    }
}
