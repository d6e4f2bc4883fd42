//! Decoding of the K-quants: blocks of 256 values in sub-blocks of 16 or 32, whose scales are quantized in turn.

use super::half_at;

/// Two bits a value: byte `32 h + l` of `low` holds values `128 h + l + 32 k`, `k` from the lowest bits up.
#[inline(always)]
fn pairs(low: &[u8], out: &mut [f32; 256], value: impl Fn(u8, usize) -> f32) {
    for h in 0..2 {
        for k in 0..4 {
            for l in 0..32 {
                let at = 128 * h + 32 * k + l;
                out[at] = value(low[32 * h + l] >> (2 * k) & 3, at);
            }
        }
    }
}

/// Scales and minima of the sixteen sub-blocks of Q2_K.
pub fn q2_scales(block: &[u8]) -> [(f32, f32); 16] {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    std::array::from_fn(|j| (d * (block[j] & 15) as f32, dmin * (block[j] >> 4) as f32))
}

#[inline(always)]
pub fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let scales = q2_scales(block);
    pairs(&block[16..80], out, |q, at| scales[at / 16].0 * q as f32 - scales[at / 16].1);
}

/// The 6-bit scales of Q3_K: four low bits in nibbles, two high bits in the last four bytes.
fn q3_scale(packed: &[u8], j: usize) -> i32 {
    let low = if j < 8 { packed[j] & 15 } else { packed[j - 8] >> 4 };
    (low | (packed[8 + j % 4] >> (2 * (j / 4)) & 3) << 4) as i32 - 32
}

/// Scales of the sixteen sub-blocks of Q3_K.
pub fn q3_scales(block: &[u8]) -> [f32; 16] {
    let d = half_at(block, 108);
    std::array::from_fn(|j| d * q3_scale(&block[96..108], j) as f32)
}

#[inline(always)]
pub fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let scales = q3_scales(block);
    pairs(&block[32..96], out, |q, at| {
        let high = block[at % 32] >> (at / 32) & 1;
        scales[at / 16] * ((q | high << 2) as i32 - 4) as f32
    });
}

/// The 6-bit scale and minimum of sub-block `j` of Q4_K and Q5_K: the first four plain, the high bits of the others
/// in the two bits that these leave free.
fn q4_scale(packed: &[u8], j: usize) -> (u8, u8) {
    match j < 4 {
        true => (packed[j] & 63, packed[j + 4] & 63),
        false => (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4),
    }
}

/// Scales and minima of the eight sub-blocks of Q4_K and Q5_K.
pub fn q4_scales(block: &[u8]) -> [(f32, f32); 8] {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    std::array::from_fn(|j| {
        let (scale, min) = q4_scale(&block[4..16], j);
        (d * scale as f32, dmin * min as f32)
    })
}

#[inline(always)]
pub fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let scales = q4_scales(block);
    for j in 0..8 {
        for l in 0..32 {
            let q = block[16 + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15;
            out[32 * j + l] = scales[j].0 * q as f32 - scales[j].1;
        }
    }
}

#[inline(always)]
pub fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let scales = q4_scales(block);
    for j in 0..8 {
        for l in 0..32 {
            let q = block[48 + 32 * (j / 2) + l] >> (4 * (j % 2)) & 15 | (block[16 + l] >> j & 1) << 4;
            out[32 * j + l] = scales[j].0 * q as f32 - scales[j].1;
        }
    }
}

/// Scales of the sixteen sub-blocks of Q6_K.
pub fn q6_scales(block: &[u8]) -> [f32; 16] {
    let d = half_at(block, 208);
    std::array::from_fn(|j| d * (block[192 + j] as i8) as f32)
}

#[inline(always)]
pub fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scales = q6_scales(block);
    for h in 0..2 {
        for k in 0..4 {
            for l in 0..32 {
                let low = block[64 * h + 32 * (k % 2) + l] >> (4 * (k / 2)) & 15;
                let high = block[128 + 32 * h + l] >> (2 * k) & 3;
                let at = 128 * h + 32 * k + l;
                out[at] = scales[at / 16] * ((low | high << 4) as i32 - 32) as f32;
            }
        }
    }
}
