//! The pass as the paper has it, in float64 loops over one row, and every grid against it.

use std::convert::Infallible;
use std::ops::Range;

use half::f16;

use super::curvature::{Curvature, PassOptions};
use super::float8::{self, float8_with_feedback, largest};
use super::gptq::{GptqOptions, gptq};
use super::grids::levels::{self, Fit, LevelLayout, Points, choose};
use super::order::Order;
use super::scale_search::ScaleSearch;
use crate::backend::cpu::Cpu;
use crate::backend::tensor::Tensor;
use crate::backend::weight::{Dense, Weight};
use crate::backend::{Backend, Drift, Gram};
use crate::num::e4m3;
use crate::num::ggml::basic::IQ4_LEVELS;
use crate::scheme::{GroupSize, Scheme};
use crate::tensor::Dtype;

/// The grid of one row.
trait Plain {
    fn fit(&mut self, _taken: Range<usize>, _w: &[f64]) {}
    fn top(&self) -> u8;
    fn value(&self, i: usize, code: u8) -> f64;
    /// Scale of column `i` and what a code counts of it, where scales are free.
    fn scale(&mut self, _i: usize, _code: u8) -> Option<(&mut f64, f64)> {
        None
    }

    fn nearest(&self, i: usize, w: f64) -> u8 {
        let distance = |code: &u8| (self.value(i, *code) - w).abs();
        (0..=self.top()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
    }
}

/// Everything by place in the order of columns.
struct Definition {
    n: usize,
    columns: Vec<usize>,
    groups: Vec<usize>,
    dead: Vec<bool>,
    /// Damped.
    h: Vec<f64>,
    /// H^-1.
    inverse: Vec<f64>,
    /// Row i of the inverse of H without the columns before i.
    pivots: Vec<f64>,
    drift: Option<Vec<f64>>,
}

impl Definition {
    fn new(problem: &Problem, curvature: &Curvature, with_drift: bool) -> Self {
        let (n, columns) = (problem.n, curvature.sequence.columns.clone());
        let (gram, scale) = (problem.gram.lower.host(), 2.0 / problem.gram.tokens as f64);
        let dead: Vec<bool> = columns.iter().map(|&c| gram[c * n + c] == 0.0).collect();
        let alive = |i: usize| if dead[i] { 1.0 } else { gram[columns[i] * n + columns[i]] * scale };
        let damp = curvature.damp_percent * (0..n).map(alive).sum::<f64>() / n as f64;
        let at = |i: usize, j: usize| {
            let (a, b) = (columns[i].max(columns[j]), columns[i].min(columns[j]));
            if i == j { alive(i) + damp } else { gram[a * n + b] * scale }
        };
        let h: Vec<f64> = (0..n * n).map(|x| at(x / n, x % n)).collect();
        let inverse = inverse(&h, n);
        let (mut rest, mut pivots) = (inverse.clone(), Vec::new());
        for i in 0..n {
            let pivot = rest[i * n..][..n].to_vec();
            for j in i + 1..n {
                (i + 1..n).for_each(|k| rest[j * n + k] -= pivot[j] * pivot[k] / pivot[i]);
            }
            pivots.extend(pivot);
        }
        let drift = with_drift.then(|| {
            let at = |i: usize, j: usize| f64::from(problem.drift.values.host()[columns[i] * n + columns[j]]) * scale;
            (0..n * n).map(|x| at(x / n, x % n)).collect()
        });
        Self { n, groups: curvature.sequence.groups.clone(), columns, dead, h, inverse, pivots, drift }
    }

    fn times(&self, matrix: &[f64], x: &[f64]) -> Vec<f64> {
        matrix.chunks_exact(self.n).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    }

    /// Codes of a row by stored column, and its loss.
    fn solve(&self, row: &[f32], grid: &mut impl Plain, options: &PassOptions, keeps_dead: bool) -> (Vec<u8>, f64) {
        let n = self.n;
        let weight = |i: usize| if self.dead[i] && !keeps_dead { 0.0 } else { f64::from(row[self.columns[i]]) };
        let mut original: Vec<f64> = (0..n).map(weight).collect();
        if let Some(drift) = &self.drift {
            let moved = self.times(&self.inverse, &self.times(drift, &original));
            original.iter_mut().zip(moved).for_each(|(w, m)| *w += m);
        }
        if options.static_groups {
            grid.fit(0..n, &original);
        }
        let (mut w, mut codes) = (original.clone(), vec![0; n]);
        for i in 0..n {
            if !options.static_groups && (i == 0 || self.groups[i] != self.groups[i - 1]) {
                grid.fit(i..(i..n).find(|&j| self.groups[j] != self.groups[i]).unwrap_or(n), &w);
            }
            codes[i] = grid.nearest(i, w[i]);
            let error = (w[i] - grid.value(i, codes[i])) / self.pivots[i * n + i];
            (i..n).for_each(|j| w[j] -= error * self.pivots[i * n + j]);
        }
        let residual = |grid: &_, codes: &[u8]| -> Vec<f64> {
            (0..n).map(|i| original[i] - Plain::value(grid, i, codes[i])).collect()
        };
        for _ in 0..options.sweeps {
            for block in (0..n).step_by(128).map(|start| start..(start + 128).min(n)) {
                for group in self.whole_groups(block.clone()) {
                    let gradient = self.times(&self.h, &residual(grid, &codes));
                    rescale(grid, &group, &codes, &gradient, &self.h, n);
                }
                for i in block {
                    let gradient = self.times(&self.h[i * n..][..n], &residual(grid, &codes))[0];
                    codes[i] = grid.nearest(i, grid.value(i, codes[i]) + gradient / self.h[i * n + i]);
                }
            }
        }
        let mut d = residual(grid, &codes);
        (0..n).filter(|&i| self.dead[i] && keeps_dead).for_each(|i| d[i] = 0.0);
        let loss = d.iter().zip(self.times(&self.h, &d)).map(|(d, hd)| 0.5 * d * hd).sum();
        let mut stored = vec![0; n];
        self.columns.iter().zip(&codes).for_each(|(&column, &code)| stored[column] = code);
        (stored, loss)
    }

    fn whole_groups(&self, block: Range<usize>) -> Vec<Range<usize>> {
        let mut out: Vec<Range<usize>> = Vec::new();
        for i in block {
            match out.last_mut() {
                Some(last) if self.groups[last.start] == self.groups[i] => last.end = i + 1,
                _ => out.push(i..i + 1),
            }
        }
        let size = |range: &Range<usize>| self.groups.iter().filter(|&&g| g == self.groups[range.start]).count();
        out.retain(|range| size(range) == range.len());
        out
    }
}

/// The scale with the least loss for the codes of a group.
fn rescale(grid: &mut impl Plain, group: &Range<usize>, codes: &[u8], gradient: &[f64], h: &[f64], n: usize) {
    let steps: Vec<f64> = group.clone().filter_map(|i| grid.scale(i, codes[i]).map(|(_, step)| step)).collect();
    let slope: f64 = steps.iter().zip(&gradient[group.clone()]).map(|(c, g)| c * g).sum();
    let row = |i: usize| -> f64 { steps.iter().zip(&h[i * n + group.start..]).map(|(c, h)| c * h).sum() };
    let curve: f64 = group.clone().zip(&steps).map(|(i, c)| c * row(i)).sum();
    let Some((scale, _)) = grid.scale(group.start, 0) else { return };
    let better = f16::from_f64(*scale + slope / curve).to_f64();
    let delta = better - *scale;
    if curve > 0.0 && delta * delta * curve < 2.0 * delta * slope {
        *scale = better;
    }
}

/// The inverse by Gauss and Jordan.
fn inverse(a: &[f64], n: usize) -> Vec<f64> {
    let mut a = a.to_vec();
    for p in 0..n {
        let pivot = std::mem::replace(&mut a[p * n + p], 1.0);
        a[p * n..][..n].iter_mut().for_each(|x| *x /= pivot);
        let row = a[p * n..][..n].to_vec();
        for i in (0..n).filter(|i| *i != p) {
            let factor = std::mem::replace(&mut a[i * n + p], 0.0);
            a[i * n..][..n].iter_mut().zip(&row).for_each(|(x, r)| *x -= factor * r);
        }
    }
    a
}

const ROWS: usize = 70;
const COLS: usize = 160;
/// Columns of a group or block.
const GROUP: usize = 32;

struct Problem {
    n: usize,
    weight: Vec<f32>,
    gram: Gram,
    drift: Drift,
}

impl Problem {
    /// Inputs that follow a common factor, one channel without any; drift a tenth of the inputs.
    fn new() -> Self {
        let (n, tokens) = (COLS, 2 * COLS);
        let mut state = 7u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let weight = (0..ROWS * n).map(|_| next() * next()).collect();
        let sizes: Vec<f32> = (0..n).map(|i| if i == 3 { 0.0 } else { 0.3 + next().abs() }).collect();
        let mut draw = |factor: f32| -> Vec<f32> {
            let rows = (0..tokens).flat_map(|_| {
                let common = next();
                (0..n).map(|i| factor * sizes[i] * (common + next())).collect::<Vec<f32>>()
            });
            rows.collect()
        };
        let (x, moved) = (draw(1.0), draw(0.1));
        let original = x.iter().zip(&moved).map(|(x, m)| x + m).collect();
        let x = Tensor::host(tokens, n, x);
        let mut gram = Cpu.gram(n).unwrap();
        Cpu.add_gram(&x, &mut gram).unwrap();
        let mut drift = Cpu.drift(n).unwrap();
        Cpu.add_drift(&x, &Tensor::host(tokens, n, original), &mut drift).unwrap();
        Self { n, weight, gram, drift }
    }

    fn diagonal(&self) -> Vec<f64> {
        Cpu.diagonal(&self.gram).unwrap()
    }

    fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.weight.chunks_exact(self.n)
    }
}

/// Every way the pass can go.
fn ways() -> impl Iterator<Item = (PassOptions, bool)> {
    let orders = [Order::Natural, Order::GroupAware, Order::Activation];
    let ways = orders.into_iter().flat_map(|order| [(order, false), (order, true)]);
    ways.flat_map(|(order, static_groups)| {
        [(0, false), (0, true), (2, true)]
            .map(|(sweeps, drift)| (PassOptions { order, static_groups, sweeps, ..PassOptions::CODES_ONLY }, drift))
    })
}

/// Near halfway between two codes f32 may decide otherwise, and what follows in that row with it.
#[track_caller]
fn compare(found: &[u8], loss: f64, wanted: Vec<(Vec<u8>, f64)>, what: &str) {
    let total: f64 = wanted.iter().map(|(_, loss)| loss).sum();
    let codes: Vec<u8> = wanted.into_iter().flat_map(|(codes, _)| codes).collect();
    assert_eq!(found.len(), codes.len());
    let other = found.iter().zip(&codes).filter(|(a, b)| a != b).count();
    assert!(other * 100 <= codes.len(), "{what}: {other} of {} codes differ", codes.len());
    assert!((loss / total - 1.0).abs() < 5e-3, "{what}: loss {loss}, not {total}");
}

/// The largest weight of a group decides.
struct PlainIntegers<'a> {
    groups: &'a [usize],
    scheme: Scheme,
    /// Scale and zero point by group.
    levels: Vec<(f64, f64)>,
}

impl Plain for PlainIntegers<'_> {
    fn fit(&mut self, taken: Range<usize>, w: &[f64]) {
        let top = f64::from(self.scheme.top());
        for g in 0..self.levels.len() {
            let of_group = || taken.clone().filter(|&i| self.groups[i] == g).map(|i| w[i]);
            if of_group().next().is_none() {
                continue;
            }
            let (low, high) = of_group().fold((0.0f64, 0.0f64), |(low, high), w| (low.min(w), high.max(w)));
            let range = if self.scheme.sym { 2.0 * high.max(-low) } else { high - low };
            let scale = f16::from_f64(range / top).to_f64();
            let zero = if self.scheme.sym { f64::from(self.scheme.middle()) } else { (-low / scale).round() };
            self.levels[g] = (scale, zero.clamp(0.0, top));
        }
    }

    fn top(&self) -> u8 {
        self.scheme.top()
    }

    fn value(&self, i: usize, code: u8) -> f64 {
        let (scale, zero) = self.levels[self.groups[i]];
        scale * (f64::from(code) - zero)
    }

    fn scale(&mut self, i: usize, code: u8) -> Option<(&mut f64, f64)> {
        let (scale, zero) = &mut self.levels[self.groups[i]];
        Some((scale, f64::from(code) - *zero))
    }
}

#[test]
fn integers() {
    let problem = Problem::new();
    let bytes = bytemuck::cast_slice(&problem.weight).to_vec().into();
    let weight = Cpu.load(Weight::Dense(Dense { rows: ROWS, cols: COLS, dtype: Dtype::F32, bytes })).unwrap();
    for (way, (pass, with_drift)) in ways().enumerate() {
        let group_size = GroupSize::new(GROUP as i32).unwrap();
        let scheme = Scheme { bits: [4, 3, 2, 8][way % 4], group_size, sym: way % 3 == 0 };
        let drift = with_drift.then_some(&problem.drift);
        let curvature = Curvature::new(&Cpu, &problem.gram, &problem.diagonal(), drift, group_size, &pass).unwrap();
        let options = GptqOptions { scheme, pass, grid: ScaleSearch::MaxAbs, least_zero: 0 };
        let (found, report) = gptq(&Cpu, &weight, &curvature, &options).unwrap();
        let definition = Definition::new(&problem, &curvature, with_drift);
        let one = |row: &[f32]| {
            let levels = vec![(1.0, 0.0); COLS / GROUP];
            let mut grid = PlainIntegers { groups: &definition.groups, scheme, levels };
            definition.solve(row, &mut grid, &pass, false)
        };
        let wanted = problem.rows().map(one).collect();
        compare(&found.codes, report.loss, wanted, &format!("{scheme:?}, {pass:?}, drift {with_drift}"));
    }
}

/// Levels by run of stored columns, of one row.
struct PlainLevels<'a> {
    columns: &'a [usize],
    layout: LevelLayout,
    levels: Vec<(f32, f32)>,
}

/// The range of a run, or its largest value.
fn fit_levels(layout: LevelLayout, columns: Range<usize>, weights: &[f32]) -> Fit {
    let blocks = columns.start / layout.block..columns.end / layout.block;
    let rows = weights.len() / columns.len();
    let range = |run: &[f32]| {
        let (low, high) = run.iter().fold((0.0f32, 0.0f32), |(low, high), w| (low.min(*w), high.max(*w)));
        match layout.points {
            Points::Even { high: top, .. } => ((high - low) / top as f32, low),
            Points::Table(_) => (high.max(-low) / 127.0, 0.0),
        }
    };
    let bytes = (0..rows).flat_map(|_| blocks.clone().map(|block| block as u8)).collect();
    Fit { levels: weights.chunks_exact(layout.run).map(range).collect(), bytes }
}

impl Plain for PlainLevels<'_> {
    fn fit(&mut self, taken: Range<usize>, w: &[f64]) {
        let columns = &self.columns[taken.clone()];
        let start = *columns.iter().min().unwrap();
        let mut weights = vec![0.0; columns.len()];
        columns.iter().zip(&w[taken]).for_each(|(column, w)| weights[column - start] = *w as f32);
        let fit = fit_levels(self.layout, start..start + columns.len(), &weights);
        self.levels[start / self.layout.run..][..fit.levels.len()].copy_from_slice(&fit.levels);
    }

    fn top(&self) -> u8 {
        15
    }

    fn value(&self, i: usize, code: u8) -> f64 {
        let (scale, offset) = self.levels[self.columns[i] / self.layout.run];
        f64::from(scale) * f64::from(self.layout.points.point(code)) + f64::from(offset)
    }
}

#[test]
fn stored_levels() {
    let problem = Problem::new();
    let even = Points::Even { low: 0, high: 15, zero: 0 };
    for (way, (pass, with_drift)) in ways().enumerate() {
        let points = [even, Points::Table(&IQ4_LEVELS)][way % 2];
        let layout = LevelLayout { points, run: 16, block: GROUP };
        let drift = with_drift.then_some(&problem.drift);
        let curvature = levels::curvature(&problem.gram, &problem.diagonal(), drift, GROUP, &pass).unwrap();
        let fit = |columns: Range<usize>, w: &[f32]| Ok::<_, Infallible>(fit_levels(layout, columns, w));
        let Ok(found) = choose(&problem.weight, ROWS, &curvature, layout, &pass, &fit);
        let definition = Definition::new(&problem, &curvature, with_drift);
        let one = |row: &[f32]| {
            let levels = vec![(0.0, 0.0); COLS / layout.run];
            let mut grid = PlainLevels { columns: &definition.columns, layout, levels };
            definition.solve(row, &mut grid, &pass, true)
        };
        compare(
            &found.codes,
            found.loss,
            problem.rows().map(one).collect(),
            &format!("{points:?}, {pass:?}, drift {with_drift}"),
        );
        assert!(found.bytes.chunks_exact(COLS / GROUP).all(|row| row.iter().copied().eq(0..5)));
    }
}

struct PlainE4m3<'a> {
    columns: &'a [usize],
    width: usize,
    /// By tile of the row.
    scales: &'a [f32],
}

impl Plain for PlainE4m3<'_> {
    fn top(&self) -> u8 {
        254
    }

    fn value(&self, i: usize, code: u8) -> f64 {
        f64::from(self.scales[self.columns[i] / self.width]) * f64::from(e4m3::decode(code))
    }
}

#[test]
fn e4m3_under_given_scales() {
    let mut problem = Problem::new();
    // Rows, and with them a tile, of zeros.
    problem.weight[16 * COLS..32 * COLS].fill(0.0);
    for (way, (pass, with_drift)) in ways().enumerate() {
        let tile = [(1, COLS), (ROWS, COLS), (16, GROUP)][way % 3];
        let scales: Vec<f32> = largest(&problem.weight, COLS, tile).into_iter().map(float8::scale).collect();
        let drift = with_drift.then_some(&problem.drift);
        let curvature = float8::curvature(&problem.gram, &problem.diagonal(), drift, &pass).unwrap();
        let (found, loss) = float8_with_feedback(&problem.weight, ROWS, COLS, tile, scales.clone(), &curvature, &pass);
        let definition = Definition::new(&problem, &curvature, with_drift);
        let across = COLS / tile.1;
        let one = |(r, row): (usize, &[f32])| {
            let scales = &scales[r / tile.0 * across..][..across];
            let mut grid = PlainE4m3 { columns: &definition.columns, width: tile.1, scales };
            definition.solve(row, &mut grid, &pass, true)
        };
        let wanted: Vec<_> = problem.rows().enumerate().map(one).collect();
        // Zero has two codes.
        let codes: Vec<u8> = found.values.iter().map(|v| if *v == 128 { 0 } else { *v }).collect();
        compare(&codes, loss, wanted, &format!("{tile:?}, {pass:?}, drift {with_drift}"));
    }
}
