//! Blocks taken apart: the levels that their scales make, and the codes that choose among them. Codes can be put into
//! blocks that are there, which keep their scales.
//!
//! For the types whose values are a scale times a whole number, plus an offset; those with grids of several values a
//! point have no codes of single values.

use crate::num::ggml::GgmlType::{self, *};
use crate::num::ggml::basic::IQ4_LEVELS;
use crate::num::ggml::{half_at, iq4_xs_scales, k};
use crate::quantize::grids::levels::{LevelLayout, Points};

/// How a type lays levels over a row; `None` for types without codes of single values.
pub fn layout(kind: GgmlType) -> Option<LevelLayout> {
    let signed = |n: i32| Points::Even { low: -n, high: n - 1, zero: n };
    let counted = |high: i32| Points::Even { low: 0, high, zero: 0 };
    let (points, run) = match kind {
        Q4_0 => (signed(8), 32),
        Q4_1 => (counted(15), 32),
        Q5_0 => (signed(16), 32),
        Q5_1 => (counted(31), 32),
        // ggml's encoder never writes -128.
        Q8_0 => (Points::Even { low: -127, high: 127, zero: 128 }, 32),
        Q2_K => (counted(3), 16),
        Q3_K => (signed(4), 16),
        Q4_K => (counted(15), 32),
        Q5_K => (counted(31), 32),
        Q6_K => (signed(32), 16),
        IQ4_NL | IQ4_XS => (Points::Table(&IQ4_LEVELS), 32),
        _ => return None,
    };
    Some(LevelLayout { points, run, block: kind.block() })
}

/// Scale and offset of every run of the blocks: decoding gives `scale * point + offset`, exactly. Nothing for a type
/// without a [`layout`].
pub fn levels(kind: GgmlType, bytes: &[u8]) -> Vec<(f32, f32)> {
    let blocks = bytes.chunks_exact(kind.bytes());
    let mut out = Vec::new();
    for block in blocks {
        let d = half_at(block, 0);
        match kind {
            Q4_0 | Q5_0 | Q8_0 | IQ4_NL => out.push((d, 0.0)),
            Q4_1 | Q5_1 => out.push((d, half_at(block, 2))),
            Q2_K => out.extend(k::q2_scales(block).map(|(scale, min)| (scale, -min))),
            Q3_K => out.extend(k::q3_scales(block).map(|scale| (scale, 0.0))),
            Q4_K | Q5_K => out.extend(k::q4_scales(block).map(|(scale, min)| (scale, -min))),
            Q6_K => out.extend(k::q6_scales(block).map(|scale| (scale, 0.0))),
            IQ4_XS => out.extend(iq4_xs_scales(block).map(|scale| (scale, 0.0))),
            _ => {}
        }
    }
    out
}

/// Some bits of a code: byte of the block, lowest bit there, number of bits.
type Field = (usize, u32, u32);

/// Where the code of value `i` of a block is: its low bits and its high bits.
fn fields(kind: GgmlType, i: usize) -> [Field; 2] {
    let nibble = |at: usize| (at + i % 16, 4 * (i / 16 % 2) as u32, 4);
    let wide_nibble = |at: usize| (at + 32 * (i / 64) + i % 32, 4 * (i / 32 % 2) as u32, 4);
    let pair = |at: usize| (at + 32 * (i / 128) + i % 32, 2 * (i / 32 % 4) as u32, 2);
    let bit = |at: usize| (at + i / 8, (i % 8) as u32, 1);
    let wide_bit = |at: usize| (at + i % 32, (i / 32) as u32, 1);
    let none = (0, 0, 0);
    match kind {
        Q4_0 | IQ4_NL => [nibble(2), none],
        Q4_1 => [nibble(4), none],
        Q5_0 => [nibble(6), bit(2)],
        Q5_1 => [nibble(8), bit(4)],
        Q8_0 => [(2 + i, 0, 8), none],
        Q2_K => [pair(16), none],
        Q3_K => [pair(32), wide_bit(0)],
        Q4_K => [wide_nibble(16), none],
        Q5_K => [wide_nibble(48), wide_bit(16)],
        Q6_K => [(64 * (i / 128) + i % 64, 4 * (i / 64 % 2) as u32, 4), pair(128)],
        IQ4_XS => [nibble(8 + 16 * (i / 32)), none],
        _ => [none, none],
    }
}

/// Q8_0 stores signed numbers, not counts.
fn mask(kind: GgmlType) -> u8 {
    if kind == Q8_0 { 0x80 } else { 0 }
}

/// The codes of blocks, a byte each.
pub fn codes(kind: GgmlType, bytes: &[u8]) -> Vec<u8> {
    let fields: Vec<_> = (0..kind.block()).map(|i| fields(kind, i)).collect();
    let mut out = Vec::with_capacity(bytes.len() / kind.bytes() * kind.block());
    for block in bytes.chunks_exact(kind.bytes()) {
        out.extend(fields.iter().map(|[low, high]| {
            let part = |&(byte, shift, bits): &Field| block[byte] as u32 >> shift & ((1 << bits) - 1);
            (part(low) | part(high) << low.2) as u8 ^ mask(kind)
        }));
    }
    out
}

/// Puts codes into blocks in place of their own; scales stay.
///
/// # Panics
///
/// When there is not a code for each value of `bytes`.
pub fn replace_codes(kind: GgmlType, bytes: &mut [u8], codes: &[u8]) {
    assert_eq!(Some(bytes.len()), kind.row_bytes(codes.len()), "{} codes of {kind}", codes.len());
    let fields: Vec<_> = (0..kind.block()).map(|i| fields(kind, i)).collect();
    for (block, codes) in bytes.chunks_exact_mut(kind.bytes()).zip(codes.chunks_exact(kind.block())) {
        for ([low, high], &code) in fields.iter().zip(codes) {
            let code = (code ^ mask(kind)) as u32;
            let mut put = |&(byte, shift, bits): &Field, part: u32| {
                let mask = ((1u32 << bits) - 1) << shift;
                block[byte] = (block[byte] as u32 & !mask | part << shift & mask) as u8;
            };
            put(low, code);
            put(high, code >> low.2);
        }
    }
}
