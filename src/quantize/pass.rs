//! GPTQ (Frantar et al., 2210.17323) on any grid: columns are rounded one after another, and the error of each rounding
//! is compensated in the columns that follow. Afterwards, coordinate descent over the codes.
//!
//! One row to a vector lane; columns in the order in which they are taken.

use std::ops::Range;

use rayon::prelude::*;

use super::curvature::Curvature;
use super::grids::{Grid, LANES, Lane, lanes};
use super::order::Sequence;
use crate::backend::solver::{BLOCK, block_end};
use crate::num::matmul::{View, product};
use crate::num::simd::vectorized;

/// Up to [`LANES`] rows of one weight.
pub struct RowTile<'a, G> {
    sequence: &'a Sequence,
    /// By column: what an error there counts in the loss, 0.5 or nothing.
    counted: Vec<f32>,
    rows: usize,
    /// Weights as given, or where the drift moved them.
    original: Vec<Lane>,
    /// Codes, as floats.
    codes: Vec<Lane>,
    /// Levels, and what stores them.
    pub grid: G,
    /// Half of (w - q)' H (w - q), by row.
    loss: Lane,
}

/// Cuts a weight (rows of the columns of `sequence`) into tiles and lets `work` choose their codes. `grid` makes the grid
/// of some rows. Tiles are independent, so the number of threads does not matter.
///
/// # Errors
/// Those of `work`.
pub fn tiles<'a, G: Grid + Send>(
    weight: &[f32],
    sequence: &'a Sequence,
    dead: &[bool],
    grid: impl Fn(Range<usize>) -> G + Sync,
    work: impl Fn(&mut RowTile<'a, G>) -> Result<(), G::Error> + Sync,
) -> Result<Vec<RowTile<'a, G>>, G::Error> {
    let n = sequence.columns.len();
    let tile = |(t, weight): (usize, &[f32])| {
        let (first, rows) = (t * LANES, weight.len() / n);
        let mut tile = RowTile::new(weight, sequence, dead, grid(first..first + rows));
        work(&mut tile)?;
        Ok(tile)
    };
    weight.par_chunks(LANES * n).enumerate().map(tile).collect()
}

/// The codes of all rows, `[rows, columns]` in stored order.
pub fn codes<G: Grid>(tiles: &[RowTile<G>]) -> Vec<u8> {
    let count = tiles.iter().map(|tile| tile.rows * tile.codes.len()).sum();
    let mut out = vec![0; count];
    let mut rest = &mut out[..];
    for tile in tiles {
        let n = tile.codes.len();
        let (part, others) = rest.split_at_mut(tile.rows * n);
        for (lane, row) in part.chunks_exact_mut(n).enumerate() {
            for (codes, &column) in tile.codes.iter().zip(&tile.sequence.columns) {
                row[column] = tile.grid.byte(codes[lane]);
            }
        }
        rest = others;
    }
    out
}

/// The loss of all rows.
pub fn loss<G>(tiles: &[RowTile<G>]) -> f64 {
    tiles.iter().flat_map(|tile| &tile.loss[..tile.rows]).map(|loss| f64::from(*loss)).sum()
}

impl<'a, G: Grid> RowTile<'a, G> {
    fn new(weight: &[f32], sequence: &'a Sequence, dead: &[bool], grid: G) -> Self {
        let n = sequence.columns.len();
        let mut original = vec![[0.0; LANES]; n];
        for (lane, row) in weight.chunks_exact(n).enumerate() {
            for (w, &column) in original.iter_mut().zip(&sequence.columns) {
                w[lane] = if dead[column] && !G::KEEPS_DEAD { 0.0 } else { row[column] };
            }
        }
        let counted = sequence.columns.iter().map(|&c| if dead[c] && G::KEEPS_DEAD { 0.0 } else { 0.5 }).collect();
        Self {
            sequence,
            counted,
            rows: weight.len() / n,
            original,
            codes: vec![[0.0; LANES]; n],
            grid,
            loss: [0.0; LANES],
        }
    }

    /// Fits the levels of all groups to the weights and rounds to them; the loss is weighted by `importance`.
    ///
    /// # Errors
    /// Those of the fit.
    pub fn round_to_nearest(&mut self, importance: &[f32]) -> Result<(), G::Error> {
        let n = self.original.len();
        self.grid.fit(0..n, &self.original)?;
        vectorized(|| {
            for i in 0..n {
                self.codes[i] = self.grid.nearest(i, &self.original[i]);
                let error = self.residual(i);
                for l in 0..LANES {
                    self.loss[l] += 0.5 * importance[i] * error[l] * error[l];
                }
            }
        });
        Ok(())
    }

    /// Drift correction where the drift is known, GPTQ's pass, then `sweeps` of coordinate descent.
    ///
    /// # Errors
    /// Those of the fits.
    pub fn pass(&mut self, curvature: &Curvature, static_groups: bool, sweeps: usize) -> Result<(), G::Error> {
        self.follow_drift(curvature);
        self.compensate(curvature, static_groups)?;
        for _ in 0..sweeps {
            self.sweep(curvature);
        }
        Ok(())
    }

    /// Moves the weights to where their outputs on the drifted inputs are nearest to what they were:
    /// w' = w + (H^-1 D) w for each row, with D the drift.
    fn follow_drift(&mut self, curvature: &Curvature) {
        let factors = curvature.host();
        if factors.drift.is_empty() {
            return;
        }
        let n = self.original.len();
        let square = |m| View::new(m, n, n, n);
        let (mut a, mut b) = (vec![0.0; n * LANES], vec![0.0; n * LANES]);
        fn rows(values: &[f32]) -> View<'_> {
            View::new(values, values.len() / LANES, LANES, LANES)
        }
        product(&mut a, LANES, false, 1.0, square(&factors.drift), rows(self.original.as_flattened()));
        product(&mut b, LANES, false, 1.0, square(&factors.u), rows(&a));
        product(self.original.as_flattened_mut(), LANES, true, 1.0, square(&factors.u).t(), rows(&b));
    }

    /// GPTQ's single pass. The levels of a group are fitted when its first column is reached, to the weights as
    /// compensated by then, unless groups are static.
    fn compensate(&mut self, curvature: &Curvature, static_groups: bool) -> Result<(), G::Error> {
        let (n, factor, groups) = (self.original.len(), &curvature.host().u, &self.sequence.groups);
        if static_groups {
            self.grid.fit(0..n, &self.original)?;
        }
        let mut w = self.original.clone();
        let mut errors = vec![[0.0; LANES]; BLOCK];
        let mut start = 0;
        while start < n {
            let end = block_end(groups, start, static_groups);
            for i in start..end {
                if !static_groups && (i == 0 || groups[i - 1] != groups[i]) {
                    let last = (i..n).find(|&j| groups[j] != groups[i]).unwrap_or(n);
                    self.grid.fit(i..last, &w)?;
                }
                let u = &factor[i * n..(i + 1) * n];
                let counted = self.counted[i];
                let (done, rest) = w.split_at_mut(i + 1);
                vectorized(|| {
                    let codes = self.grid.nearest(i, &done[i]);
                    let value = self.grid.values(i, &codes);
                    let error = lanes(|l| (done[i][l] - value[l]) / u[i]);
                    for l in 0..LANES {
                        self.loss[l] += counted * error[l] * error[l];
                    }
                    subtract_products(&mut rest[..end - i - 1], &u[i + 1..end], &error);
                    (self.codes[i], errors[i - start]) = (codes, error);
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

    /// One sweep of coordinate descent on (w - q)' H (w - q): for each block, the best scale for the codes
    /// of each of its groups, then the best code of each column, given everything else.
    fn sweep(&mut self, curvature: &Curvature) {
        let n = self.original.len();
        let h = &curvature.host().h;
        // gradient = H (w - q), kept up to date as q changes.
        let residual: Vec<Lane> = (0..n).map(|i| self.residual(i)).collect();
        let residual = View::new(residual.as_flattened(), n, LANES, LANES);
        let mut gradient = vec![[0.0; LANES]; n];
        product(gradient.as_flattened_mut(), LANES, false, 1.0, View::new(h, n, n, n), residual);
        let mut start = 0;
        while start < n {
            let end = block_end(&self.sequence.groups, start, !G::RESCALES);
            let before: Vec<Lane> = (start..end).map(|i| self.values(i)).collect();
            vectorized(|| {
                if G::RESCALES {
                    self.rescale_groups(start..end, h, &mut gradient[start..end]);
                }
                for i in start..end {
                    let (old, inverse) = (self.values(i), 1.0 / h[i * n + i]);
                    let wanted = lanes(|l| old[l] + gradient[i][l] * inverse);
                    let codes = self.grid.nearest(i, &wanted);
                    let change = difference(&self.grid.values(i, &codes), &old);
                    self.codes[i] = codes;
                    subtract_products(&mut gradient[start..end], &h[i * n + start..i * n + end], &change);
                }
            });
            let moved: Vec<Lane> = (start..end).map(|i| difference(&self.values(i), &before[i - start])).collect();
            let moved = View::new(moved.as_flattened(), end - start, LANES, LANES);
            for part in [0..start, end..n] {
                if !part.is_empty() {
                    let rows = View::new(&h[part.start * n + start..], part.len(), end - start, n);
                    product(gradient[part].as_flattened_mut(), LANES, true, -1.0, rows, moved);
                }
            }
            start = end;
        }
        self.loss = [0.0; LANES];
        for (i, gradient) in gradient.iter().enumerate().filter(|(i, _)| self.counted[*i] != 0.0) {
            let d = self.residual(i);
            (0..LANES).for_each(|l| self.loss[l] += self.counted[i] * d[l] * gradient[l]);
        }
    }

    /// The least-squares scale of each group of `block` for its present codes. `gradient` is that of the block.
    #[inline(always)]
    fn rescale_groups(&mut self, block: Range<usize>, h: &[f32], gradient: &mut [Lane]) {
        let mut from = block.start;
        while from < block.end {
            let group = self.sequence.groups[from];
            let to = (from..block.end).find(|&j| self.sequence.groups[j] != group).unwrap_or(block.end);
            // A group longer than a block, or scattered, keeps its scale: only part of it is in sight.
            if self.sequence.groups.iter().filter(|&&g| g == group).count() == to - from {
                self.rescale(from..to, &block, h, gradient);
            }
            from = to;
        }
    }

    #[inline(always)]
    fn rescale(&mut self, group: Range<usize>, block: &Range<usize>, h: &[f32], gradient: &mut [Lane]) {
        let n = self.original.len();
        let steps: Vec<Lane> = group.clone().map(|i| self.grid.steps(i, &self.codes[i])).collect();
        let (mut slope, mut curve) = ([0.0f32; LANES], [0.0f32; LANES]);
        for (i, c) in group.clone().zip(&steps) {
            let mut hc = [0.0f32; LANES];
            for (c, &h) in steps.iter().zip(&h[i * n + group.start..i * n + group.end]) {
                for l in 0..LANES {
                    hc[l] += h * c[l];
                }
            }
            for l in 0..LANES {
                slope[l] += c[l] * gradient[i - block.start][l];
                curve[l] += c[l] * hc[l];
            }
        }
        let change = self.grid.rescale(group.start, &slope, &curve);
        for (i, c) in group.zip(&steps) {
            let change = lanes(|l| change[l] * c[l]);
            subtract_products(gradient, &h[i * n + block.start..i * n + block.end], &change);
        }
    }

    #[inline(always)]
    fn values(&self, i: usize) -> Lane {
        self.grid.values(i, &self.codes[i])
    }

    #[inline(always)]
    fn residual(&self, i: usize) -> Lane {
        difference(&self.original[i], &self.values(i))
    }
}

/// Subtracts `factors[i] * change` from each of `from`.
#[inline(always)]
fn subtract_products(from: &mut [Lane], factors: &[f32], change: &Lane) {
    for (x, &factor) in from.iter_mut().zip(factors) {
        for l in 0..LANES {
            x[l] -= change[l] * factor;
        }
    }
}

#[inline(always)]
fn difference(a: &Lane, b: &Lane) -> Lane {
    lanes(|l| a[l] - b[l])
}
