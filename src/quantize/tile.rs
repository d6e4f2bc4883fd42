//! The inner loops: a tile of rows, one row to a vector lane, columns in the order they are taken.

use half::f16;
use rayon::prelude::*;

use super::curvature::Curvature;
use super::grid::{LANES, Lane, Levels, levels};
use super::order::Sequence;
use super::{Quantized, Report};
use crate::backend::solver::Rounding;
use crate::num::matmul::{View, product};
use crate::num::simd::vectorized;
use crate::scheme::Scheme;

/// Columns between two updates of all that follow.
const BLOCK: usize = 128;

/// Up to [`LANES`] rows of one weight.
pub struct Tile<'a> {
    n: usize,
    groups: &'a [usize],
    /// Weights as given, `[n]` lanes.
    original: Vec<Lane>,
    /// Codes, as floats.
    codes: Vec<Lane>,
    /// Levels of each group.
    levels: Vec<Levels>,
    /// Half of (w - q)' H (w - q), kept up by `compensate` and `sweep`.
    pub loss: Lane,
}

/// Cuts a weight into tiles, lets `work` choose codes, levels and loss, and puts the result together in stored column order. Tiles are independent, so the threads do not matter.
pub fn quantize(
    weight: &[f32],
    rows: usize,
    n: usize,
    scheme: Scheme,
    sequence: &Sequence,
    dead: &[bool],
    work: impl Fn(&mut Tile) + Sync,
) -> (Quantized, Report) {
    let group_count = scheme.group_size.count(n);
    let tiles: Vec<Tile> = (0..rows.div_ceil(LANES))
        .into_par_iter()
        .map(|t| {
            let first = t * LANES;
            let mut original = vec![[0.0; LANES]; n];
            for (lane, row) in weight[first * n..].chunks_exact(n).take(LANES).enumerate() {
                for (i, &column) in sequence.columns.iter().enumerate() {
                    original[i][lane] = if dead[column] { 0.0 } else { row[column] };
                }
            }
            let empty = Levels { scale: [1.0; LANES], zero: [0.0; LANES] };
            let mut tile = Tile {
                n,
                groups: &sequence.groups,
                original,
                codes: vec![[0.0; LANES]; n],
                levels: vec![empty; group_count],
                loss: [0.0; LANES],
            };
            work(&mut tile);
            tile
        })
        .collect();
    let mut out = Quantized {
        rows,
        cols: n,
        scheme,
        codes: vec![0; rows * n],
        scales: vec![f16::ZERO; group_count * rows],
        zeros: vec![0; group_count * rows],
        g_idx: vec![0; n],
    };
    let mut loss = 0.0;
    for (i, &column) in sequence.columns.iter().enumerate() {
        out.g_idx[column] = sequence.groups[i] as u32;
    }
    for (t, tile) in tiles.iter().enumerate() {
        for lane in 0..LANES.min(rows - t * LANES) {
            let row = t * LANES + lane;
            loss += tile.loss[lane] as f64;
            for (i, &column) in sequence.columns.iter().enumerate() {
                out.codes[row * n + column] = tile.codes[i][lane] as u8;
            }
            for (g, levels) in tile.levels.iter().enumerate() {
                out.scales[g * rows + row] = f16::from_f32(levels.scale[lane]);
                out.zeros[g * rows + row] = levels.zero[lane] as u8;
            }
        }
    }
    (out, Report { loss })
}

impl Tile<'_> {
    /// Chooses each group's grid from the original weights and rounds to it; the loss is weighted by
    /// `importance`.
    pub fn round_to_nearest(&mut self, importance: &[f32], rounding: &Rounding) {
        self.original_grids(rounding);
        let top = rounding.scheme.top() as f32;
        vectorized(|| {
            for i in 0..self.n {
                let levels = &self.levels[self.groups[i]];
                for l in 0..LANES {
                    let code = levels.code(l, self.original[i][l], top);
                    let error = self.original[i][l] - levels.value(l, code);
                    self.codes[i][l] = code;
                    self.loss[l] += 0.5 * importance[i] * error * error;
                }
            }
        });
    }

    fn original_grids(&mut self, rounding: &Rounding) {
        let Rounding { scheme, candidates, importance, least_zero, .. } = *rounding;
        for g in 0..self.levels.len() {
            let members = (0..self.n).filter(|&i| self.groups[i] == g);
            let (columns, weights): (Vec<Lane>, Vec<f32>) = members.map(|i| (self.original[i], importance[i])).unzip();
            self.levels[g] = vectorized(|| levels(&columns, &weights, scheme, candidates, least_zero));
        }
    }

    /// Moves the weights to where their outputs on the drifted inputs are nearest to what they were:
    /// w' = w + (H^-1 D) w for each row, with D the drift.
    pub fn follow_drift(&mut self, curvature: &Curvature) {
        let factors = curvature.host();
        if factors.drift.is_empty() {
            return;
        }
        let n = self.n;
        let square = |m| View::new(m, n, n, n);
        let (mut a, mut b) = (vec![0.0; n * LANES], vec![0.0; n * LANES]);
        fn lanes(values: &[f32]) -> View<'_> {
            View::new(values, values.len() / LANES, LANES, LANES)
        }
        product(&mut a, LANES, false, 1.0, square(&factors.drift), lanes(self.original.as_flattened()));
        product(&mut b, LANES, false, 1.0, square(&factors.u), lanes(&a));
        product(self.original.as_flattened_mut(), LANES, true, 1.0, square(&factors.u).t(), lanes(&b));
    }

    /// GPTQ's pass. Grids are chosen when the first column of their group is reached, from the weights as
    /// mended by then, unless groups are static.
    pub fn compensate(&mut self, curvature: &Curvature, rounding: &Rounding) {
        let Rounding { scheme, static_groups, candidates, least_zero, .. } = *rounding;
        let (n, factor) = (self.n, &curvature.host().u);
        if static_groups {
            self.original_grids(rounding);
        }
        let mut w = self.original.clone();
        let mut errors = vec![[0.0; LANES]; BLOCK];
        let mut start = 0;
        while start < n {
            let end = self.block_end(start, static_groups);
            for i in start..end {
                let group = self.groups[i];
                if !static_groups && (i == 0 || self.groups[i - 1] != group) {
                    let last = (i..n).find(|&j| self.groups[j] != group).unwrap_or(n);
                    let importance = &rounding.importance[i..last];
                    self.levels[group] = vectorized(|| levels(&w[i..last], importance, scheme, candidates, least_zero));
                }
                let u = &factor[i * n..(i + 1) * n];
                let (levels, top) = (&self.levels[group], scheme.top() as f32);
                let (done, rest) = w.split_at_mut(i + 1);
                vectorized(|| {
                    let error = &mut errors[i - start];
                    for l in 0..LANES {
                        let code = levels.code(l, done[i][l], top);
                        self.codes[i][l] = code;
                        error[l] = (done[i][l] - levels.value(l, code)) / u[i];
                        self.loss[l] += 0.5 * error[l] * error[l];
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
    }

    /// Blocks are cut where no group is, so that a group's grid sees weights that are up to date; a group
    /// longer than a block is cut inside.
    fn block_end(&self, start: usize, anywhere: bool) -> usize {
        let furthest = (start + BLOCK).min(self.n);
        if anywhere || furthest == self.n {
            return furthest;
        }
        let boundary = (start + 1..=furthest).rev().find(|&i| self.groups[i] != self.groups[i - 1]);
        boundary.unwrap_or(furthest)
    }

    /// One sweep of coordinate descent on (w - q)' H (w - q): for each block, the best scale for the codes
    /// of each of its groups, then the best code of each column, given everything else.
    pub fn sweep(&mut self, curvature: &Curvature, scheme: Scheme) {
        let (n, top) = (self.n, scheme.top() as f32);
        let h = &curvature.host().h;
        // gradient = H (w - q), kept up to date as q changes.
        let residual: Vec<Lane> = (0..n).map(|i| self.residual(i)).collect();
        let mut gradient = vec![[0.0; LANES]; n];
        let whole = View::new(h, n, n, n);
        product(
            gradient.as_flattened_mut(),
            LANES,
            false,
            1.0,
            whole,
            View::new(residual.as_flattened(), n, LANES, LANES),
        );
        let mut start = 0;
        while start < n {
            let end = self.block_end(start, false);
            let before: Vec<Lane> = (start..end).map(|i| self.value(i)).collect();
            vectorized(|| {
                let mut from = start;
                while from < end {
                    let group = self.groups[from];
                    let to = (from..end).find(|&j| self.groups[j] != group).unwrap_or(end);
                    // A group longer than a block, or scattered, keeps its scale: only part of it is in sight.
                    if self.whole_group(from, to) {
                        self.rescale(from, to, h, &mut gradient, start, end);
                    }
                    from = to;
                }
                for i in start..end {
                    let levels = &self.levels[self.groups[i]];
                    let inverse = 1.0 / h[i * n + i];
                    let mut change = [0.0f32; LANES];
                    for l in 0..LANES {
                        let old = levels.value(l, self.codes[i][l]);
                        let code = levels.code(l, old + gradient[i][l] * inverse, top);
                        self.codes[i][l] = code;
                        change[l] = levels.value(l, code) - old;
                    }
                    for (g, &h) in gradient[start..end].iter_mut().zip(&h[i * n + start..i * n + end]) {
                        for l in 0..LANES {
                            g[l] -= change[l] * h;
                        }
                    }
                }
            });
            let moved: Vec<Lane> = (start..end).map(|i| difference(&self.value(i), &before[i - start])).collect();
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
        for (i, g) in gradient.iter().enumerate() {
            let d = self.residual(i);
            (0..LANES).for_each(|l| self.loss[l] += 0.5 * d[l] * g[l]);
        }
    }

    /// Whether columns `from..to` are all that their group has.
    fn whole_group(&self, from: usize, to: usize) -> bool {
        let group = self.groups[from];
        self.groups.iter().filter(|&&g| g == group).count() == to - from
    }

    /// Least-squares scale of one group for its present codes; taken where it helps after rounding to f16.
    #[inline(always)]
    fn rescale(&mut self, from: usize, to: usize, h: &[f32], gradient: &mut [Lane], start: usize, end: usize) {
        let n = self.n;
        let group = self.groups[from];
        let steps: Vec<Lane> = (from..to)
            .map(|i| {
                let mut steps = self.codes[i];
                (0..LANES).for_each(|l| steps[l] -= self.levels[group].zero[l]);
                steps
            })
            .collect();
        let (mut slope, mut curve) = ([0.0f32; LANES], [0.0f32; LANES]);
        for (i, c) in steps.iter().enumerate() {
            let mut hc = [0.0f32; LANES];
            for (c, &h) in steps.iter().zip(&h[(from + i) * n + from..(from + i) * n + to]) {
                for l in 0..LANES {
                    hc[l] += h * c[l];
                }
            }
            for l in 0..LANES {
                slope[l] += c[l] * gradient[from + i][l];
                curve[l] += c[l] * hc[l];
            }
        }
        let old = self.levels[group].scale;
        let mut scale = old;
        for l in 0..LANES {
            if curve[l] > 0.0 {
                scale[l] += slope[l] / curve[l];
            }
        }
        super::grid::round_scales(&mut scale);
        let mut change = [0.0f32; LANES];
        for l in 0..LANES {
            let delta = scale[l] - old[l];
            // The objective changes by delta² curve - 2 delta slope.
            if delta * delta * curve[l] < 2.0 * delta * slope[l] {
                self.levels[group].scale[l] = scale[l];
                change[l] = delta;
            }
        }
        for (i, c) in steps.iter().enumerate() {
            let row = &h[(from + i) * n + start..(from + i) * n + end];
            for (g, &h) in gradient[start..end].iter_mut().zip(row) {
                for l in 0..LANES {
                    g[l] -= change[l] * c[l] * h;
                }
            }
        }
    }

    #[inline(always)]
    fn value(&self, i: usize) -> Lane {
        let levels = &self.levels[self.groups[i]];
        let mut out = [0.0; LANES];
        (0..LANES).for_each(|l| out[l] = levels.value(l, self.codes[i][l]));
        out
    }

    fn residual(&self, i: usize) -> Lane {
        difference(&self.original[i], &self.value(i))
    }
}

fn difference(a: &Lane, b: &Lane) -> Lane {
    let mut out = [0.0; LANES];
    (0..LANES).for_each(|l| out[l] = a[l] - b[l]);
    out
}
