//! Rounding to E4M3, one scale a tile: whole weights, output channels or square blocks.

use std::ops::Range;

use rayon::prelude::*;

use super::curvature::{Curvature, CurvatureError, PassOptions};
use super::grids::e4m3::E4m3Grid;
use super::pass::{codes, loss, tiles};
use crate::backend::{Drift, Gram};
use crate::num::e4m3;
use crate::scheme::GroupSize;

/// A weight in E4M3: `W[n, k] = scale * values[n, k]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Float8 {
    pub rows: usize,
    pub cols: usize,
    /// `[rows, cols]`
    pub values: Vec<u8>,
    /// `[ceil(rows / tile.0), ceil(cols / tile.1)]`
    pub scales: Vec<f32>,
    /// Rows and columns that share a scale.
    pub tile: (usize, usize),
}

impl Float8 {
    /// The squared error against the weight it was made from, summed row by row.
    pub fn squared_error(&self, weight: &[f32]) -> f64 {
        let across = self.cols.div_ceil(self.tile.1);
        let rows = self.values.par_chunks(self.cols).zip(weight.par_chunks(self.cols)).enumerate();
        let errors: Vec<f64> = rows
            .map(|(n, (values, row))| {
                let one = |(k, (v, w)): (usize, (&u8, &f32))| {
                    let scale = self.scales[n / self.tile.0 * across + k / self.tile.1];
                    ((scale * e4m3::decode(*v) - w) as f64).powi(2)
                };
                values.iter().zip(row).enumerate().map(one).sum()
            })
            .collect();
        errors.iter().sum()
    }
}

/// The scale that maps `largest` to the end of the range; a tile of zeros gets the smallest that is a normal number.
pub fn scale(largest: f32) -> f32 {
    (largest / e4m3::MAX).max(f32::MIN_POSITIVE)
}

/// The largest magnitude of each tile of a `rows` x `cols` weight.
pub fn largest(weight: &[f32], cols: usize, tile: (usize, usize)) -> Vec<f32> {
    let of_band = |band: &[f32]| {
        let mut out = vec![0.0f32; cols.div_ceil(tile.1)];
        for row in band.chunks_exact(cols) {
            for (most, part) in out.iter_mut().zip(row.chunks(tile.1)) {
                *most = part.iter().fold(*most, |m, w| m.max(w.abs()));
            }
        }
        out
    };
    weight.par_chunks(tile.0 * cols).flat_map_iter(of_band).collect()
}

/// Rounds a weight with the scales given, one a tile.
pub fn float8(weight: &[f32], rows: usize, cols: usize, tile: (usize, usize), scales: Vec<f32>) -> Float8 {
    let across = cols.div_ceil(tile.1);
    let mut values = vec![0; rows * cols];
    values.par_chunks_mut(cols).zip(weight.par_chunks(cols)).enumerate().for_each(|(n, (out, row))| {
        let scales = &scales[n / tile.0 * across..];
        for ((out, row), scale) in out.chunks_mut(tile.1).zip(row.chunks(tile.1)).zip(scales) {
            out.iter_mut().zip(row).for_each(|(o, w)| *o = e4m3::encode(w / scale));
        }
    });
    Float8 { rows, cols, values, scales, tile }
}

/// Factors a Hessian for [`float8_with_feedback`], in host memory. Scales are given, so that columns can be taken in any
/// order.
///
/// # Errors
/// When no damping makes the Hessian positive definite, or the device that has the sums fails.
pub fn curvature(
    gram: &Gram,
    diagonal: &[f64],
    drift: Option<&Drift>,
    options: &PassOptions,
) -> Result<Curvature, CurvatureError> {
    Curvature::on_host(gram, diagonal, drift, GroupSize::CHANNEL, options)
}

/// As [`float8`], with the error of each rounding compensated in the columns not yet taken; and the loss. `curvature` is
/// of [`curvature`] with these `options`. A drift moves the weights after the scales were chosen: what then lies beyond
/// them is cut off.
pub fn float8_with_feedback(
    weight: &[f32],
    rows: usize,
    cols: usize,
    tile: (usize, usize),
    scales: Vec<f32>,
    curvature: &Curvature,
    options: &PassOptions,
) -> (Float8, f64) {
    let sequence = &curvature.sequence;
    let grid = |rows: Range<usize>| E4m3Grid::new(&sequence.columns, rows, tile, &scales);
    let Ok(tiles) = tiles(weight, sequence, &curvature.dead, grid, |part| part.pass(curvature, true, options.sweeps));
    (Float8 { rows, cols, values: codes(&tiles), scales, tile }, loss(&tiles))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::backend::Backend;
    use crate::backend::cpu::Cpu;
    use crate::backend::tensor::Tensor;

    #[test]
    fn tiles_keep_to_their_scales() {
        let (rows, cols, tile) = (5, 7, (2, 3));
        let weight: Vec<f32> = (0..rows * cols).map(|i| ((i * 37 % 23) as f32 - 11.0) * (i / 7 + 1) as f32).collect();
        let most = largest(&weight, cols, tile);
        assert_eq!(most.len(), 9);
        let made = float8(&weight, rows, cols, tile, most.iter().map(|m| scale(*m)).collect());
        for (i, &w) in weight.iter().enumerate() {
            let at = i / cols / 2 * 3 + i % cols / 3;
            assert!(w.abs() <= most[at]);
            let error = (made.scales[at] * e4m3::decode(made.values[i]) - w).abs();
            assert!(error <= w.abs() / 15.9 + most[at] * 1e-6, "{i}: {w} off by {error}");
        }
    }

    /// Inputs that go together let errors mend each other: the loss must fall far below that of rounding.
    #[test]
    fn feedback_lowers_the_loss() {
        let (rows, cols, tokens) = (70, 64, 200);
        let noise = |i: usize| ((i * 7919 % 4093) as f32 / 4093.0 - 0.5) * 2.0;
        let x: Vec<f32> = (0..tokens * cols)
            .map(|i| noise(i) + 3.0 * noise(i / cols * 31 + 7) + if i % cols == 5 { 4.0 } else { 0.0 })
            .collect();
        let weight: Vec<f32> = (0..rows * cols).map(|i| noise(i * 13 + 1)).collect();
        let mut gram = Cpu.gram(cols).unwrap();
        Cpu.add_gram(&Tensor::host(tokens, cols, x), &mut gram).unwrap();
        let diagonal = Cpu.diagonal(&gram).unwrap();
        let options = PassOptions::CODES_ONLY;
        let curvature = curvature(&gram, &diagonal, None, &options).unwrap();
        let lower = gram.lower.host();
        let error = |made: &Float8, tile: (usize, usize)| -> f64 {
            let across = cols.div_ceil(tile.1);
            let off = |n: usize, k: usize| {
                let scale = made.scales[n / tile.0 * across + k / tile.1];
                (scale * e4m3::decode(made.values[n * cols + k]) - weight[n * cols + k]) as f64
            };
            let one = |n: usize, i: usize, j: usize| off(n, i) * off(n, j) * lower[i.max(j) * cols + i.min(j)];
            (0..rows).map(|n| (0..cols).map(|i| (0..cols).map(|j| one(n, i, j)).sum::<f64>()).sum::<f64>()).sum()
        };
        for tile in [(rows, cols), (1, cols), (16, 32)] {
            let scales: Vec<f32> = largest(&weight, cols, tile).into_iter().map(scale).collect();
            let rounded = float8(&weight, rows, cols, tile, scales.clone());
            let (mended, _) = float8_with_feedback(&weight, rows, cols, tile, scales, &curvature, &options);
            let (before, after) = (error(&rounded, tile), error(&mended, tile));
            assert!(after < 0.5 * before, "{tile:?}: {after} against {before}");
        }
    }
}
