//! Decoding of plain numbers and of blocks of 32 values.

use half::{bf16, f16};

use super::half_at;

/// The levels of IQ4_NL and IQ4_XS.
pub const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The levels of MXFP4: twice the values of E2M1 of the OCP Microscaling Formats specification, version 1.0.
pub const MXFP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half the power of two that a scale of MXFP4 stands for: 2^(e - 128), as its levels are doubled.
#[inline(always)]
pub fn mxfp4_scale(e: u8) -> f32 {
    // The two smallest are subnormal.
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e as u32 - 1) << 23 })
}

#[inline(always)]
pub fn f32(bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

#[inline(always)]
pub fn f16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16::from_le_bytes(*bytes).to_f32();
}

#[inline(always)]
pub fn bf16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = bf16::from_le_bytes(*bytes).to_f32();
}

/// Low nibbles are values 0 to 15, high nibbles 16 to 31.
#[inline(always)]
pub(super) fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(u8, usize) -> f32) {
    for j in 0..16 {
        out[j] = value(bytes[j] & 15, j);
        out[j + 16] = value(bytes[j] >> 4, j + 16);
    }
}

#[inline(always)]
pub fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    nibbles(&block[2..], out, |q, _| d * (q as i32 - 8) as f32);
}

#[inline(always)]
pub fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, min) = (half_at(block, 0), half_at(block, 2));
    nibbles(&block[4..], out, |q, _| d * q as f32 + min);
}

#[inline(always)]
pub fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..], out, |q, j| d * ((q as u32 | (high >> j & 1) << 4) as i32 - 16) as f32);
}

#[inline(always)]
pub fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, min) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..], out, |q, j| d * (q as u32 | (high >> j & 1) << 4) as f32 + min);
}

#[inline(always)]
pub fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for j in 0..32 {
        out[j] = d * (block[2 + j] as i8) as f32;
    }
}

#[inline(always)]
pub fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    nibbles(&block[2..], out, |q, _| d * IQ4_LEVELS[q as usize] as f32);
}

#[inline(always)]
pub fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let d = mxfp4_scale(block[0]);
    nibbles(&block[1..], out, |q, _| d * MXFP4_LEVELS[q as usize] as f32);
}
