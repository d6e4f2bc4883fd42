//! The IQ2 and IQ3 types: groups of eight or four magnitudes are points of a grid, signs are apart.

use half::f16;

use super::codebook::{self, Codebook};
use super::search::positive;
use crate::num::lanes::{Lanes, Scalar, Simd};
use crate::num::simd::{round, round_wrapping};

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
    /// Points and signs are written even where all scales are zero.
    kept: bool,
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
            let minus = x[i] < 0.0;
            magnitudes[i] = if minus { -x[i] } else { x[i] };
            code |= (minus as u8) << (i % 8);
        }
        if seven && code.count_ones() % 2 == 1 {
            let mut least = 8 * k;
            for i in 8 * k + 1..8 * k + 8 {
                if weights[i] * x[i] * x[i] < weights[least] * x[least] * x[least] {
                    least = i;
                }
            }
            magnitudes[least] = -magnitudes[least];
            code ^= 1 << (least % 8);
        }
        signs[k] = if seven { code & 127 } else { code };
    }
    (magnitudes, signs)
}

/// Tries that are made side by side.
const LANES: usize = 16;

/// The outcome of [`LANES`] tries: points, which of them have exactly the rounded levels, and the two sums whose ratio is
/// the least-squares scale.
struct Tries {
    points: [[u16; 8]; LANES],
    exact: [[bool; 8]; LANES],
    along: [f32; LANES],
    square: [f32; LANES],
}

/// Moves every group to its point at each scale. Lanes are tries, so that each sum runs over the values in order.
#[inline(always)]
fn attempt<S: Simd, const SIZE: usize, const GROUP: usize>(
    simd: S,
    rules: &Rules,
    (x, weights, roots): (&[f32; SIZE], &[f32; SIZE], &[f32; SIZE]),
    inverse: &[f32; LANES],
    scales: &[f32],
) -> Tries {
    let (book, top) = (rules.book, (rules.levels - 1) as f32);
    let unit = if GROUP == 8 { 4.0 } else { 8.0 };
    let mut tries =
        Tries { points: [[0; 8]; LANES], exact: [[true; 8]; LANES], along: [0.0; LANES], square: [0.0; LANES] };
    let (groups, group_roots) = (x.as_chunks::<GROUP>().0, roots.as_chunks::<GROUP>().0);
    let group_weights = weights.as_chunks::<GROUP>().0;
    let largest = |all: &[f32]| all.iter().fold(0.0f32, |most, v| most.max(v.abs()));
    let ordinary = largest(x) * largest(inverse) < 4e6;
    for k in 0..SIZE / GROUP {
        let codes = match ordinary {
            true => level_codes(&groups[k], inverse, unit, top, round),
            false => level_codes(&groups[k], inverse, unit, top, round_wrapping),
        };
        let mut levels = [[0.0f32; LANES]; GROUP];
        for (lane, &scale) in scales.iter().enumerate() {
            let code = codes[lane] as usize;
            let (point, exact) = book.nearest(simd, code, &groups[k], &group_roots[k], scale, (2.0, 1.0));
            tries.points[lane][k] = point;
            tries.exact[lane][k] = exact;
            for i in 0..GROUP {
                levels[i][lane] = (2 * book.level(point, i) + 1) as f32;
            }
        }
        for i in 0..GROUP {
            let (w, wx) = (group_weights[k][i], group_weights[k][i] * groups[k][i]);
            for lane in 0..LANES {
                tries.along[lane] += wx * levels[i][lane];
                tries.square[lane] += w * levels[i][lane] * levels[i][lane];
            }
        }
    }
    tries
}

/// The numbers of a group's combinations of levels at each scale.
#[inline(always)]
fn level_codes<const GROUP: usize>(
    x: &[f32; GROUP],
    inverse: &[f32; LANES],
    unit: f32,
    top: f32,
    round: impl Fn(f32) -> f32,
) -> [f32; LANES] {
    let mut codes = [0.0f32; LANES];
    for i in (0..GROUP).rev() {
        for lane in 0..LANES {
            let level = round(0.5 * (inverse[lane] * x[i] - 1.0));
            let level = if level > 0.0 { level } else { 0.0 };
            let level = if level < top { level } else { top };
            codes[lane] = codes[lane] * unit + level;
        }
    }
    codes
}

/// The two sums for given points.
#[inline(always)]
fn sums<const SIZE: usize, const GROUP: usize>(
    book: &Codebook,
    x: &[f32; SIZE],
    weights: &[f32; SIZE],
    points: &[u16; 8],
) -> (f32, f32) {
    let (mut along, mut square) = (0.0, 0.0);
    for i in 0..SIZE {
        let q = (2 * book.level(points[i / GROUP], i % GROUP) + 1) as f32;
        along += weights[i] * x[i] * q;
        square += weights[i] * q * q;
    }
    (along, square)
}

#[inline(always)]
fn search<S: Simd, const SIZE: usize, const GROUP: usize>(
    simd: S,
    rules: &Rules,
    x: &[f32; SIZE],
    weights: &[f32; SIZE],
) -> Found {
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
        let (mut lane, mut lane_weights) = ([Lanes::splat(Scalar, 0.0); SIZE], [Lanes::splat(Scalar, 0.0); SIZE]);
        for i in 0..SIZE {
            (lane[i], lane_weights[i]) = (Lanes::splat(Scalar, x[i]), Lanes::splat(Scalar, weights[i]));
        }
        scale = positive(&lane, &lane_weights, (rules.levels + 1) as f32).0.as_slice()[0];
        reference = scale * rules.levels as f32;
        if reference <= 0.0 {
            return EMPTY;
        }
    }
    let mut roots = [0.0; SIZE];
    for i in 0..SIZE {
        roots[i] = weights[i].sqrt();
    }
    let values = (&x, weights, &roots);
    let (mut points, mut exact, mut best) = ([0; 8], [!rules.all; 8], 0.0);
    for first in (-rules.tries..=rules.tries).step_by(LANES) {
        let count = (rules.tries - first + 1).min(LANES as i32) as usize;
        let (mut inverse, mut scales) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            inverse[lane] = (top + (first + lane as i32) as f32 * rules.step) / reference;
            scales[lane] = 1.0 / inverse[lane];
        }
        let tries = attempt::<S, SIZE, GROUP>(simd, rules, values, &inverse, &scales[..count]);
        for lane in 0..count {
            let (along, square) = (tries.along[lane], tries.square[lane]);
            if square > 0.0 && along * along > best * square {
                scale = along / square;
                best = scale * along;
                (points, exact) = (tries.points[lane], tries.exact[lane]);
            }
        }
    }
    let groups = SIZE / GROUP;
    let again = rules.free || exact[..groups].contains(&false);
    if again && scale > 0.0 {
        let tries = attempt::<S, SIZE, GROUP>(simd, rules, values, &[1.0 / scale; LANES], &[scale]);
        for k in 0..groups {
            if rules.all || !exact[k] {
                points[k] = tries.points[0][k];
            }
        }
        let (along, square) = sums::<SIZE, GROUP>(rules.book, &x, weights, &points);
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
/// `None` when nothing but zeros is to be written.
#[inline(always)]
fn blocks<S: Simd, const SIZE: usize, const GROUP: usize, const COUNT: usize>(
    simd: S,
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
        found[j] = search::<S, SIZE, GROUP>(simd, rules, &x[j], &weights[j]);
        most = most.max(found[j].scale);
    }
    out.fill(0);
    if most == 0.0 && !rules.kept {
        return None;
    }
    let d = most / 31.0;
    out[..2].copy_from_slice(&f16::from_f32(d * gain).to_le_bytes());
    let inverse = 1.0 / d;
    Some(found.map(|found| {
        let code = round_wrapping(0.5 * (inverse * found.scale - 1.0)).clamp(0.0, 15.0) as u8;
        (found, code)
    }))
}

/// Four 7-bit codes of signs and a scale.
#[inline(always)]
fn word(found: &Found, code: u8) -> [u8; 4] {
    let signs = (0..4).map(|k| (found.signs[k] as u32) << (7 * k)).sum::<u32>();
    (signs | (code as u32) << 28).to_le_bytes()
}

#[inline(always)]
pub fn iq2_xxs<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 66]) {
    let book = &codebook::IQ2_XXS;
    let rules =
        Rules { book, levels: 3, tries: 6, step: 0.1, tiny: 1e-15, seven: true, free: true, all: true, kept: false };
    let weights = weights(x, importance, sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<S, 32, 8, 8>(simd, &rules, x, &weights, 1.0, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..4 {
            out[2 + 8 * j + k] = found.points[k] as u8;
        }
        out[6 + 8 * j..10 + 8 * j].copy_from_slice(&word(found, *code));
    }
}

#[inline(always)]
pub fn iq2_xs<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 74]) {
    let book = &codebook::IQ2_XS;
    let rules =
        Rules { book, levels: 3, tries: 9, step: 0.1, tiny: 1e-15, seven: true, free: false, all: false, kept: false };
    let weights = weights(x, importance, sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<S, 16, 8, 16>(simd, &rules, x, &weights, 1.0, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..2 {
            let value = found.points[k] | (found.signs[k] as u16) << 9;
            out[2 + 4 * j + 2 * k..4 + 4 * j + 2 * k].copy_from_slice(&value.to_le_bytes());
        }
        out[66 + j / 2] |= code << (4 * (j % 2));
    }
}

#[inline(always)]
pub fn iq2_s<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 82]) {
    let book = &codebook::IQ2_S;
    let rules =
        Rules { book, levels: 3, tries: 9, step: 0.1, tiny: 1e-8, seven: false, free: false, all: false, kept: true };
    let spread = 2.0 * sum_of_squares(x) / 256.0;
    let weights = weights(x, importance, spread, |square| 0.25 * spread + square);
    let Some(blocks) = blocks::<S, 16, 8, 16>(simd, &rules, x, &weights, 0.9875, out) else { return };
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

#[inline(always)]
pub fn iq3_xxs<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 98]) {
    let book = &codebook::IQ3_XXS;
    let rules =
        Rules { book, levels: 8, tries: 15, step: 0.2, tiny: 1e-8, seven: true, free: false, all: false, kept: false };
    let weights = weights(x, importance, 2.0 * sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<S, 32, 4, 8>(simd, &rules, x, &weights, 1.0125, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..8 {
            out[2 + 8 * j + k] = found.points[k] as u8;
        }
        out[66 + 4 * j..70 + 4 * j].copy_from_slice(&word(found, *code));
    }
}

/// ggml 0.25.3 does not skip the places of a run of 32 zeros, so that the points and signs of the runs after it come to
/// lie where decoders look for earlier ones. Here each run has its place, and such blocks are not ggml's bytes.
#[inline(always)]
pub fn iq3_s<S: Simd>(simd: S, x: &[f32; 256], importance: Option<&[f32]>, out: &mut [u8; 110]) {
    let book = &codebook::IQ3_S;
    let rules =
        Rules { book, levels: 8, tries: 9, step: 0.2, tiny: 0.0, seven: false, free: false, all: true, kept: true };
    let weights = weights(x, importance, 2.0 * sum_of_squares(x) / 256.0, |square| square);
    let Some(blocks) = blocks::<S, 32, 4, 8>(simd, &rules, x, &weights, 1.033, out) else { return };
    for (j, (found, code)) in blocks.iter().enumerate() {
        for k in 0..8 {
            out[2 + 8 * j + k] = found.points[k] as u8;
            out[66 + j] |= ((found.points[k] >> 8) as u8) << k;
        }
        out[74 + 4 * j..78 + 4 * j].copy_from_slice(&found.signs);
        out[106 + j / 2] |= code << (4 * (j % 2));
    }
}
