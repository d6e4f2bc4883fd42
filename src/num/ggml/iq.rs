//! Decoding of the IQ types with blocks of 256 values: IQ4_XS with a table of levels, the others with grids.

use half::f16;

use super::basic::{IQ4_LEVELS, nibbles};
use super::{grids, half_at};

/// Scales of the eight sub-blocks of IQ4_XS.
pub fn iq4_xs_scales(block: &[u8]) -> [f32; 8] {
    let d = half_at(block, 0);
    let high = short_at(block, 2);
    std::array::from_fn(|j| {
        let low = block[4 + j / 2] >> (4 * (j % 2)) & 15;
        d * ((low as u32 | (high >> (2 * j) & 3) << 4) as i32 - 32) as f32
    })
}

#[inline(always)]
pub fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    for (j, scale) in iq4_xs_scales(block).into_iter().enumerate() {
        nibbles(&block[8 + 16 * j..], &mut out[32 * j..], |q, _| scale * IQ4_LEVELS[q as usize] as f32);
    }
}

/// Decoded magnitudes of the levels of IQ2, eight times 1, 3, 5 and rounded.
const IQ2_LEVELS: [f32; 3] = [8.0, 25.0, 43.0];

/// Decoded magnitudes of the levels of IQ3_XXS.
const IQ3_XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];

fn short_at(bytes: &[u8], at: usize) -> u32 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]]) as u32
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Eight signs of a 7-bit code: the eighth makes the number of minus signs even.
fn eight_signs(code: u32) -> u32 {
    let code = code & 127;
    code | (code.count_ones() & 1) << 7
}

#[inline(always)]
fn signed(value: f32, signs: u32, i: usize) -> f32 {
    if signs >> i & 1 == 1 { -value } else { value }
}

/// Eight values of a point of an IQ2 grid.
#[inline(always)]
fn eight(out: &mut [f32], point: u16, signs: u32, scale: f32) {
    for i in 0..8 {
        out[i] = signed(scale * IQ2_LEVELS[(point >> (2 * i) & 3) as usize], signs, i);
    }
}

#[inline(always)]
pub fn iq2_xxs(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for j in 0..8 {
        let group = &block[2 + 8 * j..];
        let codes = word_at(group, 4);
        let scale = d * (0.5 + (codes >> 28) as f32) * 0.25;
        for k in 0..4 {
            let point = grids::IQ2_XXS[group[k] as usize];
            eight(&mut out[32 * j + 8 * k..], point, eight_signs(codes >> (7 * k)), scale);
        }
    }
}

/// Scale of 16 values of IQ2_XS and IQ2_S.
fn iq2_scale(d: f32, scales: &[u8], j: usize) -> f32 {
    d * (0.5 + (scales[j / 2] >> (4 * (j % 2)) & 15) as f32) * 0.25
}

#[inline(always)]
pub fn iq2_xs(block: &[u8; 74], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for k in 0..32 {
        let code = short_at(block, 2 + 2 * k);
        let point = grids::IQ2_XS[(code & 511) as usize];
        eight(&mut out[8 * k..], point, eight_signs(code >> 9), iq2_scale(d, &block[66..], k / 2));
    }
}

#[inline(always)]
pub fn iq2_s(block: &[u8; 82], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for k in 0..32 {
        let high = block[66 + k / 4] >> (2 * (k % 4)) & 3;
        let point = grids::IQ2_S[block[2 + k] as usize | (high as usize) << 8];
        eight(&mut out[8 * k..], point, block[34 + k] as u32, iq2_scale(d, &block[74..], k / 2));
    }
}

#[inline(always)]
pub fn iq3_xxs(block: &[u8; 98], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for k in 0..64 {
        let codes = word_at(block, 66 + 4 * (k / 8));
        let scale = d * (0.5 + (codes >> 28) as f32) * 0.5;
        let signs = eight_signs(codes >> (7 * (k % 8 / 2))) >> (4 * (k % 2));
        let point = grids::IQ3_XXS[block[2 + k] as usize];
        for i in 0..4 {
            out[4 * k + i] = signed(scale * IQ3_XXS_LEVELS[(point >> (3 * i) & 7) as usize], signs, i);
        }
    }
}

#[inline(always)]
pub fn iq3_s(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for k in 0..64 {
        let scale = d * (1 + 2 * (block[106 + k / 16] >> (4 * (k / 8 % 2)) & 15)) as f32;
        let signs = (block[74 + k / 2] >> (4 * (k % 2))) as u32;
        let high = block[66 + k / 8] >> (k % 8) & 1;
        let point = grids::IQ3_S[block[2 + k] as usize | (high as usize) << 8];
        for i in 0..4 {
            out[4 * k + i] = signed(scale * (1 + 2 * (point >> (3 * i) & 7)) as f32, signs, i);
        }
    }
}

/// The shift of a group of IQ1: the grid's -1, 0, 1 stand for values an eighth higher or lower.
pub const IQ1_SHIFT: f32 = 0.125;

/// Eight values of a point of the IQ1 grid.
#[inline(always)]
fn ternary(out: &mut [f32], point: u16, scale: f32, lower: bool) {
    let shift = if lower { -IQ1_SHIFT } else { IQ1_SHIFT };
    for i in 0..8 {
        out[i] = scale * ((point >> (2 * i) & 3) as f32 - 1.0 + shift);
    }
}

#[inline(always)]
pub fn iq1_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    for k in 0..32 {
        let high = short_at(block, 34 + 2 * (k / 4));
        let scale = d * (2 * (high >> 12 & 7) + 1) as f32;
        let index = block[2 + k] as u32 | (high >> (3 * (k % 4)) & 7) << 8;
        ternary(&mut out[8 * k..], grids::IQ1[index as usize], scale, high >> 15 == 1);
    }
}

#[inline(always)]
pub fn iq1_m(block: &[u8; 56], out: &mut [f32; 256]) {
    // The half-precision scale lies in the highest four bits of the four words of scales.
    let words: [u32; 4] = std::array::from_fn(|j| short_at(block, 48 + 2 * j));
    let d = f16::from_bits((0..4).map(|j| words[j] >> 12 << (4 * j)).sum::<u32>() as u16).to_f32();
    for k in 0..32 {
        let high = (block[32 + k / 2] >> (4 * (k % 2))) as usize;
        let scale = d * (2 * (words[k / 8] >> (3 * (k / 2 % 4)) & 7) + 1) as f32;
        let point = grids::IQ1[block[k] as usize | (high & 7) << 8];
        ternary(&mut out[8 * k..], point, scale, high & 8 == 8);
    }
}
