//! Round to nearest: the control method. Each group's grid is chosen, each weight rounded, nothing mended.

use rayon::prelude::*;

use super::grids::integer;
use super::order::{Order, sequence};
use super::scale_search::{ScaleSearch, candidates, range_levels};
use super::{Quantized, Report};
use crate::backend::solver::Rounding;
use crate::num::simd::{round, vectorized};
use crate::scheme::Scheme;

/// Quantizes `weight` (`rows` x `cols`, row-major). `diagonal`, that of the Hessian, serves the Hessian grid; zero
/// points are at least `least_zero`.
pub fn rtn(
    weight: &[f32],
    rows: usize,
    cols: usize,
    diagonal: Option<&[f64]>,
    scheme: Scheme,
    grid: ScaleSearch,
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
        importance: if grid == ScaleSearch::Hessian { &importance } else { &ones },
    };
    integer::quantize(weight, rows, &sequence, &dead, &rounding, |tile| tile.round_to_nearest(&importance))
}

/// What [`rtn`] with [`ScaleSearch::MaxAbs`] makes of a weight whose columns are scaled by `scales`, scaled back: for searches,
/// which need no codes.
pub fn scaled_and_back(weight: &[f32], cols: usize, scales: &[f32], scheme: Scheme, least_zero: u8) -> Vec<f32> {
    let size = scheme.group_size.columns(cols).max(1);
    let mut out = vec![0.0; weight.len()];
    out.par_chunks_mut(cols).zip(weight.par_chunks(cols)).for_each(|(out, row)| {
        vectorized(|| {
            for ((out, row), scales) in out.chunks_mut(size).zip(row.chunks(size)).zip(scales.chunks(size)) {
                out.iter_mut().zip(row).zip(scales).for_each(|((o, w), s)| *o = w * s);
                group(out, scheme, least_zero);
                out.iter_mut().zip(scales).for_each(|(o, s)| *o /= s);
            }
        });
    });
    out
}

/// Rounds the weights of a group in place.
#[inline(always)]
fn group(weights: &mut [f32], scheme: Scheme, least_zero: u8) {
    const SIDE: usize = 16;
    let (mut lows, mut highs) = ([0.0f32; SIDE], [0.0f32; SIDE]);
    for part in weights.chunks(SIDE) {
        for ((low, high), &w) in lows.iter_mut().zip(&mut highs).zip(part) {
            *low = if w < *low { w } else { *low };
            *high = if w > *high { w } else { *high };
        }
    }
    let (low, high) = (lows.into_iter().fold(0.0, f32::min), highs.into_iter().fold(0.0, f32::max));
    let (scale, zero) = range_levels(low, high, scheme, least_zero);
    let (least, most) = (-zero, scheme.top() as f32 - zero);
    for w in weights {
        let steps = *w / scale;
        let steps = if steps < least { least } else { steps };
        *w = scale * round(if steps > most { most } else { steps });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scheme::GroupSize;

    /// The same numbers as by way of codes.
    #[test]
    fn there_and_back() {
        let (rows, cols) = (70, 100);
        let noise = |i: usize| (i * 7919 % 4093) as f32 / 4093.0 - 0.4;
        let mut weight: Vec<f32> = (0..rows * cols).map(|i| noise(i) * noise(i / 9 + 5).exp()).collect();
        weight[..cols].fill(0.0);
        weight[cols..2 * cols].iter_mut().for_each(|w| *w = w.abs() + 1.0);
        weight[2 * cols..3 * cols].iter_mut().for_each(|w| *w *= 1e-7);
        weight[3 * cols..4 * cols].iter_mut().for_each(|w| *w *= 1e7);
        let scales: Vec<f32> = (0..cols).map(|k| 0.3 + noise(k * 31).abs() * 4.0).collect();
        for (bits, size, sym, least_zero) in [
            (4, 32, false, 0),
            (4, 64, true, 0),
            (4, -1, false, 1),
            (3, 50, false, 1),
            (2, 7, false, 0),
            (8, -1, true, 0),
        ] {
            let scheme = Scheme { bits, group_size: GroupSize::new(size).unwrap(), sym };
            let mut scaled = weight.clone();
            scaled.iter_mut().enumerate().for_each(|(i, w)| *w *= scales[i % cols]);
            let (quantized, _) = rtn(&scaled, rows, cols, None, scheme, ScaleSearch::MaxAbs, least_zero);
            let mut wanted = quantized.to_f32();
            wanted.iter_mut().enumerate().for_each(|(i, w)| *w /= scales[i % cols]);
            assert_eq!(scaled_and_back(&weight, cols, &scales, scheme, least_zero), wanted, "{scheme:?}");
        }
    }
}
