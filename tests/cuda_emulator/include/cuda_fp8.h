// The two 8-bit floats: e4m3 (no infinity, 448 the largest) and e5m2 (as IEEE). Encoding saturates to the
// largest finite value, as the CUDA constructors do.
#pragma once

namespace emu {

inline float fp8_decode(uint8_t code, int mantissa, int bias) {
    const int exponent = (code & 127) >> mantissa, fraction = code & ((1 << mantissa) - 1), one = 1 << mantissa;
    const float value = exponent ? ldexpf(float(one + fraction), exponent - bias - mantissa)
                                 : ldexpf(float(fraction), 1 - bias - mantissa);
    return code & 128 ? -value : value;
}

inline uint8_t fp8_encode(float f, int mantissa, int bias, float largest, uint8_t largest_code) {
    const uint8_t sign = uint8_t(bits_as<uint32_t>(f) >> 31 << 7);
    const float value = fabsf(f);
    if (!(value <= largest)) return sign | largest_code;
    int exponent;
    frexpf(value, &exponent);
    exponent = exponent - 1 > 1 - bias ? exponent - 1 : 1 - bias;
    float steps = rintf(ldexpf(value, mantissa - exponent));  // ties to even
    if (steps >= float(2 << mantissa)) steps *= 0.5f, ++exponent;
    if (steps < float(1 << mantissa)) return sign | uint8_t(steps);  // subnormal
    return sign | uint8_t((exponent + bias) << mantissa | (int(steps) & ((1 << mantissa) - 1)));
}

}  // namespace emu

struct __nv_fp8_e4m3 {
    unsigned char __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float f) : __x(f != f ? 0x7f : emu::fp8_encode(f, 3, 7, 448.0f, 0x7e)) {}
    explicit operator float() const { return (__x & 127) == 127 ? NAN : emu::fp8_decode(__x, 3, 7); }
};
struct __nv_fp8_e5m2 {
    unsigned char __x;
    __nv_fp8_e5m2() = default;
    explicit __nv_fp8_e5m2(float f) : __x(f != f ? 0x7f : emu::fp8_encode(f, 2, 15, 57344.0f, 0x7b)) {}
    explicit operator float() const {
        if ((__x & 127) > 124) return NAN;
        if ((__x & 127) == 124) return __x & 128 ? -INFINITY : INFINITY;
        return emu::fp8_decode(__x, 2, 15);
    }
};
