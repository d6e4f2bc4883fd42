//! IQ4_NL and IQ4_XS: sixteen levels that lie closer together around zero.

use super::blocks::{Blocks, Encoded};
use super::search::{TINY, extreme, ratio, sum_of_squares};
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
    let sums = |inverse: Lanes<S>| {
        let (mut along, mut square) = (zero, zero);
        for i in 0..32 {
            let q = nearest_value(inverse * x[i]);
            let wq = weights[i] * q;
            along += wq * x[i];
            square += wq * q;
        }
        (along, square)
    };
    let (along, square) = sums(zero.with(1.0) / (-extreme / zero.with(first)));
    let mut scale = ratio(along, square);
    let mut best = scale * along;
    for t in -7..=7 {
        let (along, square) = sums(zero.with(t as f32 + first) / extreme);
        let better = square.gt(zero) & (along * along).gt(best * square);
        scale = better.select(along / square, scale);
        best = better.select(scale * along, best);
    }
    extreme.abs().lt(zero.with(TINY)).select(zero, scale)
}

#[inline(always)]
fn block_scale<S: Simd, const VALUES: usize>(blocks: &Blocks<S, VALUES>, first: usize, spread: Lanes<S>) -> Lanes<S> {
    let x = blocks.part::<32>(first);
    let weights = blocks.weights(first, spread).unwrap_or_else(|| x.map(|v| v * v));
    scale(&x, &weights)
}

#[inline(always)]
fn levels<S: Simd>(x: &[Lanes<S>], scale: Lanes<S>) -> [Lanes<S>; 32] {
    let inverse = ratio(scale.with(1.0), scale);
    std::array::from_fn(|i| nearest(inverse * x[i]))
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
    let scales: [Lanes<S>; 8] = std::array::from_fn(|j| block_scale(blocks, 32 * j, spread));
    // The unrounded factor is used on.
    let d = -extreme(&scales) / zero.with(32.0);
    out.half(0, d);
    let inverse = ratio(zero.with(1.0), d);
    let codes = scales.map(|s| (inverse * s).round().clamp(-32.0, 31.0));
    for j in 0..8 {
        out.nibbles(8 + 16 * j, &levels(&blocks.x[32 * j..], d * codes[j]));
    }
    let codes = codes.map(|c| c + zero.with(32.0));
    let highs = codes.map(|c| ((c - zero.with(7.5)) * zero.with(1.0 / 16.0)).round());
    for j in 0..2 {
        let [a, b, c, d] = std::array::from_fn(|k| highs[4 * j + k]);
        out.byte(2 + j, a + b * zero.with(4.0) + c * zero.with(16.0) + d * zero.with(64.0));
    }
    for j in 0..4 {
        let low = |j: usize| codes[j] - highs[j] * zero.with(16.0);
        out.byte(4 + j, low(2 * j) + low(2 * j + 1) * zero.with(16.0));
    }
}
