// IEEE half precision: storage, conversions (round to nearest even) and arithmetic rounded after each operation.
#pragma once
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace emu {

inline uint16_t half_from_float(float f) {
    if (f != f) return 0x7fff;
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(f, 0));
#else
    const uint32_t bits = bits_as<uint32_t>(f), sign = bits >> 16 & 0x8000;
    uint32_t x = bits & 0x7fffffff;
    if (x >= 0x477ff000) return uint16_t(sign | 0x7c00);  // from 65520 on
    // Below 2^-14 the sum with 0.5 leaves the multiple of 2^-24 in the low bits.
    if (x < 0x38800000) return uint16_t(sign | (bits_as<uint32_t>(bits_as<float>(x) + 0.5f) - 0x3f000000));
    x += 0xfff + (x >> 13 & 1);
    return uint16_t(sign | (x - 0x38000000) >> 13);
#endif
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest < 0x400) return bits_as<float>(sign | bits_as<uint32_t>(float(rest) * 0x1p-24f));
    if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00) << 22);
    return bits_as<float>(sign | ((rest << 13) + 0x38000000));
#endif
}

}  // namespace emu

struct __half_raw {
    unsigned short x;
};
struct __half {
    unsigned short __x;
    __half() = default;
    __half(float f) : __x(emu::half_from_float(f)) {}
    __half(__half_raw raw) : __x(raw.x) {}
    explicit __half(double f) : __half(float(f)) {}
    explicit __half(int i) : __half(float(i)) {}
    explicit __half(unsigned i) : __half(float(i)) {}
    operator float() const { return emu::half_to_float(__x); }
    operator __half_raw() const { return {__x}; }
};
struct __align__(4) __half2 {
    __half x, y;
};
typedef __half half;
typedef __half2 half2;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return f; }
inline __half __float2half_rn(float f) { return f; }
inline __half __double2half(double f) { return float(f); }
inline __half __int2half_rn(int i) { return __half(i); }
inline __half __ushort2half_rn(unsigned short i) { return __half(int(i)); }
inline __half __uint2half_rn(unsigned i) { return __half(i); }
inline int __half2int_rn(__half h) { return __float2int_rn(h); }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline unsigned short __half_as_ushort(__half h) { return h.__x; }
inline __half __short_as_half(short bits) { return __half_raw{(unsigned short)bits}; }
inline short __half_as_short(__half h) { return short(h.__x); }

inline float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline float __low2float(__half2 v) { return v.x; }
inline float __high2float(__half2 v) { return v.y; }

inline __half __hadd(__half a, __half b) { return float(a) + float(b); }
inline __half __hsub(__half a, __half b) { return float(a) - float(b); }
inline __half __hmul(__half a, __half b) { return float(a) * float(b); }
inline __half __hdiv(__half a, __half b) { return float(a) / float(b); }
// The product and the sum are exact in double up to the one rounding to odd that half never sees.
inline __half __hfma(__half a, __half b, __half c) { return float(double(float(a)) * float(b) + double(float(c))); }
inline __half __hneg(__half a) { return __half_raw{(unsigned short)(a.__x ^ 0x8000)}; }
inline __half __habs(__half a) { return __half_raw{(unsigned short)(a.__x & 0x7fff)}; }
inline __half __hmax(__half a, __half b) { return fmaxf(a, b); }
inline __half __hmin(__half a, __half b) { return fminf(a, b); }
inline bool __hisnan(__half a) { return (a.__x & 0x7fff) > 0x7c00; }
inline int __hisinf(__half a) { return (a.__x & 0x7fff) != 0x7c00 ? 0 : a.__x & 0x8000 ? -1 : 1; }
inline bool __hlt(__half a, __half b) { return float(a) < float(b); }
inline bool __hgt(__half a, __half b) { return float(a) > float(b); }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

inline __half operator+(__half a, __half b) { return __hadd(a, b); }
inline __half operator-(__half a, __half b) { return __hsub(a, b); }
inline __half operator*(__half a, __half b) { return __hmul(a, b); }
inline __half operator/(__half a, __half b) { return __hdiv(a, b); }
inline __half operator-(__half a) { return __hneg(a); }
inline __half2 operator+(__half2 a, __half2 b) { return __hadd2(a, b); }
inline __half2 operator-(__half2 a, __half2 b) { return __hsub2(a, b); }
inline __half2 operator*(__half2 a, __half2 b) { return __hmul2(a, b); }
