//! Inputs of a linear, rounded to numbers of 8 bits.

use rayon::prelude::*;

use super::super::weight::Inputs;
use crate::num::simd::vectorized;
use crate::num::{e4m3, int8};

/// Adding it to a number below 2^22 puts the nearest integer, ties to even, into the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// The largest magnitude; NaN where there is one.
fn largest(x: &[f32]) -> f32 {
    vectorized(|| {
        let mut best = [0.0f32; 16];
        let (chunks, rest) = x.as_chunks::<16>();
        let keep = |best: f32, x: f32| if x.abs() > best || x.is_nan() { x.abs() } else { best };
        for x in chunks {
            for i in 0..16 {
                best[i] = keep(best[i], x[i]);
            }
        }
        rest.iter().chain(&best.clone()).fold(0.0, |m, x| keep(m, *x))
    })
}

/// The least and the largest value, zero among them; NaN where there is one.
fn range(x: &[f32]) -> (f32, f32) {
    vectorized(|| {
        let (mut low, mut high) = ([0.0f32; 16], [0.0f32; 16]);
        let (chunks, rest) = x.as_chunks::<16>();
        let least = |low: f32, x: f32| if x < low || x.is_nan() { x } else { low };
        let most = |high: f32, x: f32| if x > high || x.is_nan() { x } else { high };
        for x in chunks {
            for i in 0..16 {
                low[i] = least(low[i], x[i]);
                high[i] = most(high[i], x[i]);
            }
        }
        (low.iter().chain(rest).fold(0.0, |m, x| least(m, *x)), high.iter().chain(rest).fold(0.0, |m, x| most(m, *x)))
    })
}

/// The scale of numbers up to `largest` in magnitude on a grid up to `most`. A scale of zero becomes a small one, as
/// compressed-tensors has it; what is not finite becomes NaN, which then is the result.
fn scale(largest: f32, most: f32) -> f32 {
    usable(largest / most)
}

fn usable(scale: f32) -> f32 {
    match scale {
        0.0 => f32::EPSILON,
        s if s.is_finite() => s,
        _ => f32::NAN,
    }
}

/// Scale and zero point for integers.
fn integers(x: &[f32], inputs: Inputs) -> (f32, i32) {
    match inputs {
        Inputs::TokenAsymmetric => {
            let (low, high) = range(x);
            let scale = usable((high - low) / 255.0);
            (scale, (-128.0 - low / scale).clamp(-128.0, 127.0).round_ties_even() as i32)
        }
        // Calibration has not seen this token: NaN must show all the same.
        Inputs::Tensor { scale, zero } => (if largest(x).is_nan() { f32::NAN } else { scale }, zero),
        Inputs::Float | Inputs::Token | Inputs::Group(_) => (scale(largest(x), 127.5), 0),
    }
}

/// `round(x / scale + zero)`, ties to even, from -128 to 127.
fn quantize(x: &[f32], scale: f32, zero: i32, out: &mut [i8]) {
    let zero = zero as f32;
    vectorized(|| {
        for (out, x) in out.iter_mut().zip(x) {
            *out = ((x / scale + zero).clamp(-128.0, 127.0) + ROUND).to_bits() as i8;
        }
    });
}

/// Rows of `cols` values as integers; `None` where they are to stay floats.
pub fn bytes(x: &[f32], cols: usize, inputs: Inputs) -> Option<int8::Rows> {
    if inputs == Inputs::Float {
        return None;
    }
    let segment = inputs.segment(cols);
    let mut rows = int8::Rows::new(x.len() / cols.max(1), cols, segment);
    rows.fill(|r, parts, factors| {
        let row = &x[r * cols..(r + 1) * cols];
        let whole = (!matches!(inputs, Inputs::Group(_))).then(|| integers(row, inputs));
        for ((part, x), factor) in parts.zip(row.chunks(segment)).zip(factors) {
            let (scale, zero) = whole.unwrap_or_else(|| integers(x, inputs));
            (factor.scale, factor.zero) = (scale, zero);
            quantize(x, scale, zero, part);
        }
    });
    Some(rows)
}

/// Rows of `cols` values rounded to multiples of E4M3 numbers; `None` where they are to stay as they are. Floats have
/// no zero points, so that a token's asymmetric range is its range.
pub fn floats(x: &[f32], cols: usize, inputs: Inputs) -> Option<Vec<f32>> {
    if inputs == Inputs::Float {
        return None;
    }
    let group = inputs.group(cols);
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(cols.max(1)).zip(x.par_chunks(cols.max(1))).for_each(|(out, x)| {
        for (out, x) in out.chunks_mut(group).zip(x.chunks(group)) {
            let scale = match inputs {
                Inputs::Tensor { scale, .. } => scale,
                _ => scale(largest(x), e4m3::MAX),
            };
            e4m3::round_all(x, scale, out);
        }
    });
    Some(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn noise(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 % 1013) as f32 - 400.0) * 0.037).collect()
    }

    /// Every code is that of the nearest integer to x / scale + zero in f64, and the scale is what it should be.
    #[track_caller]
    fn check(x: &[f32], cols: usize, inputs: Inputs, group: usize, want: impl Fn(&[f32]) -> (f64, f64)) {
        let rows = bytes(x, cols, inputs).unwrap();
        assert_eq!((rows.count, rows.cols, rows.segment), (x.len() / cols, cols, group));
        for (r, row) in x.chunks(cols).enumerate() {
            for (s, x) in row.chunks(group).enumerate() {
                let (codes, factor) = rows.part(r, s);
                let (scale, zero) = want(x);
                assert!((f64::from(factor.scale) - scale).abs() <= 1e-7 * scale, "{} for {scale}", factor.scale);
                assert_eq!(f64::from(factor.zero), zero);
                assert_eq!(factor.sum, codes.iter().map(|c| i32::from(*c)).sum::<i32>());
                for (x, &code) in x.iter().zip(codes) {
                    let exact = (f64::from(*x) / f64::from(factor.scale) + zero).clamp(-128.0, 127.0);
                    assert!((f64::from(code) - exact).abs() <= 0.5 + 1e-5, "{code} for {exact}");
                }
            }
        }
    }

    fn most(x: &[f32]) -> f64 {
        x.iter().fold(0.0, |m, x| m.max(f64::from(*x).abs()))
    }

    #[test]
    fn integers_are_the_nearest() {
        let (x, cols) = (noise(5 * 70), 70);
        check(&x, cols, Inputs::Token, cols, |x| (most(x) / 127.5, 0.0));
        check(&x, cols, Inputs::Group(32), 32, |x| (most(x) / 127.5, 0.0));
        let fixed = Inputs::Tensor { scale: 0.1, zero: -7 };
        check(&x, cols, fixed, cols, |_| (f64::from(0.1f32), -7.0));
        check(&x, cols, Inputs::TokenAsymmetric, cols, |x| {
            let (low, high) = x.iter().fold((0.0f64, 0.0f64), |(l, h), x| (l.min(f64::from(*x)), h.max(f64::from(*x))));
            let scale = (high - low) / 255.0;
            (scale, (-128.0 - low / scale).round_ties_even())
        });
    }

    #[test]
    fn known_codes() {
        // 127.5 is the scale's end, and is cut to 127; halves go to even.
        let x = [127.5, -127.5, 0.5, 1.5, -2.5, 0.0];
        let rows = bytes(&x, 6, Inputs::Token).unwrap();
        assert_eq!(rows.part(0, 0).0, [127, -128, 0, 2, -2, 0]);
        // All above zero: the range starts there, and so does the zero point.
        let rows = bytes(&[51.0, 25.5, 0.1], 3, Inputs::TokenAsymmetric).unwrap();
        assert_eq!((rows.part(0, 0).0, rows.part(0, 0).1.zero), ([127, 0, -128].as_slice(), -128));
        for inputs in [Inputs::Token, Inputs::TokenAsymmetric] {
            let rows = bytes(&[0.0; 4], 4, inputs).unwrap();
            let (codes, factor) = rows.part(0, 0);
            assert!(codes.iter().all(|c| i32::from(*c) == factor.zero) && factor.scale > 0.0, "{inputs:?}");
        }
        assert!(bytes(&x, 6, Inputs::Float).is_none() && floats(&x, 6, Inputs::Float).is_none());
    }

    #[test]
    fn one_nan_is_enough() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 40] {
                let mut x = noise(41);
                x[at] = bad;
                for inputs in [Inputs::Token, Inputs::TokenAsymmetric, Inputs::Group(41)] {
                    assert!(bytes(&x, 41, inputs).unwrap().part(0, 0).1.scale.is_nan(), "{inputs:?}, {bad} at {at}");
                    assert!(floats(&x, 41, inputs).unwrap()[at].is_nan(), "{inputs:?}, {bad} at {at}");
                }
            }
        }
        let fixed = Inputs::Tensor { scale: 0.1, zero: 0 };
        assert!(bytes(&[1.0, f32::NAN], 2, fixed).unwrap().part(0, 0).1.scale.is_nan());
        assert!(floats(&[1.0, f32::NAN], 2, fixed).unwrap()[1].is_nan());
    }

    #[test]
    fn floats_are_the_nearest() {
        let (x, cols) = (noise(3 * 300), 300);
        for (inputs, group) in [(Inputs::Token, 300), (Inputs::Group(128), 128)] {
            let rounded = floats(&x, cols, inputs).unwrap();
            for (x, rounded) in x.chunks(cols).zip(rounded.chunks(cols)) {
                for (x, rounded) in x.chunks(group).zip(rounded.chunks(group)) {
                    let scale = most(x) / 448.0;
                    let grid: Vec<f64> = (0..=255).map(|c| f64::from(e4m3::decode(c)) * scale).collect();
                    for (&x, &found) in x.iter().zip(rounded) {
                        let error = (f64::from(x) - f64::from(found)).abs();
                        let least = grid.iter().fold(f64::INFINITY, |m, v| m.min((v - f64::from(x)).abs()));
                        assert!(error <= least + 1e-4 * scale, "{found} for {x}");
                    }
                }
            }
        }
        // Beyond the end of a fixed range is the end.
        let fixed = floats(&[1000.0, -3.0], 2, Inputs::Tensor { scale: 1.0, zero: 0 }).unwrap();
        assert_eq!(fixed, [448.0, -3.0]);
    }
}
