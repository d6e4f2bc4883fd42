//! Blocks of 32 values: Q4_0 to Q8_0 and MXFP4, and the ternary types, whose scale is the largest magnitude.

use super::blocks::{Blocks, Encoded, four};
use super::search::{IMPORTANT, affine, each, extreme, ratio, symmetric};
use crate::num::ggml::basic::{MXFP4_LEVELS, mxfp4_scale};
use crate::num::ggml::ternary::TQ1_GROUPS;
use crate::num::lanes::{Lanes, Simd, Truths};

/// The largest integer that is not above `x`.
#[inline(always)]
fn floor<S: Simd>(x: Lanes<S>) -> Lanes<S> {
    let near = x.round();
    near.gt(x).select(near - x.with(1.0), near)
}

/// The nearest integer, ties away from zero.
#[inline(always)]
fn round_away<S: Simd>(x: Lanes<S>) -> Lanes<S> {
    let (near, one, half) = (x.round(), x.with(1.0), x.with(0.5));
    let up = (x - near).eq(half) & x.gt(x.with(0.0));
    let down = (near - x).eq(half) & x.lt(x.with(0.0));
    up.select(near + one, down.select(near - one, near))
}

/// Whether a scale is so small that its inverse is infinite. ggml turns the products into integers all the same, of which
/// x86-64 makes zero; the scale is stored as zero.
#[inline(always)]
fn overflown<S: Simd>(inverse: Lanes<S>) -> Truths<S> {
    inverse.abs().eq(inverse.with(f32::INFINITY))
}

/// Scale and levels, counted from zero, of a symmetric grid of `2 n` levels.
#[inline(always)]
fn symmetric_levels<S: Simd>(blocks: &Blocks<S, 32>, n: i32) -> (Lanes<S>, [Lanes<S>; 32]) {
    match blocks.weights(0, blocks.row_square) {
        Some(weights) => symmetric(&blocks.x, &weights, n),
        None => {
            // The extreme value becomes the lowest level exactly.
            let d = extreme(&blocks.x) / blocks.x[0].with(-n as f32);
            let inverse = ratio(d.with(1.0), d);
            let (middle, top) = (d.with(n as f32 + 0.5), d.with((2 * n - 1) as f32));
            let none = overflown(inverse);
            (d, each!(d, |i| none.select(d.with(0.0), floor(blocks.x[i] * inverse + middle).min(top))))
        }
    }
}

/// Scale, minimum and levels up to `n`.
#[inline(always)]
fn affine_levels<S: Simd>(blocks: &Blocks<S, 32>, n: f32) -> (Lanes<S>, Lanes<S>, [Lanes<S>; 32]) {
    let x = &blocks.x;
    if let Some(weights) = blocks.weights(0, blocks.row_square) {
        let (d, min, levels) = affine(x, &weights, n, IMPORTANT);
        return (d, -min, levels);
    }
    let (mut min, mut max) = (x[0], x[0]);
    for &v in x {
        min = v.min(min);
        max = v.max(max);
    }
    let top = min.with(n);
    let d = (max - min) / top;
    let inverse = ratio(d.with(1.0), d);
    (d, min, each!(d, |i| floor((x[i] - min) * inverse + min.with(0.5)).min(top)))
}

/// The fifth bits of 32 levels at byte `at`, the nibbles after them.
#[inline(always)]
fn put_five<S: Simd, const BYTES: usize>(out: &mut Encoded<BYTES>, at: usize, levels: &[Lanes<S>; 32]) {
    let zero = levels[0].with(0.0);
    let (sixteen, top) = (zero.with(16.0), zero.with(15.0));
    for k in 0..4 {
        let mut byte = zero;
        for j in 0..8 {
            byte += levels[8 * k + j].gt(top).select(zero.with((1 << j) as f32), zero);
        }
        out.byte(at + k, byte);
    }
    let low: [Lanes<S>; 32] = each!(zero, |i| levels[i] - levels[i].gt(top).select(sixteen, zero));
    out.nibbles(at + 4, &low);
}

#[inline(always)]
pub fn q4_0<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<18>) {
    let (d, levels) = symmetric_levels(blocks, 8);
    out.half(0, d);
    out.nibbles(2, &levels);
}

#[inline(always)]
pub fn q4_1<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<20>) {
    let (d, min, levels) = affine_levels(blocks, 15.0);
    out.half(0, d);
    out.half(2, min);
    out.nibbles(4, &levels);
}

#[inline(always)]
pub fn q5_0<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<22>) {
    let (d, levels) = symmetric_levels(blocks, 16);
    out.half(0, d);
    put_five(&mut out, 2, &levels);
}

#[inline(always)]
pub fn q5_1<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<24>) {
    let (d, min, levels) = affine_levels(blocks, 31.0);
    out.half(0, d);
    out.half(2, min);
    put_five(&mut out, 4, &levels);
}

#[inline(always)]
pub fn q8_0<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<34>) {
    let d = extreme(&blocks.x).abs() / blocks.x[0].with(127.0);
    let inverse = ratio(d.with(1.0), d);
    out.half(0, d);
    for j in 0..32 {
        out.byte(2 + j, round_away(blocks.x[j] * inverse));
    }
}

/// Where the exponent would be below zero, which ggml lets wrap into a huge scale or the code that MX keeps for NaN, it is
/// zero here: such blocks, below 2^-125, are not ggml's bytes.
#[inline(always)]
pub fn mxfp4<S: Simd>(blocks: &Blocks<S, 32>, mut out: Encoded<17>) {
    // The largest value lies below 8 units of the scale, twice the last power of two among the levels.
    let exponent = |most: f32| match most > 0.0 {
        true => ((most as f64).log2() as f32).floor() - 2.0 + 127.0,
        false => 0.0,
    };
    let exponents = extreme(&blocks.x).abs().map(|most| exponent(most).max(0.0));
    let scale = exponents.map(|e| mxfp4_scale(e as u8));
    out.byte(0, exponents);
    let levels: [Lanes<S>; 32] = each!(scale, |i| {
        let x = blocks.x[i];
        let (mut best, mut level) = ((scale * x.with(0.0) - x).abs(), x.with(0.0));
        for (k, &value) in MXFP4_LEVELS.iter().enumerate().skip(1) {
            let error = (scale * x.with(value as f32) - x).abs();
            let nearer = error.lt(best);
            best = nearer.select(error, best);
            level = nearer.select(x.with(k as f32), level);
        }
        level
    });
    out.nibbles(1, &levels);
}

/// Levels 0, 1, 2 of 256 values by the largest magnitude.
#[inline(always)]
fn ternary_levels<S: Simd>(blocks: &Blocks<S, 256>) -> (Lanes<S>, [Lanes<S>; 256]) {
    let d = extreme(&blocks.x).abs();
    let inverse = ratio(d.with(1.0), d);
    let none = overflown(inverse);
    (d, each!(d, |i| none.select(d.with(0.0), round_away(blocks.x[i] * inverse)) + d.with(1.0)))
}

#[inline(always)]
pub fn tq1_0<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<54>) {
    let (d, levels) = ternary_levels(blocks);
    out.half(52, d);
    let mut at = 0;
    for (first, bytes, digits) in TQ1_GROUPS {
        for l in 0..bytes {
            let mut digit_sum = d.with(0.0);
            for k in 0..5 {
                let digit = if k < digits { levels[at + bytes * k + l] } else { d.with(0.0) };
                digit_sum = digit_sum * d.with(3.0) + digit;
            }
            // Five digits in base 3 as a fraction of 256, rounded up so that the decoder's products give them back.
            out.byte(first + l, digit_sum.map(|n| ((n as u32 * 256).div_ceil(243)) as f32));
        }
        at += bytes * digits;
    }
}

#[inline(always)]
pub fn tq2_0<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<66>) {
    let (d, levels) = ternary_levels(blocks);
    out.half(64, d);
    for h in 0..2 {
        for l in 0..32 {
            out.byte(32 * h + l, four(each!(d, |k| levels[128 * h + 32 * k + l])));
        }
    }
}
