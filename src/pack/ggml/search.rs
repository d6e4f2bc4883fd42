//! The searches for scales that ggml's types share, one problem a lane.
//!
//! To give ggml's bytes they keep its order of operations: sums run over the values in order, products from the left,
//! a try replaces the best one only when it is strictly better.

use crate::num::lanes::{Lanes, Simd};

/// Below this magnitude ggml takes values for zero.
pub const TINY: f32 = 1e-15;

/// An array by index. A macro, for closures may be left out of line, and what is out of line is compiled for the
/// plainest vectors.
macro_rules! each {
    ($zero:expr, |$i:ident| $value:expr) => {{
        let mut all = [$zero; _];
        for $i in 0..all.len() {
            all[$i] = $value;
        }
        all
    }};
}

pub(super) use each;

/// The first value of largest magnitude, with its sign.
#[inline(always)]
pub fn extreme<S: Simd>(x: &[Lanes<S>]) -> Lanes<S> {
    let mut best = x[0].with(0.0);
    for &v in x {
        best = v.abs().gt(best.abs()).select(v, best);
    }
    best
}

/// The largest value, zero at least.
#[inline(always)]
pub fn largest<S: Simd>(x: &[Lanes<S>]) -> Lanes<S> {
    let mut best = x[0].with(0.0);
    for &v in x {
        best = v.max(best);
    }
    best
}

#[inline(always)]
pub fn sum<S: Simd>(x: &[Lanes<S>]) -> Lanes<S> {
    let mut sum = x[0].with(0.0);
    for &v in x {
        sum += v;
    }
    sum
}

#[inline(always)]
pub fn sum_of_squares<S: Simd>(x: &[Lanes<S>]) -> Lanes<S> {
    let mut sum = x[0].with(0.0);
    for &v in x {
        sum += v * v;
    }
    sum
}

/// `a / b`, zero where `b` is.
#[inline(always)]
pub fn ratio<S: Simd>(a: Lanes<S>, b: Lanes<S>) -> Lanes<S> {
    let zero = a.with(0.0);
    b.eq(zero).select(zero, a / b)
}

/// A symmetric grid for values of both signs: levels `-n` to `n - 1`. Levels are counted from zero.
///
/// Nineteen scales that map the extreme value near `-n` are tried; the scale that is returned is the least-squares one
/// for the best try's levels.
#[inline(always)]
pub fn symmetric<S: Simd, const N: usize>(
    x: &[Lanes<S>; N],
    weights: &[Lanes<S>; N],
    n: i32,
) -> (Lanes<S>, [Lanes<S>; N]) {
    let zero = x[0].with(0.0);
    let extreme = extreme(x);
    let empty = extreme.abs().lt(zero.with(TINY));
    let (low, high) = (-n as f32, (n - 1) as f32);
    let (mut inverse, mut scale, mut best) = (zero, zero, zero);
    for t in [0, -9, -8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
        let tried = zero.with(-(n as f32 + 0.1 * t as f32)) / extreme;
        let (mut along, mut square) = (zero, zero);
        for i in 0..N {
            let l = (tried * x[i]).round().clamp(low, high);
            along += weights[i] * x[i] * l;
            square += weights[i] * l * l;
        }
        let better = match t {
            0 => zero.eq(zero),
            _ => square.gt(zero) & (along * along).gt(best * square),
        };
        scale = better.select(ratio(along, square), scale);
        best = better.select(scale * along, best);
        inverse = better.select(tried, inverse);
    }
    let count = zero.with(n as f32);
    let levels = each!(zero, |i| empty.select(zero, (inverse * x[i]).round().clamp(low, high) + count));
    (empty.select(zero, scale), levels)
}

/// Coordinate descent: each level in turn moves to where it fits the scale of the others best, if the whole gains; at
/// most five sweeps. Returns the two sums whose ratio is the scale.
#[inline(always)]
fn descend<S: Simd, const N: usize, const SIGNED: bool>(
    x: &[Lanes<S>; N],
    weights: &[Lanes<S>; N],
    levels: &mut [Lanes<S>; N],
    (mut along, mut square): (Lanes<S>, Lanes<S>),
    (low, high): (f32, f32),
) -> (Lanes<S>, Lanes<S>) {
    let (zero, one) = (x[0].with(0.0), x[0].with(1.0));
    let mut active = one;
    for _ in 0..5 {
        let mut changed = zero;
        for i in 0..N {
            let (w, l) = (weights[i], levels[i]);
            let rest_along = along - w * x[i] * l;
            let rest_square = square - w * l * l;
            let mut new = (x[i] * rest_square / rest_along).round().min(zero.with(high));
            // Lanes that went through a sweep without a change have stopped.
            let mut accept = active.gt(zero) & rest_along.gt(zero);
            if SIGNED {
                new = new.max(zero.with(low));
            } else {
                accept = accept & rest_square.gt(zero);
            }
            let new_along = rest_along + w * x[i] * new;
            let new_square = rest_square + w * new * new;
            let gain = (new_along * new_along * square).gt(along * along * new_square);
            accept = accept & (new.lt(l) | new.gt(l)) & new_square.gt(zero) & gain;
            // ggml keeps levels that are not signed in bytes, in which negative ones wrap.
            levels[i] = accept.select(if SIGNED { new } else { new.byte() }, l);
            along = accept.select(new_along, along);
            square = accept.select(new_square, square);
            changed = accept.select(one, changed);
        }
        active = changed;
        if !changed.gt(zero).any() {
            break;
        }
    }
    (along, square)
}

/// As [`symmetric`] with the squares of the values as weights, by coordinate descent from one scale.
#[inline(always)]
pub fn symmetric_descent<S: Simd, const N: usize>(x: &[Lanes<S>; N], n: i32) -> (Lanes<S>, [Lanes<S>; N]) {
    let zero = x[0].with(0.0);
    let extreme = extreme(x);
    let empty = extreme.abs().lt(zero.with(TINY));
    let (low, high) = (-n as f32, (n - 1) as f32);
    let inverse = zero.with(low) / extreme;
    let weights = each!(zero, |i| x[i] * x[i]);
    let mut levels: [Lanes<S>; N] = each!(zero, |i| (inverse * x[i]).round().clamp(low, high));
    let (mut along, mut square) = (zero, zero);
    for i in 0..N {
        along += weights[i] * x[i] * levels[i];
        square += weights[i] * levels[i] * levels[i];
    }
    let (along, square) = descend::<S, N, true>(x, &weights, &mut levels, (along, square), (low, high));
    let levels = each!(zero, |i| empty.select(zero, levels[i] + zero.with(n as f32)));
    (empty.select(zero, ratio(along, square)), levels)
}

/// A grid for values that are not negative, such as the scales of sub-blocks: levels 0 to `n`.
#[inline(always)]
pub fn positive<S: Simd, const N: usize>(
    x: &[Lanes<S>; N],
    weights: &[Lanes<S>; N],
    n: f32,
) -> (Lanes<S>, [Lanes<S>; N]) {
    let zero = x[0].with(0.0);
    let (top, one) = (zero.with(n), zero.with(1.0));
    let most = largest(x);
    let empty = most.lt(zero.with(TINY));
    let (mut inverse, mut best) = (zero, zero);
    for t in [0, -4, -3, -2, -1, 1, 2, 3, 4] {
        let tried = zero.with(0.1 * t as f32 + n) / most;
        let scale = one / tried;
        let mut error = zero;
        for i in 0..N {
            let l = (tried * x[i]).round();
            // ggml keeps the levels of the first try in bytes: that of a negative value counts as 256 more.
            let l = if t == 0 { l.byte() } else { l.min(top) };
            let difference = x[i] - scale * l;
            error += weights[i] * difference * difference;
        }
        let better = if t == 0 { zero.eq(zero) } else { error.lt(best) };
        best = better.select(error, best);
        inverse = better.select(tried, inverse);
    }
    let mut levels: [Lanes<S>; N] = each!(zero, |i| (inverse * x[i]).round().min(top));
    let (mut along, mut square) = (zero, zero);
    for i in 0..N {
        along += weights[i] * x[i] * levels[i];
        square += weights[i] * levels[i] * levels[i];
    }
    for l in &mut levels {
        *l = l.byte();
    }
    let (along, square) = descend::<S, N, false>(x, weights, &mut levels, (along, square), (0.0, n));
    let scale = square.gt(zero).select(along / square, zero);
    (empty.select(zero, scale), each!(zero, |i| empty.select(zero, levels[i])))
}

/// The tries of [`affine`]: the numerator of the inverse scale is `n + first + step * t`, `t` from 0 to `last`.
#[derive(Clone, Copy)]
pub struct Tries {
    pub first: f32,
    pub step: f32,
    pub last: i32,
    /// Errors count by magnitude, not by square.
    pub magnitude: bool,
}

/// The tries for weights with importance.
pub const IMPORTANT: Tries = Tries { first: -0.9, step: 0.05, last: 36, magnitude: false };

/// The level of a value above a minimum.
#[inline(always)]
fn affine_level<S: Simd>(inverse: Lanes<S>, x: Lanes<S>, min: Lanes<S>, n: f32) -> Lanes<S> {
    (inverse * (x - min)).round().clamp(0.0, n)
}

/// The weighted error of levels.
#[inline(always)]
fn affine_error<S: Simd, const N: usize>(
    x: &[Lanes<S>; N],
    weights: &[Lanes<S>; N],
    levels: &[Lanes<S>; N],
    scale: Lanes<S>,
    min: Lanes<S>,
    tries: Tries,
) -> Lanes<S> {
    let mut error = scale.with(0.0);
    for i in 0..N {
        let difference = scale * levels[i] + min - x[i];
        let size = if tries.magnitude { difference.abs() } else { difference * difference };
        error += weights[i] * size;
    }
    error
}

/// A grid with a minimum: values are near `scale * level - minimum`, levels 0 to `n`, the minimum not negative.
///
/// Each try sets levels, then scale and minimum by least squares; a try that was better moves the minimum from which
/// later tries count.
#[inline(always)]
pub fn affine<S: Simd, const N: usize>(
    x: &[Lanes<S>; N],
    weights: &[Lanes<S>; N],
    n: f32,
    tries: Tries,
) -> (Lanes<S>, Lanes<S>, [Lanes<S>; N]) {
    let zero = x[0].with(0.0);
    let (mut min, mut max) = (x[0], x[0]);
    let (mut sum_w, mut sum_x) = (weights[0], weights[0] * x[0]);
    for i in 1..N {
        min = x[i].min(min);
        max = x[i].max(max);
        sum_w += weights[i];
        sum_x += weights[i] * x[i];
    }
    min = min.gt(zero).select(zero, min);
    let empty = min.ge(max);
    let mut inverse = zero.with(n) / (max - min);
    let mut scale = zero.with(1.0) / inverse;
    let mut start = min;
    let mut levels = each!(zero, |i| affine_level(inverse, x[i], min, n));
    let mut best = affine_error(x, weights, &levels, scale, min, tries);
    for t in 0..=tries.last {
        let tried = zero.with(tries.first + tries.step * t as f32 + n) / (max - min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (zero, zero, zero);
        for i in 0..N {
            let l = affine_level(tried, x[i], min, n);
            levels[i] = l;
            let wl = weights[i] * l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * x[i];
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        let free_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        let free_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        let above = free_min.gt(zero);
        let tried_scale = above.select(sum_xl / sum_l2, free_scale);
        let tried_min = above.select(zero, free_min);
        let tried_error = affine_error(x, weights, &levels, tried_scale, tried_min, tries);
        let better = determinant.gt(zero) & tried_error.lt(best);
        best = better.select(tried_error, best);
        inverse = better.select(tried, inverse);
        start = better.select(min, start);
        scale = better.select(tried_scale, scale);
        min = better.select(tried_min, min);
    }
    let levels = each!(zero, |i| empty.select(zero, affine_level(inverse, x[i], start, n)));
    (empty.select(zero, scale), -min, levels)
}
