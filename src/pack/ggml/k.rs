//! The K-quants: 256 values in sub-blocks, whose scales (and minima) are quantized in turn. After the search every level
//! is set anew for the scales as they are stored.

use super::blocks::{Blocks, Encoded, four, high, low};
use super::search::{
    IMPORTANT, TINY, Tries, affine, each, extreme, largest, positive, ratio, sum, sum_of_squares, symmetric,
    symmetric_descent,
};
use crate::num::lanes::{Lanes, Simd};

/// Quantized scales of `N` sub-blocks with their common factor.
type Scales<S, const N: usize> = (Lanes<S>, [Lanes<S>; N]);

/// Scales or minima to codes up to `top`, the largest exactly on it. ggml keeps codes in bytes: that of a negative value
/// counts as 256 more.
#[inline(always)]
fn by_largest<S: Simd, const N: usize>(values: &[Lanes<S>; N], top: f32) -> Scales<S, N> {
    let most = largest(values);
    let inverse = ratio(most.with(top), most);
    (most / most.with(top), each!(most, |j| (inverse * values[j]).round().byte()))
}

/// Levels for the scale and minimum as stored; where the scale is zero the searched ones stay.
#[inline(always)]
fn again<S: Simd, const N: usize>(x: &[Lanes<S>], levels: &mut [Lanes<S>; N], scale: Lanes<S>, min: Lanes<S>, n: f32) {
    let none = scale.eq(scale.with(0.0));
    for i in 0..N {
        let l = ((x[i] + min) / scale).round().clamp(0.0, n);
        levels[i] = none.select(levels[i], l);
    }
}

/// As [`again`] for symmetric grids, levels counted from zero.
#[inline(always)]
fn again_symmetric<S: Simd, const N: usize>(x: &[Lanes<S>], levels: &mut [Lanes<S>; N], scale: Lanes<S>, n: f32) {
    let none = scale.eq(scale.with(0.0));
    for i in 0..N {
        let l = (x[i] / scale).round().clamp(-n, n - 1.0) + scale.with(n);
        levels[i] = none.select(levels[i], l);
    }
}

/// Two low bits of each level; see the decoder for the order.
#[inline(always)]
fn put_pairs<S: Simd, const BYTES: usize>(out: &mut Encoded<BYTES>, at: usize, levels: &[[Lanes<S>; 16]; 16]) {
    for h in 0..2 {
        for l in 0..32 {
            out.byte(at + 32 * h + l, four(each!(levels[0][0], |k| levels[8 * h + 2 * k + l / 16][l % 16])));
        }
    }
}

#[inline(always)]
pub fn q2_k<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<84>) {
    let zero = blocks.x[0].with(0.0);
    let spread = sum_of_squares(&blocks.x) / zero.with(256.0);
    let (mut scales, mut mins, mut weight) = ([zero; 16], [zero; 16], [zero; 16]);
    let mut levels = [[zero; 16]; 16];
    for j in 0..16 {
        let x = blocks.part::<16>(16 * j);
        (scales[j], mins[j], levels[j]) = match blocks.weights(16 * j, spread) {
            Some(weights) => {
                weight[j] = sum(&weights);
                affine(&x, &weights, 3.0, IMPORTANT)
            }
            None => {
                let tries = Tries { first: -0.5, step: 0.1, last: 15, magnitude: true };
                affine(&x, &each!(zero, |i| x[i].abs()), 3.0, tries)
            }
        };
    }
    let ((d, codes), (dmin, min_codes)) = quantized(blocks, &scales, &mins, &weight, 15.0);
    let (d, dmin) = (out.half(80, d), out.half(82, dmin));
    for j in 0..16 {
        // A code beyond four bits, that of a negative scale, shares bits with the minimum's.
        let above = high(codes[j]);
        let (code, min_code) = (low(codes[j], above), above.or(min_codes[j].low_bits(4)));
        out.byte(j, code + min_code * zero.with(16.0));
        again(&blocks.x[16 * j..], &mut levels[j], d * code, dmin * min_code, 3.0);
    }
    put_pairs(&mut out, 16, &levels);
}

/// Codes of scales and of minima.
#[inline(always)]
fn quantized<S: Simd, const N: usize>(
    blocks: &Blocks<S, 256>,
    scales: &[Lanes<S>; N],
    mins: &[Lanes<S>; N],
    weight: &[Lanes<S>; N],
    top: f32,
) -> (Scales<S, N>, Scales<S, N>) {
    match blocks.importance {
        Some(_) => (positive(scales, weight, top), positive(mins, weight, top)),
        None => (by_largest(scales, top), by_largest(mins, top)),
    }
}

#[inline(always)]
pub fn q3_k<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<110>) {
    let zero = blocks.x[0].with(0.0);
    let spread = zero.with(2.0) * sum_of_squares(&blocks.x) / zero.with(256.0);
    let (mut scales, mut weight) = ([zero; 16], [zero; 16]);
    let mut levels = [[zero; 16]; 16];
    for j in 0..16 {
        let x = blocks.part::<16>(16 * j);
        (scales[j], levels[j]) = match blocks.weights(16 * j, spread) {
            Some(weights) => {
                weight[j] = sum(&weights);
                symmetric(&x, &weights, 4)
            }
            None => symmetric_descent(&x, 4),
        };
    }
    let (d, codes) = match blocks.importance {
        Some(_) => symmetric(&scales, &weight, 32),
        None => {
            let most = extreme(&scales);
            let none = most.eq(zero);
            let inverse = zero.with(-32.0) / most;
            let codes: [Lanes<S>; 16] =
                each!(zero, |j| (inverse * scales[j]).round().clamp(-32.0, 31.0) + zero.with(32.0));
            (none.select(zero, zero.with(1.0) / inverse), each!(zero, |j| none.select(zero, codes[j])))
        }
    };
    let d = out.half(108, d);
    for j in 0..16 {
        again_symmetric(&blocks.x[16 * j..], &mut levels[j], d * (codes[j] - zero.with(32.0)), 4.0);
    }
    for l in 0..32 {
        let mut byte = zero;
        for k in 0..8 {
            let level = &mut levels[2 * k + l / 16][l % 16];
            let high = level.gt(zero.with(3.0));
            byte += high.select(zero.with((1 << k) as f32), zero);
            *level = *level - high.select(zero.with(4.0), zero);
        }
        out.byte(l, byte);
    }
    put_pairs(&mut out, 32, &levels);
    let highs: [Lanes<S>; 16] = each!(zero, |j| high(codes[j]));
    for j in 0..8 {
        out.byte(96 + j, low(codes[j], highs[j]) + low(codes[j + 8], highs[j + 8]) * zero.with(16.0));
    }
    for j in 0..4 {
        out.byte(104 + j, four(each!(zero, |k| highs[j + 4 * k])));
    }
}

/// Scales and minima of eight sub-blocks, six bits each, at byte 4; see the decoder. Returns the scales that are read
/// back: the upper bits of a code beyond six, that of a negative scale, share the place of another's upper bits.
#[inline(always)]
fn put_scales<S: Simd, const BYTES: usize>(
    out: &mut Encoded<BYTES>,
    codes: &[Lanes<S>; 8],
    mins: &[Lanes<S>; 8],
) -> [Lanes<S>; 8] {
    let unit = codes[0].with(64.0);
    let mut read = *codes;
    for j in 0..4 {
        let (scale_high, min_high) = (high(codes[j + 4]), high(mins[j + 4]));
        let (scale_low, min_low) = (low(codes[j + 4], scale_high), low(mins[j + 4], min_high));
        read[j] = codes[j].low_bits(6);
        let above = ((codes[j] - read[j]) / unit).or(scale_high.low_bits(2));
        read[j + 4] = scale_low + above * unit.with(16.0);
        out.byte(4 + j, read[j] + above * unit);
        out.byte(8 + j, mins[j] + min_high * unit);
        out.byte(12 + j, scale_low + min_low * unit.with(16.0));
    }
    read
}

/// Scales, minima and levels of Q4_K and Q5_K; writes the first 16 bytes.
#[inline(always)]
fn eight_affine<S: Simd, const BYTES: usize>(
    blocks: &Blocks<S, 256>,
    out: &mut Encoded<BYTES>,
    n: f32,
    tries: Tries,
) -> [[Lanes<S>; 32]; 8] {
    let zero = blocks.x[0].with(0.0);
    let spread = zero.with(2.0) * sum_of_squares(&blocks.x) / zero.with(256.0);
    let (mut scales, mut mins, mut weight) = ([zero; 8], [zero; 8], [zero; 8]);
    let mut levels = [[zero; 32]; 8];
    for j in 0..8 {
        let x = blocks.part::<32>(32 * j);
        (scales[j], mins[j], levels[j]) = match blocks.weights(32 * j, spread) {
            Some(weights) => {
                weight[j] = sum(&weights);
                affine(&x, &weights, n, IMPORTANT)
            }
            None => {
                let size = (sum_of_squares(&x) / zero.with(32.0)).sqrt();
                affine(&x, &each!(zero, |i| size + x[i].abs()), n, tries)
            }
        };
    }
    let ((d, mut codes), (dmin, min_codes)) = quantized(blocks, &scales, &mins, &weight, 63.0);
    // Only Q4_K with importance keeps codes of more than six bits in ggml.
    if n > 15.0 || blocks.importance.is_none() {
        codes = each!(zero, |j| codes[j].min(zero.with(63.0)));
    }
    let (d, dmin) = (out.half(0, d), out.half(2, dmin));
    let codes = put_scales(out, &codes, &min_codes);
    for j in 0..8 {
        again(&blocks.x[32 * j..], &mut levels[j], d * codes[j], dmin * min_codes[j], n);
    }
    levels
}

#[inline(always)]
pub fn q4_k<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<144>) {
    let tries = Tries { first: -1.0, step: 0.1, last: 20, magnitude: false };
    let levels = eight_affine(blocks, &mut out, 15.0, tries);
    for j in 0..4 {
        for l in 0..32 {
            let (low, high) = (levels[2 * j][l], levels[2 * j + 1][l]);
            out.byte(16 + 32 * j + l, low + high * low.with(16.0));
        }
    }
}

#[inline(always)]
pub fn q5_k<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<176>) {
    let tries = Tries { first: -0.5, step: 0.1, last: 15, magnitude: false };
    let mut levels = eight_affine(blocks, &mut out, 31.0, tries);
    let zero = blocks.x[0].with(0.0);
    let (sixteen, top) = (zero.with(16.0), zero.with(15.0));
    for l in 0..32 {
        let mut byte = zero;
        for j in 0..8 {
            let high = levels[j][l].gt(top);
            byte += high.select(zero.with((1 << j) as f32), zero);
            levels[j][l] = levels[j][l] - high.select(sixteen, zero);
        }
        out.byte(16 + l, byte);
    }
    for j in 0..4 {
        for l in 0..32 {
            out.byte(48 + 32 * j + l, levels[2 * j][l] + levels[2 * j + 1][l] * sixteen);
        }
    }
}

#[inline(always)]
pub fn q6_k<S: Simd>(blocks: &Blocks<S, 256>, mut out: Encoded<210>) {
    let zero = blocks.x[0].with(0.0);
    let mut scales = [zero; 16];
    let mut levels = [[zero; 16]; 16];
    for j in 0..16 {
        let x = blocks.part::<16>(16 * j);
        let weights = match &blocks.importance {
            Some(importance) => each!(zero, |i| importance[16 * j + i]),
            None => each!(zero, |i| x[i] * x[i]),
        };
        (scales[j], levels[j]) = symmetric(&x, &weights, 32);
    }
    let most = extreme(&scales);
    let none = most.abs().lt(zero.with(TINY));
    let inverse = zero.with(-128.0) / most;
    let d = out.half(208, none.select(zero, zero.with(1.0) / inverse));
    for j in 0..16 {
        let code = none.select(zero, (inverse * scales[j]).round().min(zero.with(127.0)));
        out.byte(192 + j, code);
        again_symmetric(&blocks.x[16 * j..], &mut levels[j], d * code, 32.0);
        for l in &mut levels[j] {
            *l = none.select(zero, *l);
        }
    }
    let sixteen = zero.with(16.0);
    for h in 0..2 {
        for l in 0..32 {
            let values: [Lanes<S>; 4] = each!(zero, |k| levels[8 * h + 2 * k + l / 16][l % 16]);
            let highs: [Lanes<S>; 4] = each!(zero, |k| high(values[k]));
            let lows: [Lanes<S>; 4] = each!(zero, |k| low(values[k], highs[k]));
            out.byte(64 * h + l, lows[0] + lows[2] * sixteen);
            out.byte(64 * h + 32 + l, lows[1] + lows[3] * sixteen);
            out.byte(128 + 32 * h + l, four(highs));
        }
    }
}
