//! IQ1_S and IQ1_M: values -1, 0, 1 shifted by an eighth, groups of eight on a grid.
//!
//! Without the grid the best scale can be found exactly: the values are sorted, and every pair of places that splits them
//! into low, middle and high ones is tried with every choice of shifts. Then groups move to the grid.

use std::cmp::Ordering;

use half::f16;

use super::codebook::{self, Codebook};
use super::points::{sum_of_squares, weights};
use crate::num::ggml::IQ1_SHIFT;
use crate::num::lanes::Simd;
use crate::num::simd::round_wrapping;

/// Values of the three levels, shifted up and shifted down.
const UP: [f32; 3] = [-1.0 + IQ1_SHIFT, IQ1_SHIFT, 1.0 + IQ1_SHIFT];
const DOWN: [f32; 3] = [-1.0 - IQ1_SHIFT, -IQ1_SHIFT, 1.0 - IQ1_SHIFT];

/// The best split so far: its scale and score, the two places, the number of the choice of shifts.
struct Best {
    scale: f32,
    score: f32,
    split: Option<(usize, usize, usize)>,
}

impl Best {
    #[inline(always)]
    fn offer(&mut self, along: f32, square: f32, split: (usize, usize, usize)) {
        if square > 0.0 && along * along > self.score * square {
            self.scale = along / square;
            self.score = self.scale * along;
            self.split = Some(split);
        }
    }
}

/// A block of up to four groups: its scale, its points, whether each group is shifted down.
#[derive(Clone, Copy)]
struct Found {
    scale: f32,
    points: [u16; 4],
    down: [bool; 4],
}

const EMPTY: Found = Found { scale: 0.0, points: [0; 4], down: [false; 4] };

/// Splits of 32 values with one shift: choice 0 is up, 1 down.
#[inline(always)]
fn split_once(x: &[f32; 32], weights: &[f32; 32], order: &[usize; 32]) -> Best {
    let (mut sum_x, mut sum_w) = ([0.0; 33], [0.0; 33]);
    for (j, &i) in order.iter().enumerate() {
        sum_x[j + 1] = sum_x[j] + weights[i] * x[i];
        sum_w[j + 1] = sum_w[j] + weights[i];
    }
    let mut best = Best { scale: 0.0, score: -f32::MAX, split: None };
    for low in 0..=32 {
        for high in low..=32 {
            for (choice, v) in [UP, DOWN].into_iter().enumerate() {
                let along = sum_x[low] * v[0] + (sum_x[high] - sum_x[low]) * v[1] + (sum_x[32] - sum_x[high]) * v[2];
                let square = sum_w[low] * v[0] * v[0]
                    + (sum_w[high] - sum_w[low]) * v[1] * v[1]
                    + (sum_w[32] - sum_w[high]) * v[2] * v[2];
                best.offer(along, square, (low, high, choice));
            }
        }
    }
    best
}

/// Splits of 16 values with a shift for each half: bit 1 of the choice is set when the first half is shifted down, bit 0
/// the second. Neighbouring levels differ by one, so that sums need only the values below each place.
#[inline(always)]
fn split_halves(x: &[f32; 16], weights: &[f32; 16], order: &[usize; 16]) -> Best {
    let (mut sum_x, mut sum_w) = ([[0.0; 17]; 2], [[0.0; 17]; 2]);
    for (j, &i) in order.iter().enumerate() {
        for half in 0..2 {
            let here = i / 8 == half;
            sum_x[half][j + 1] = if here { sum_x[half][j] + weights[i] * x[i] } else { sum_x[half][j] };
            sum_w[half][j + 1] = if here { sum_w[half][j] + weights[i] } else { sum_w[half][j] };
        }
    }
    let mut best = Best { scale: 0.0, score: -f32::MAX, split: None };
    for low in 0..=16 {
        for high in low..=16 {
            let (mut along, mut square) = ([[0.0; 2]; 2], [[0.0; 2]; 2]);
            for half in 0..2 {
                let below = sum_x[half][low] + sum_x[half][high];
                for (down, v) in [UP, DOWN].into_iter().enumerate() {
                    along[half][down] = sum_x[half][16] * v[2] - below;
                    square[half][down] = sum_w[half][16] * v[2] * v[2]
                        + sum_w[half][low] * (v[0] * v[0] - v[1] * v[1])
                        + sum_w[half][high] * (v[1] * v[1] - v[2] * v[2]);
                }
            }
            for choice in 0..4 {
                let (first, second) = (choice / 2, choice % 2);
                let sums = (along[0][first] + along[1][second], square[0][first] + square[1][second]);
                best.offer(sums.0, sums.1, (low, high, choice));
            }
        }
    }
    best
}

/// The value of a level.
#[inline(always)]
fn value(level: u8, down: bool) -> f32 {
    if down { DOWN[level as usize] } else { UP[level as usize] }
}

#[inline(always)]
fn search<S: Simd, const SIZE: usize>(
    simd: S,
    book: &Codebook,
    x: &[f32; SIZE],
    weights: &[f32; SIZE],
    tiny: f32,
    split: impl Fn(&[f32; SIZE], &[f32; SIZE], &[usize; SIZE]) -> Best,
) -> Found {
    if x.iter().all(|v| v.abs() < tiny) {
        return EMPTY;
    }
    let mut order: [usize; SIZE] = std::array::from_fn(|i| i);
    order.sort_by(|&i, &j| x[i].partial_cmp(&x[j]).unwrap_or(Ordering::Equal));
    let Best { mut scale, split: Some((low, high, choice)), .. } = split(x, weights, &order) else {
        return EMPTY;
    };
    // Bit 1 is the first half's shift, bit 0 the second's, or all there is.
    let mut down = if SIZE == 16 { [choice / 2 == 1, choice % 2 == 1, false, false] } else { [choice == 1; 4] };
    let mut levels = [1u8; SIZE];
    order[..low].iter().for_each(|&i| levels[i] = 0);
    order[high..].iter().for_each(|&i| levels[i] = 2);
    if scale < 0.0 {
        scale = -scale;
        levels = levels.map(|level| 2 - level);
        down = down.map(|down| !down);
    }
    let (groups, group_weights) = (x.as_chunks::<8>().0, weights.as_chunks::<8>().0);
    let mut found = Found { scale, points: [0; 4], down };
    let mut exact = true;
    for (k, levels) in levels.as_chunks::<8>().0.iter().enumerate() {
        let shifted = (1.0, value(0, down[k]));
        let (point, here) = book.nearest(simd, book.code(levels), &groups[k], &group_weights[k], scale, shifted);
        found.points[k] = point;
        exact &= here;
    }
    if !exact {
        let (mut along, mut square) = (0.0, 0.0);
        for i in 0..SIZE {
            let q = value(book.level(found.points[i / 8], i % 8), down[i / 8]);
            along += weights[i] * q * x[i];
            square += weights[i] * q * q;
        }
        if along > 0.0 && square > 0.0 {
            found.scale = along / square;
        }
    }
    found
}

/// Searches all blocks; with the largest scale, which is zero where all are empty.
#[inline(always)]
fn blocks<S: Simd, const SIZE: usize, const COUNT: usize>(
    simd: S,
    x: &[f32; 256],
    weights: &[f32; 256],
    tiny: f32,
    split: impl Fn(&[f32; SIZE], &[f32; SIZE], &[usize; SIZE]) -> Best + Copy,
) -> ([Found; COUNT], f32) {
    let (x, weights) = (x.as_chunks::<SIZE>().0, weights.as_chunks::<SIZE>().0);
    let mut found = [EMPTY; COUNT];
    let mut most = 0.0f32;
    for j in 0..COUNT {
        found[j] = search(simd, &codebook::IQ1, &x[j], &weights[j], tiny, split);
        most = most.max(found[j].scale);
    }
    (found, most)
}

/// The 3-bit code of a scale, given the inverse of the factor.
#[inline(always)]
fn code(inverse: f32, scale: f32) -> u16 {
    round_wrapping(0.5 * (inverse * scale - 1.0)).clamp(0.0, 7.0) as u16
}

#[inline(always)]
pub fn iq1_s<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 50]) {
    out.fill(0);
    let weights = weights(x, importance, 2.0 * sum_of_squares(x) / 256.0, |square| square);
    let (found, most) = blocks::<S, 32, 8>(simd, x, &weights, 1e-12, split_once);
    let d = most / 15.0;
    out[..2].copy_from_slice(&f16::from_f32(d * 1.125).to_le_bytes());
    let inverse = 1.0 / d;
    for (j, found) in found.iter().enumerate() {
        // Without any scale ggml still writes the points.
        let mut high = if most > 0.0 { (code(inverse, found.scale) | (found.down[0] as u16) << 3) << 12 } else { 0 };
        for k in 0..4 {
            out[2 + 4 * j + k] = found.points[k] as u8;
            high |= (found.points[k] >> 8) << (3 * k);
        }
        out[34 + 2 * j..36 + 2 * j].copy_from_slice(&high.to_le_bytes());
    }
}

#[inline(always)]
pub fn iq1_m<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 56]) {
    out.fill(0);
    let weights = weights(x, importance, 2.0 * sum_of_squares(x) / 256.0, |square| square);
    let (found, most) = blocks::<S, 16, 16>(simd, x, &weights, 1e-7, split_halves);
    if most == 0.0 {
        // Without any scale ggml still writes the points.
        for (j, point) in found.iter().flat_map(|found| &found.points[..2]).enumerate() {
            out[j] = *point as u8;
            out[32 + j / 2] |= ((point >> 8) as u8) << (4 * (j % 2));
        }
        return;
    }
    let inverse = 1.0 / (most / 15.0);
    let mut words = [0u16; 4];
    let (mut along, mut square) = (0.0, 0.0);
    for (j, found) in found.iter().enumerate() {
        let code = code(inverse, found.scale);
        words[j / 4] |= code << (3 * (j % 4));
        for k in 0..2 {
            let (point, down) = (found.points[k], found.down[k]);
            out[2 * j + k] = point as u8;
            out[32 + j] |= ((point >> 8) as u8 | (down as u8) << 3) << (4 * k);
            for i in 0..8 {
                let at = 16 * j + 8 * k + i;
                let q = value(codebook::IQ1.level(point, i), down) * (2 * code + 1) as f32;
                along += weights[at] * q * x[at];
                square += weights[at] * q * q;
            }
        }
    }
    // The factor is refitted for the codes.
    let d = if square > 0.0 { along / square } else { most / 15.0 };
    let bits = f16::from_f32(d * 1.1125).to_bits();
    for (j, word) in words.iter_mut().enumerate() {
        *word |= (bits >> (4 * j) & 15) << 12;
        out[48 + 2 * j..50 + 2 * j].copy_from_slice(&word.to_le_bytes());
    }
}
