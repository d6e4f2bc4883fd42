//! IQ4_NL and IQ4_XS: sixteen levels that lie closer together around zero.

use super::blocks::{Blocks, Encoded, four, high, low};
use super::search::{TINY, each, extreme, ratio, sum_of_squares};
use crate::num::ggml::basic::IQ4_LEVELS;
use crate::num::lanes::{Lanes, Simd};

/// The number of the level nearest to `x` and the level; halfway the upper one.
#[inline(always)]
fn nearest<S: Simd>(x: Lanes<S>) -> Lanes<S> {
    let mut level = x.with(0.0);
    for pair in IQ4_LEVELS.windows(2) {
        let middle = (pair[0] as f32 + pair[1] as f32) / 2.0;
        level = x.ge(x.with(middle)).select(level + x.with(1.0), level);
    }
    level
}

/// As [`nearest`], the level's value.
#[inline(always)]
fn nearest_value<S: Simd>(x: Lanes<S>) -> Lanes<S> {
    let mut value = x.with(IQ4_LEVELS[0] as f32);
    for pair in IQ4_LEVELS.windows(2) {
        let (low, high) = (pair[0] as f32, pair[1] as f32);
        value = x.ge(x.with((low + high) / 2.0)).select(x.with(high), value);
    }
    value
}

/// The scale of 32 values: the best of sixteen that map the extreme value near an end of the table.
#[inline(always)]
fn scale<S: Simd>(x: &[Lanes<S>; 32], weights: &[Lanes<S>; 32]) -> Lanes<S> {
    let zero = x[0].with(0.0);
    let first = IQ4_LEVELS[0] as f32;
    let extreme = extreme(x);
    let (mut scale, mut best) = (zero, zero);
    // The first try puts the extreme value on the other side.
    let first_try = zero.with(1.0) / (-extreme / zero.with(first));
    for t in -8..=7 {
        let inverse = if t == -8 { first_try } else { zero.with(t as f32 + first) / extreme };
        let (mut along, mut square) = (zero, zero);
        for i in 0..32 {
            let q = nearest_value(inverse * x[i]);
            let wq = weights[i] * q;
            along += wq * x[i];
            square += wq * q;
        }
        let better = match t {
            -8 => zero.eq(zero),
            _ => square.gt(zero) & (along * along).gt(best * square),
        };
        scale = better.select(ratio(along, square), scale);
        best = better.select(scale * along, best);
    }
    extreme.abs().lt(zero.with(TINY)).select(zero, scale)
}

#[inline(always)]
fn block_scale<S: Simd, const VALUES: usize>(blocks: &Blocks<S, VALUES>, first: usize, spread: Lanes<S>) -> Lanes<S> {
    let x = blocks.part::<32>(first);
    let weights = match blocks.weights(first, spread) {
        Some(weights) => weights,
        None => each!(spread, |i| x[i] * x[i]),
    };
    scale(&x, &weights)
}

#[inline(always)]
fn levels<S: Simd>(x: &[Lanes<S>], scale: Lanes<S>) -> [Lanes<S>; 32] {
    let inverse = ratio(scale.with(1.0), scale);
    each!(scale, |i| nearest(inverse * x[i]))
}

#[inline(always)]
pub fn iq4_nl<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<18>) {
    let spread = sum_of_squares(&blocks.x) * blocks.x[0].with(2.0 / 32.0);
    let scale = block_scale(blocks, 0, spread);
    out.half(0, scale);
    out.nibbles(2, &levels(&blocks.x, scale));
}

#[inline(always)]
pub fn iq4_xs<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<136>) {
    let zero = blocks.x[0].with(0.0);
    let spread = sum_of_squares(&blocks.x) * zero.with(2.0 / 256.0);
    let scales: [Lanes<S>; 8] = each!(zero, |j| block_scale(blocks, 32 * j, spread));
    // The unrounded factor is used on.
    let d = -extreme(&scales) / zero.with(32.0);
    out.half(0, d);
    let inverse = ratio(zero.with(1.0), d);
    let codes: [Lanes<S>; 8] = each!(zero, |j| (inverse * scales[j]).round().clamp(-32.0, 31.0));
    for j in 0..8 {
        out.nibbles(8 + 16 * j, &levels(&blocks.x[32 * j..], d * codes[j]));
    }
    let codes: [Lanes<S>; 8] = each!(zero, |j| codes[j] + zero.with(32.0));
    let highs: [Lanes<S>; 8] = each!(zero, |j| high(codes[j]));
    for j in 0..2 {
        out.byte(2 + j, four([highs[4 * j], highs[4 * j + 1], highs[4 * j + 2], highs[4 * j + 3]]));
    }
    for j in 0..4 {
        let (a, b) = (2 * j, 2 * j + 1);
        out.byte(4 + j, low(codes[a], highs[a]) + low(codes[b], highs[b]) * zero.with(16.0));
    }
}
