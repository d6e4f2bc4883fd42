//! Decoding of TQ1_0 and TQ2_0: values -1, 0, 1 and one scale for 256.

use super::half_at;

/// Groups of TQ1_0: first byte, bytes, values a byte. A group's byte `l` holds values `l`, `l + bytes`, ...
pub const TQ1_GROUPS: [(usize, usize, usize); 3] = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];

#[inline(always)]
pub fn tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    let d = half_at(block, 52);
    let mut at = 0;
    for (first, bytes, digits) in TQ1_GROUPS {
        let mut power = 1u8;
        for _ in 0..digits {
            for l in 0..bytes {
                // A byte is a fraction in base 3, scaled to 256; its first digit is the whole part of three times it.
                let fraction = block[first + l].wrapping_mul(power);
                out[at] = d * (((fraction as i32 * 3) >> 8) - 1) as f32;
                at += 1;
            }
            power = power.wrapping_mul(3);
        }
    }
}

#[inline(always)]
pub fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half_at(block, 64);
    for h in 0..2 {
        for k in 0..4 {
            for l in 0..32 {
                out[128 * h + 32 * k + l] = d * ((block[32 * h + l] >> (2 * k) & 3) as i32 - 1) as f32;
            }
        }
    }
}
