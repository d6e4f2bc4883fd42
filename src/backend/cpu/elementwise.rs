//! Operations on rows and single values, each split over blocks of rows.

use rayon::prelude::*;

use super::super::tensor::Tensor;
use super::super::{Activation, RopeTable, Span};
use crate::num::simd::{self, vectorized};

/// Values per task: enough to hide the cost of handing it out.
const BLOCK: usize = 1 << 15;

fn rows_per_task(cols: usize) -> usize {
    (BLOCK / cols.max(1)).max(1)
}

/// RMS norm over each run of `weight.len()` values.
pub fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
    let n = weight.len();
    x.par_chunks_mut(rows_per_task(n) * n).for_each(|rows| {
        vectorized(|| {
            for row in rows.chunks_exact_mut(n) {
                let factor = 1.0 / (simd::dot(row, row) / n as f32 + eps).sqrt();
                for (x, w) in row.iter_mut().zip(weight) {
                    *x = *x * factor * w;
                }
            }
        });
    });
}

/// Adds `bias` to each row.
pub fn add_row(x: &mut [f32], bias: &[f32]) {
    let n = bias.len();
    x.par_chunks_mut(rows_per_task(n) * n).for_each(|rows| {
        for row in rows.chunks_exact_mut(n) {
            row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
        }
    });
}

/// x += y.
pub fn add(x: &mut [f32], y: &[f32]) {
    x.par_chunks_mut(BLOCK).zip(y.par_chunks(BLOCK)).for_each(|(x, y)| {
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    });
}

/// x -= y.
pub fn subtract(x: &mut [f32], y: &[f32]) {
    x.par_chunks_mut(BLOCK).zip(y.par_chunks(BLOCK)).for_each(|(x, y)| {
        x.iter_mut().zip(y).for_each(|(x, y)| *x -= y);
    });
}

/// gate = activation(gate) * up.
pub fn gated(gate: &mut [f32], up: &[f32], activation: Activation) {
    gate.par_chunks_mut(BLOCK).zip(up.par_chunks(BLOCK)).for_each(|(gate, up)| {
        vectorized(|| match activation {
            Activation::Silu => gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + simd::exp(-*g)) * u),
            Activation::GeluTanh => gate.iter_mut().zip(up).for_each(|(g, u)| *g = gelu_tanh(*g) * u),
        });
    });
}

#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    // x/2 (1 + tanh(t)) = x / (1 + e^(-2t)) with t = sqrt(2/pi) (x + 0.044715 x³)
    let t = 0.797_884_6 * (x + 0.044_715 * x * x * x);
    x / (1.0 + simd::exp(-2.0 * t))
}

#[inline(always)]
fn tanh(t: f32) -> f32 {
    // Near zero the difference below would lose its digits.
    let near = t * (1.0 + t * t * (-1.0 / 3.0 + t * t * (2.0 / 15.0)));
    let far = 1.0 - 2.0 / (1.0 + simd::exp(2.0 * t));
    if t.abs() < 0.1 { near } else { far }
}

/// cap * tanh(x / cap).
pub fn softcap(x: &mut [f32], cap: f32) {
    x.par_chunks_mut(BLOCK).for_each(|x| {
        vectorized(|| x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap)));
    });
}

/// The largest value's place, the lowest of equals; `None` for rows with NaN or plus infinity, or with nothing
/// above minus infinity.
pub fn argmax(row: &[f32]) -> Option<u32> {
    let mut best = (None, f32::NEG_INFINITY);
    for (i, &value) in row.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return None;
        }
        if value > best.1 {
            best = (Some(i as u32), value);
        }
    }
    best.0
}

/// Goes over the rows of each column, in order.
fn columns<T: Copy + Default + Send>(x: &[f32], cols: usize, step: impl Fn(T, f32) -> T + Sync) -> Vec<T> {
    let mut all = vec![T::default(); cols];
    let tile = 512;
    all.par_chunks_mut(tile).enumerate().for_each(|(i, all)| {
        vectorized(|| {
            for row in x.chunks_exact(cols) {
                all.iter_mut().zip(&row[i * tile..]).for_each(|(so_far, x)| *so_far = step(*so_far, *x));
            }
        });
    });
    all
}

/// The sum of squares of each column.
pub fn squares(x: &[f32], cols: usize) -> Vec<f64> {
    columns(x, cols, |sum, x| sum + f64::from(x) * f64::from(x))
}

/// The largest magnitude of each column; NaN where there is one.
pub fn abs_max(x: &[f32], cols: usize) -> Vec<f32> {
    columns(x, cols, |most, x| if x.abs() > most || x.is_nan() { x.abs() } else { most })
}

/// The sum of magnitudes of each column.
pub fn abs_sum(x: &[f32], cols: usize) -> Vec<f64> {
    columns(x, cols, |sum, x| sum + f64::from(x).abs())
}

/// Rotary embedding in place; the first `2 * table.half` channels of each head turn.
pub fn rope(x: &mut Tensor, spans: &[Span], head_dim: usize, table: &RopeTable) {
    let positions: Vec<usize> = spans.iter().flat_map(|s| s.start..s.start + s.rows).collect();
    let (cols, half) = (x.cols, table.cos.cols);
    let (cos, sin) = (table.cos.as_host(), table.sin.as_host());
    x.as_host_mut().par_chunks_mut(cols).zip(&positions).with_min_len(rows_per_task(cols)).for_each(|(row, &p)| {
        let (cos, sin) = (&cos[p * half..(p + 1) * half], &sin[p * half..(p + 1) * half]);
        vectorized(|| {
            for head in row.chunks_exact_mut(head_dim) {
                let (low, high) = head.split_at_mut(half);
                for i in 0..half {
                    let (a, b) = (low[i], high[i]);
                    low[i] = a * cos[i] - b * sin[i];
                    high[i] = b * cos[i] + a * sin[i];
                }
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_columns() {
        // More columns than a tile has.
        let (rows, cols) = (5, 1100);
        let x: Vec<f32> = (0..rows * cols).map(|i| (i * 7919 % 1013) as f32 - 506.0).collect();
        let of = |f: &dyn Fn(&[f32], usize) -> f64| -> Vec<f64> { (0..cols).map(|c| f(&x, c)).collect() };
        let column = |x: &[f32], c: usize| (0..rows).map(|r| f64::from(x[r * cols + c]).abs()).collect::<Vec<_>>();
        assert_eq!(squares(&x, cols), of(&|x, c| column(x, c).iter().map(|v| v * v).sum()));
        assert_eq!(abs_sum(&x, cols), of(&|x, c| column(x, c).iter().sum()));
        let most: Vec<f64> = abs_max(&x, cols).into_iter().map(f64::from).collect();
        assert_eq!(most, of(&|x, c| column(x, c).into_iter().fold(0.0, f64::max)));
        // A NaN is not forgotten, whatever comes after it.
        for row in 0..rows {
            let mut x = x.clone();
            x[row * cols + 700] = f32::NAN;
            let (most, sum) = (abs_max(&x, cols), abs_sum(&x, cols));
            assert!((0..cols).all(|c| most[c].is_nan() == (c == 700) && sum[c].is_nan() == (c == 700)));
        }
    }
}
