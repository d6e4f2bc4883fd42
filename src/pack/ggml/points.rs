//! The IQ2 and IQ3 types: groups of eight or four magnitudes are points of a grid, signs are apart.

use std::array::from_fn;

use half::f16;

use super::codebook::{self, Codebook};
use super::search::positive;
use crate::num::lanes::{Lanes, Scalar};
use crate::num::simd::round;

/// What sets the types apart.
struct Rules {
    book: &'static Codebook,
    /// Levels of a magnitude: 1, 3, 5, ..
    levels: usize,
    /// Tries on each side of the scale that maps the largest magnitude to the top level, and their distance.
    tries: i32,
    step: f32,
    /// Below this magnitude a block is empty.
    tiny: f32,
    /// Seven signs of eight are stored, so that the number of minus signs is even.
    seven: bool,
    /// The tries are about the scale of a search without grid.
    free: bool,
    /// At the end every group moves to the point for the final scale, not only those without an exact point.
    all: bool,
}

/// A block of `SIZE` values: its scale, the points of its groups, the signs of its eights.
struct Found {
    scale: f32,
    points: [u16; 8],
    signs: [u8; 4],
}

const EMPTY: Found = Found { scale: 0.0, points: [0; 8], signs: [0; 4] };

/// Signs and magnitudes. With seven signs for eight values, an odd number of minus signs is made even at the value that
/// matters least, whose magnitude becomes negative.
#[inline(always)]
fn split<const SIZE: usize>(x: &[f32; SIZE], weights: &[f32; SIZE], seven: bool) -> ([f32; SIZE], [u8; 4]) {
    let (mut magnitudes, mut signs) = ([0.0; SIZE], [0; 4]);
    for k in 0..SIZE / 8 {
        let mut code = 0u8;
        for i in 8 * k..8 * k + 8 {
            let minus = !(x[i] >= 0.0);
            magnitudes[i] = if minus { -x[i] } else { x[i] };
            code |= (minus as u8) << (i % 8);
        }
        if seven && code.count_ones() % 2 == 1 {
            let cost: [f32; 8] = from_fn(|i| weights[8 * k + i] * x[8 * k + i] * x[8 * k + i]);
            let mut least = 0;
            for i in 1..8 {
                if cost[i] < cost[least] {
                    least = i;
                }
            }
            magnitudes[8 * k + least] = -magnitudes[8 * k + least];
            code ^= 1 << least;
        }
        signs[k] = if seven { code & 127 } else { code };
    }
    (magnitudes, signs)
}

/// The points nearest to a group at a scale: its number and whether the rounded levels are a point.
#[inline(always)]
fn place<const GROUP: usize>(
    rules: &Rules,
    x: &[f32; GROUP],
    roots: &[f32; GROUP],
    inverse: f32,
    scale: f32,
) -> (u16, bool) {
    let top = (rules.levels - 1) as f32;
    let mut levels = [0; GROUP];
    for i in 0..GROUP {
        levels[i] = round(0.5 * (inverse * x[i] - 1.0)).max(0.0).min(top) as u8;
    }
    rules.book.nearest(rules.book.code(&levels), x, roots, scale, (2.0, 1.0))
}

/// The sums whose ratio is the least-squares scale.
#[inline(always)]
fn sums<const SIZE: usize, const GROUP: usize>(
    rules: &Rules,
    x: &[f32; SIZE],
    weights: &[f32; SIZE],
    points: &[u16; 8],
) -> (f32, f32) {
    let (mut along, mut square) = (0.0, 0.0);
    for i in 0..SIZE {
        let q = (2 * rules.book.level(points[i / GROUP], i % GROUP) + 1) as f32;
        along += weights[i] * x[i] * q;
        square += weights[i] * q * q;
    }
    (along, square)
}

#[inline(always)]
fn search<const SIZE: usize, const GROUP: usize>(rules: &Rules, x: &[f32; SIZE], weights: &[f32; SIZE]) -> Found {
    let (x, mut signs) = split(x, weights, rules.seven);
    let mut most = x[0];
    for &v in &x {
        most = if v > most { v } else { most };
    }
    if most < rules.tiny || most == 0.0 {
        return EMPTY;
    }
    let top = (2 * rules.levels - 1) as f32;
    let (mut scale, mut reference) = (most / top, most);
    if rules.free {
        let lane = |v: &[f32; SIZE]| v.map(|v| Lanes::splat(Scalar, v));
        scale = positive(&lane(&x), &lane(weights), (rules.levels + 1) as f32).0.as_slice()[0];
        reference = scale * rules.levels as f32;
        if reference <= 0.0 {
            return EMPTY;
        }
    }
    let roots = weights.map(f32::sqrt);
    let (groups, group_roots) = (x.as_chunks::<GROUP>().0, roots.as_chunks::<GROUP>().0);
    let (mut points, mut exact, mut best) = ([0; 8], [!rules.all; 8], 0.0);
    for t in -rules.tries..=rules.tries {
        let inverse = (top + t as f32 * rules.step) / reference;
        let tried_scale = 1.0 / inverse;
        let (mut tried, mut tried_exact) = ([0; 8], [true; 8]);
        for k in 0..groups.len() {
            (tried[k], tried_exact[k]) = place(rules, &groups[k], &group_roots[k], inverse, tried_scale);
        }
        let (along, square) = sums::<SIZE, GROUP>(rules, &x, weights, &tried);
        if square > 0.0 && along * along > best * square {
            scale = along / square;
            best = scale * along;
            (points, exact) = (tried, tried_exact);
        }
    }
    let again = rules.free || exact[..groups.len()].contains(&false);
    if again && scale > 0.0 {
        let inverse = 1.0 / scale;
        for k in 0..groups.len() {
            if rules.all || !exact[k] {
                points[k] = place(rules, &groups[k], &group_roots[k], inverse, scale).0;
            }
        }
        let (along, square) = sums::<SIZE, GROUP>(rules, &x, weights, &points);
        if square > 0.0 {
            scale = along / square;
        }
    }
    if scale < 0.0 {
        scale = -scale;
        signs = signs.map(|code| !code & if rules.seven { 127 } else { 255 });
    }
    Found { scale, points, signs }
}

/// Weights of errors: importance times the root of `spread + x^2`, or a function of `x^2` where there is none.
#[inline(always)]
pub fn weights(x: &[f32; 256], importance: Option<&[f32]>, spread: f32, plain: impl Fn(f32) -> f32) -> [f32; 256] {
    let mut weights = [0.0; 256];
    for i in 0..256 {
        weights[i] = match importance {
            Some(importance) => importance[i] * (spread + x[i] * x[i]).sqrt(),
            None => plain(x[i] * x[i]),
        };
    }
    weights
}

/// The sum of squares of a block, in order.
#[inline(always)]
pub fn sum_of_squares(x: &[f32; 256]) -> f32 {
    let mut sum = 0.0;
    for v in x {
        sum += v * v;
    }
    sum
}

/// Searches the blocks, writes the common scale times `gain`, and returns the blocks with the codes of their scales;
/// `None` when all are empty.
#[inline(always)]
fn blocks<const SIZE: usize, const GROUP: usize, const COUNT: usize>(
    rules: &Rules,
    x: &[f32; 256],
    weights: &[f32; 256],
    gain: f32,
    out: &mut [u8],
) -> Option<[(Found, u8); COUNT]> {
    let (x, weights) = (x.as_chunks::<SIZE>().0, weights.as_chunks::<SIZE>().0);
    let mut found = [const { EMPTY }; COUNT];
    let mut most = 0.0f32;
    for j in 0..COUNT {
        found[j] = search::<SIZE, GROUP>(rules, &x[j], &weights[j]);
        most = most.max(found[j].scale);
    }
    out.fill(0);
    if most == 0.0 {
        return None;
    }
    let d = most / 31.0;
    out[..2].copy_from_slice(&f16::from_f32(d * gain).to_le_bytes());
    let inverse = 1.0 / d;
    Some(found.map(|found| {
        let code = round(0.5 * (inverse * found.scale - 1.0)).max(0.0).min(15.0) as u8;
        (found, code)
    }))
}

/// Four 7-bit codes of signs and a scale.
fn word(found: &Found, code: u8) -> [u8; 4] {
    let signs = (0..4).map(|k| (found.signs[k] as u32) << (7 * k)).sum::<u32>();
    (signs | (code as u32) << 28).to_le_bytes()
}

pub fn iq2_xxs(x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 66]) {
    let book = &codebook::IQ2_XXS;
    let rules = Rules { book, levels: 3, tries: 6, step: 0.1, tiny: 1e-15, seven: true, free: true, all: true };
    let weights = weights(x, importance, sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<32, 8, 8>(&rules, x, &weights, 1.0, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..4 {
            out[2 + 8 * j + k] = found.points[k] as u8;
        }
        out[6 + 8 * j..10 + 8 * j].copy_from_slice(&word(found, *code));
    }
}

pub fn iq2_xs(x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 74]) {
    let book = &codebook::IQ2_XS;
    let rules = Rules { book, levels: 3, tries: 9, step: 0.1, tiny: 1e-15, seven: true, free: false, all: false };
    let weights = weights(x, importance, sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<16, 8, 16>(&rules, x, &weights, 1.0, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..2 {
            let value = found.points[k] | (found.signs[k] as u16) << 9;
            out[2 + 4 * j + 2 * k..4 + 4 * j + 2 * k].copy_from_slice(&value.to_le_bytes());
        }
        out[66 + j / 2] |= code << (4 * (j % 2));
    }
}

pub fn iq2_s(x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 82]) {
    let book = &codebook::IQ2_S;
    let rules = Rules { book, levels: 3, tries: 9, step: 0.1, tiny: 1e-8, seven: false, free: false, all: false };
    let spread = 2.0 * sum_of_squares(x) / 256.0;
    let weights = weights(x, importance, spread, |square| 0.25 * spread + square);
    let Some(blocks) = blocks::<16, 8, 16>(&rules, x, &weights, 0.9875, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..2 {
            let group = 2 * j + k;
            out[2 + group] = found.points[k] as u8;
            out[34 + group] = found.signs[k];
            out[66 + group / 4] |= ((found.points[k] >> 8) as u8) << (2 * (group % 4));
        }
        out[74 + j / 2] |= code << (4 * (j % 2));
    }
}

pub fn iq3_xxs(x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 98]) {
    let book = &codebook::IQ3_XXS;
    let rules = Rules { book, levels: 8, tries: 15, step: 0.2, tiny: 1e-8, seven: true, free: false, all: false };
    let weights = weights(x, importance, 2.0 * sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<32, 4, 8>(&rules, x, &weights, 1.0125, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..8 {
            out[2 + 8 * j + k] = found.points[k] as u8;
        }
        out[66 + 4 * j..70 + 4 * j].copy_from_slice(&word(found, *code));
    }
}

pub fn iq3_s(x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 110]) {
    let book = &codebook::IQ3_S;
    let rules = Rules { book, levels: 8, tries: 9, step: 0.2, tiny: 0.0, seven: false, free: false, all: true };
    let weights = weights(x, importance, 2.0 * sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<32, 4, 8>(&rules, x, &weights, 1.033, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..8 {
            out[2 + 8 * j + k] = found.points[k] as u8;
            out[66 + j] |= ((found.points[k] >> 8) as u8) << k;
        }
        out[74 + 4 * j..78 + 4 * j].copy_from_slice(&found.signs);
        out[106 + j / 2] |= code << (4 * (j % 2));
    }
}
