//! Channel scales that make weights or inputs easier to round; what feeds the linears takes them over.
//!
//! AWQ (Lin et al., 2306.00978) protects the weights whose inputs are large; SmoothQuant (Xiao et al., 2211.10438)
//! moves the outliers of inputs into the weights.

use rayon::prelude::*;

use crate::scheme::Scheme;

/// The smallest scale.
const LEAST: f32 = 1e-4;
/// What a range counts as at least.
const LEAST_RANGE: f32 = 1e-5;

/// The mean over all output channels of |w| in parts of the largest in its group, for linears that read the same
/// `cols` inputs; `weights` are row-major.
pub fn relative_magnitudes(weights: &[&[f32]], cols: usize, scheme: Scheme) -> Vec<f32> {
    let group = scheme.group_size.columns(cols);
    let groups = (0..cols.div_ceil(group)).into_par_iter();
    let of_group = |g: usize| {
        let range = g * group..((g + 1) * group).min(cols);
        let mut sums = vec![0.0f64; range.len()];
        let rows = weights.iter().flat_map(|weight| weight.chunks_exact(cols));
        for row in rows {
            let part = &row[range.clone()];
            let most = part.iter().fold(0.0f32, |m, w| m.max(w.abs())) + 1e-6;
            sums.iter_mut().zip(part).for_each(|(sum, w)| *sum += (w.abs() / most) as f64);
        }
        sums
    };
    let rows = weights.iter().map(|weight| weight.len() / cols).sum::<usize>().max(1) as f64;
    groups.flat_map_iter(of_group).map(|sum| (sum / rows) as f32).collect()
}

/// AWQ's scales: the inputs' mean magnitudes to the power of `ratio`, with `weights` (their relative magnitudes) over
/// those to the power of `1 - ratio`; brought to where the largest times the smallest is one.
pub fn awq_scales(inputs: &[f32], weights: Option<&[f32]>, ratio: f32) -> Vec<f32> {
    let mut scales: Vec<f32> = match weights {
        Some(weights) => {
            let one = |(x, w): (&f32, &f32)| (x.powf(ratio) / (w.powf(1.0 - ratio) + 1e-4)).max(LEAST);
            inputs.iter().zip(weights).map(one).collect()
        }
        None => inputs.iter().map(|x| x.powf(ratio).max(LEAST)).collect(),
    };
    let (mut low, mut high) = (f32::MAX, 0.0f32);
    for &scale in scales.iter().filter(|s| s.is_finite()) {
        (low, high) = (low.min(scale), high.max(scale));
    }
    let middle = (low * high).sqrt();
    for scale in &mut scales {
        *scale /= middle;
        if !scale.is_finite() || *scale <= 0.0 {
            *scale = 1.0;
        }
    }
    scales
}

/// The points of AWQ's grid: the ratio, and whether weights count. First the identity, so that scaling is never worse
/// than none by the measure of the search; the end point, 1, is among them.
pub fn awq_grid(points: usize, duo: bool) -> Vec<(f32, bool)> {
    let ratio = |i: usize, of: usize| i as f32 / of.max(1) as f32;
    let identity = std::iter::once((0.0, false));
    match duo {
        true => identity.chain((0..points - 1).map(|i| (ratio(i, points - 2), true))).collect(),
        false => identity.chain((1..points).map(|i| (ratio(i, points - 1), false))).collect(),
    }
}

/// The largest magnitude of each input channel's weights, over linears that read the same `cols` inputs.
pub fn column_maxima(weights: &[&[f32]], cols: usize) -> Vec<f32> {
    let mut most = vec![0.0f32; cols];
    for row in weights.iter().flat_map(|weight| weight.chunks_exact(cols)) {
        most.iter_mut().zip(row).for_each(|(m, w)| *m = m.max(w.abs()));
    }
    most
}

/// SmoothQuant's scales: `inputs^alpha / weights^(1 - alpha)`, both the largest magnitudes of each channel.
pub fn smooth_scales(inputs: &[f32], weights: &[f32], alpha: f32) -> Vec<f32> {
    let one = |(x, w): (&f32, &f32)| {
        let (x, w) = (x.max(LEAST_RANGE), w.max(LEAST_RANGE));
        (x.powf(alpha) / w.powf(1.0 - alpha)).max(LEAST_RANGE)
    };
    inputs.iter().zip(weights).map(one).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scheme::GroupSize;

    #[test]
    fn magnitudes_are_relative_to_their_groups() {
        let weights = [1.0f32, -2.0, 4.0, 4.0, 3.0, 0.0, -1.0, 2.0];
        let scheme = Scheme { bits: 4, group_size: GroupSize::new(2).unwrap(), sym: false };
        let found = relative_magnitudes(&[&weights], 4, scheme);
        for (found, want) in found.iter().zip([0.75, 0.5, 0.75, 1.0]) {
            assert!((found - want).abs() < 1e-5, "{found} {want}");
        }
    }

    #[test]
    fn the_grid_has_its_ends() {
        let grid = awq_grid(20, true);
        assert_eq!((grid.len(), grid[0], grid[1], grid[19]), (20, (0.0, false), (0.0, true), (1.0, true)));
        let grid = awq_grid(20, false);
        assert_eq!((grid.len(), grid[0], grid[19]), (20, (0.0, false), (1.0, false)));
        assert_eq!(awq_scales(&[3.0, 5.0], None, 0.0), [1.0, 1.0]);
    }

    #[test]
    fn scales_follow_the_formulas() {
        let scales = awq_scales(&[1.0, 16.0], None, 0.5);
        assert_eq!(scales, [0.5, 2.0]);
        let duo = awq_scales(&[4.0, 4.0], Some(&[0.25, 1.0]), 0.5);
        assert!((duo[0] / duo[1] - (1.0 + 1e-4) / (0.5 + 1e-4)).abs() < 1e-5 && (duo[0] * duo[1] - 1.0).abs() < 1e-6);
        // A channel that is never anything but zero.
        assert!(awq_scales(&[0.0, 1.0], None, 1.0).iter().all(|s| s.is_finite() && *s > 0.0));
        let smooth = smooth_scales(&[100.0, 1.0], &[1.0, 4.0], 0.5);
        assert_eq!(smooth, [10.0, 0.5]);
        assert_eq!(column_maxima(&[&[1.0, -5.0, -2.0, 3.0]], 2), [2.0, 5.0]);
    }
}
