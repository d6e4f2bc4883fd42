//! Run-time choice of vector instructions, and the few functions that need to be written for them.

/// Runs `f` compiled for the widest vectors this processor has. Plain loops inside `f` are vectorized by
/// the compiler; the arithmetic is the same for every width, so `f()` itself is the scalar twin.
#[inline(always)]
pub fn vectorized<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// Asks for bytes that are wanted soon, where the processor can be asked.
#[inline(always)]
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, which no address can make go wrong.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// 1.5 * 2^23: adding and subtracting it rounds a small f32 to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;

/// `x` rounded to the nearest integer, ties to even, for |x| < 2^22; branch-free on every processor.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// As [`round`], and for all other numbers what ggml's rounding gives, which takes the low 23 bits of the sum for the
/// integer: -2^22 for infinities, 0 for NaN.
#[inline(always)]
pub fn round_wrapping(x: f32) -> f32 {
    f32::from_bits((x + ROUND).to_bits() & 0x007f_ffff | 0x4b00_0000) - ROUND
}

/// e^x within 2 units in the last place; 0 below -87 and the largest finite power above 88.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Range reduction with a two-part ln 2 (Cody and Waite), then a degree-6 polynomial on |r| < 0.35.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.5, 88.0);
    let n = round(x * std::f32::consts::LOG2_E);
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let p =
        1.0 + r * (1.0 + r * (0.5 + r * (0.166_666_67 + r * (0.041_666_67 + r * (0.008_333_452 + r * 0.001_388_9)))));
    f32::from_bits(((n as i32 + 127) << 23) as u32) * p
}

/// The value of a half-precision number, without branches, so that loops over many are vectorized.
#[inline(always)]
pub fn half(bits: u16) -> f32 {
    // Exponent and fraction in the places of f32 stand for the value times 2^-112, also below the normal range.
    let magnitude = f32::from_bits((bits as u32 & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    // Infinities and NaN have come out as 2^16 and above.
    let wide = if magnitude >= 65536.0 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | wide | (bits as u32 & 0x8000) << 16)
}

/// Dot product with sixteen running sums: one order of additions for every vector width.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a16, b16) = (a.chunks_exact(16), b.chunks_exact(16));
    let tail: f32 = a16.remainder().iter().zip(b16.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a16.zip(b16) {
        for i in 0..16 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// The largest value of a slice, -inf when empty.
#[inline(always)]
pub fn max(a: &[f32]) -> f32 {
    let mut best = [f32::NEG_INFINITY; 16];
    let chunks = a.chunks_exact(16);
    let tail = chunks.remainder().iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    for x in chunks {
        for i in 0..16 {
            best[i] = if x[i] > best[i] { x[i] } else { best[i] };
        }
    }
    best.iter().fold(tail, |m, &x| m.max(x))
}

/// Replaces each value by e^(value - shift) and returns the sum, in sixteen lanes.
#[inline(always)]
pub fn exp_in_place(a: &mut [f32], shift: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    let mut chunks = a.chunks_exact_mut(16);
    for x in &mut chunks {
        for i in 0..16 {
            x[i] = exp(x[i] - shift);
            sums[i] += x[i];
        }
    }
    let mut tail = 0.0;
    for x in chunks.into_remainder() {
        *x = exp(*x - shift);
        tail += *x;
    }
    sums.iter().sum::<f32>() + tail
}

/// Sum of e^(value - shift) without storing the powers.
#[inline(always)]
pub fn sum_exp(a: &[f32], shift: f32) -> f32 {
    let mut sums = [0.0f32; 16];
    let chunks = a.chunks_exact(16);
    let tail: f32 = chunks.remainder().iter().map(|x| exp(x - shift)).sum();
    for x in chunks {
        for i in 0..16 {
            sums[i] += exp(x[i] - shift);
        }
    }
    sums.iter().sum::<f32>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere() {
        for i in -8700..=8800 {
            let x = i as f32 * 0.01;
            let want = (x as f64).exp();
            assert!(((exp(x) as f64 - want) / want).abs() < 3e-7, "exp({x}) = {}", exp(x));
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(-1e30) < 1e-37);
    }

    #[test]
    fn vector_and_scalar_agree_bit_for_bit() {
        let a: Vec<f32> = (0..1003).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.07).collect();
        let b: Vec<f32> = (0..1003).map(|i| ((i * 53 % 89) as f32 - 44.0) * 0.05).collect();
        assert_eq!(vectorized(|| dot(&a, &b)), dot(&a, &b));
        assert_eq!(vectorized(|| sum_exp(&a, 3.0)), sum_exp(&a, 3.0));
        assert_eq!(max(&a), a.iter().copied().fold(f32::MIN, f32::max));
        let (mut x, mut y) = (a.clone(), a.clone());
        assert_eq!(vectorized(|| exp_in_place(&mut x, 1.0)), exp_in_place(&mut y, 1.0));
        assert_eq!(x, y);
    }

    #[test]
    fn every_half_widens() {
        for bits in 0..=u16::MAX {
            let (found, want) = (half(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan(),
                "{bits:#x}: {found}, not {want}"
            );
        }
    }

    #[test]
    fn round_ties_to_even() {
        for (x, want) in [(0.5, 0.0), (1.5, 2.0), (2.5, 2.0), (-0.5, 0.0), (-1.5, -2.0), (7.49, 7.0)] {
            assert_eq!(round(x), want);
        }
    }
}
