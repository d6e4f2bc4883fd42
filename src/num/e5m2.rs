//! Floats of 8 bits, five of exponent (bias 15) and two of mantissa: OCP "E5M2". The largest finite value is 57344;
//! a code is the upper byte of the half-precision number of the same value.

use super::simd;

/// The largest finite value.
pub const MAX: f32 = 57344.0;

/// The value of a code.
#[inline(always)]
pub fn decode(code: u8) -> f32 {
    simd::half(u16::from(code) << 8)
}

/// The code of the nearest value, ties to even, beyond 57344 of that; NaN stays NaN.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
    let magnitude = x.abs().min(MAX);
    // Steps are 2^-2 of the power of two below, but no smaller than 2^-16.
    let power = f32::from_bits(magnitude.max(1.0 / 16384.0).to_bits() & 0x7f80_0000);
    // Adding and taking away 1.5 * 2^23 steps rounds to a whole number of them.
    let shift = power * (1.5 * 8_388_608.0 / 4.0);
    let rounded = (magnitude + shift) - shift;
    let sign = (x.to_bits() >> 24) as u8 & 128;
    let small = (rounded * 65536.0) as u8;
    let normal = (rounded.to_bits() >> 21).wrapping_sub(112 << 2) as u8;
    let code = sign | if rounded < 1.0 / 16384.0 { small } else { normal };
    if x.is_nan() { 127 } else { code }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_come_back() {
        for code in 0..=255u8 {
            let value = decode(code);
            match code & 127 {
                124 => assert_eq!((value.is_infinite(), encode(value)), (true, code - 1)),
                125.. => assert_eq!((value.is_nan(), encode(value)), (true, 127)),
                _ => assert_eq!(encode(value), code, "{value}"),
            }
        }
        assert_eq!((decode(0x7b), decode(0x3c), decode(0x01)), (57344.0, 1.0, 1.0 / 65536.0));
    }

    #[test]
    fn the_nearest_is_taken_and_ties_go_to_even() {
        for code in 0..0x7bu8 {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            assert_eq!(encode(middle), if code % 2 == 0 { code } else { code + 1 }, "{middle}");
            assert_eq!((encode(middle.next_down()), encode(middle.next_up())), (code, code + 1));
            assert_eq!(encode(-middle.next_up()), 128 | (code + 1));
        }
        assert_eq!((encode(1e9), encode(f32::NEG_INFINITY), encode(f32::NAN)), (0x7b, 0xfb, 0x7f));
        assert_eq!((encode(1e-30), encode(-0.0)), (0, 128));
    }
}
