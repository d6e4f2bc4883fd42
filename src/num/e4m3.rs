//! Floats of 8 bits, four of exponent (bias 7) and three of mantissa: OCP "E4M3". The largest is 448, there are no
//! infinities, and NaN is all ones.

use super::simd::vectorized;

/// The largest finite value.
pub const MAX: f32 = 448.0;

/// What each code stands for.
static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut out = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        let magnitude = if code & 127 == 127 {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits(((exponent as u32 + 120) << 23) | ((mantissa as u32) << 20))
        };
        out[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    out
}

/// The value of a code.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    VALUES[code as usize]
}

/// The nearest value, ties to even, beyond 448 that; NaN stays NaN.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let magnitude = x.abs().min(MAX);
    // Steps are 2^-3 of the power of two below, but no smaller than 2^-9.
    let power = f32::from_bits(magnitude.max(1.0 / 64.0).to_bits() & 0x7f80_0000);
    // Adding and taking away 1.5 * 2^23 steps rounds to a whole number of them.
    let shift = power * (1.5 * 8_388_608.0 / 8.0);
    let rounded = (magnitude + shift) - shift;
    if x.is_nan() { x } else { rounded.copysign(x) }
}

/// The code of [`round`]'s value.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let rounded = round(x);
    if rounded.is_nan() {
        return 127;
    }
    let sign = (rounded.to_bits() >> 24) as u8 & 128;
    let magnitude = rounded.abs();
    if magnitude < 1.0 / 64.0 {
        return sign | (magnitude * 512.0) as u8;
    }
    sign | ((magnitude.to_bits() >> 20) - (120 << 3)) as u8
}

/// The values of codes, times `scale`.
pub fn decode_all(codes: &[u8], scale: f32, out: &mut [f32]) {
    vectorized(|| {
        for (out, &code) in out.iter_mut().zip(codes) {
            let (sign, magnitude) = (u32::from(code & 128) << 24, u32::from(code & 127));
            let normal = f32::from_bits((magnitude << 20) + (120 << 23));
            // Without an exponent the mantissa counts steps of 2^-9: above 2^-6 they are as long.
            let small = f32::from_bits((magnitude << 20) + (121 << 23)) - 1.0 / 64.0;
            let value = if magnitude < 8 { small } else { normal };
            let value = if magnitude == 127 { f32::NAN } else { value };
            *out = scale * f32::from_bits(value.to_bits() | sign);
        }
    });
}

/// Rounds every value to `scale` times the nearest number.
pub fn round_all(values: &[f32], scale: f32, out: &mut [f32]) {
    vectorized(|| out.iter_mut().zip(values).for_each(|(out, x)| *out = scale * round(x / scale)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back() {
        for code in 0..=255u8 {
            let value = decode(code);
            if value.is_nan() {
                assert_eq!(code & 127, 127);
                assert!(round(value).is_nan());
            } else {
                assert_eq!((encode(value), round(value)), (code, value));
            }
        }
        assert_eq!((decode(0x7e), decode(0x08), decode(0x01)), (448.0, 1.0 / 64.0, 1.0 / 512.0));
    }

    #[test]
    fn all_at_once_is_one_by_one() {
        let codes: Vec<u8> = (0..=255).chain(0..=30).collect();
        let mut values = vec![0.0; codes.len()];
        decode_all(&codes, 0.3, &mut values);
        for (&code, &value) in codes.iter().zip(&values) {
            let want = 0.3 * decode(code);
            assert!(value.to_bits() == want.to_bits() || value.is_nan() && want.is_nan(), "{code}: {value}");
        }
        let mut rounded = vec![0.0; 200];
        let inputs: Vec<f32> = (0..200).map(|i| (i as f32 - 99.5).powi(3) * 1e-3).collect();
        round_all(&inputs, 0.7, &mut rounded);
        for (x, found) in inputs.iter().zip(rounded) {
            assert_eq!(found, 0.7 * round(x / 0.7));
        }
    }

    #[test]
    fn the_nearest_is_taken_and_ties_go_to_even() {
        for code in 0..0x7eu8 {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(encode(middle), if code % 2 == 0 { code } else { code + 1 }, "{middle}");
            assert_eq!((encode(middle.next_down()), encode(middle.next_up())), (code, code + 1));
            assert_eq!(encode(-middle.next_up()), 128 | (code + 1));
        }
        assert_eq!((encode(1e9), encode(f32::NEG_INFINITY), encode(f32::NAN)), (0x7e, 0xfe, 0x7f));
    }
}
