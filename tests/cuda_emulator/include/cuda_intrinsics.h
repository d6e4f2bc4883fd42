// Vector types and the arithmetic, conversion and bit functions that CUDA C++ has built in.
#pragma once

#define EMU_VECTOR(T, NAME, ALIGN4)                                                   \
    struct NAME##1 { T x; };                                                          \
    struct __align__(2 * sizeof(T)) NAME##2 { T x, y; };                              \
    struct EMU_##NAME##3 { T x, y, z; };                                              \
    struct __align__(ALIGN4) NAME##4 { T x, y, z, w; };                               \
    inline NAME##1 make_##NAME##1(T x) { return {x}; }                                \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                        \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(signed char, char, 4)
EMU_VECTOR(unsigned char, uchar, 4)
EMU_VECTOR(short, short, 8)
EMU_VECTOR(unsigned short, ushort, 8)
EMU_VECTOR(int, int, 16)
EMU_VECTOR(unsigned, uint, 16)
EMU_VECTOR(float, float, 16)
EMU_VECTOR(double, double, 16)
EMU_VECTOR(long long, longlong, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16)
#undef EMU_VECTOR
using float3 = EMU_float3;
using int3 = EMU_int3;
using uchar3 = EMU_uchar3;
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

namespace emu {
template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace emu

inline float __int_as_float(int v) { return emu::bits_as<float>(v); }
inline float __uint_as_float(unsigned v) { return emu::bits_as<float>(v); }
inline int __float_as_int(float v) { return emu::bits_as<int>(v); }
inline unsigned __float_as_uint(float v) { return emu::bits_as<unsigned>(v); }
inline double __longlong_as_double(long long v) { return emu::bits_as<double>(v); }
inline long long __double_as_longlong(double v) { return emu::bits_as<long long>(v); }

// ---- Loads and stores with cache hints are loads and stores.

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }

// ---- min and max: integers by common type; floats pass over NaN as fminf does.

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return a != a ? T(b) : b != b ? T(a) : T(a) < T(b) ? T(a) : T(b);
    else return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return a != a ? T(b) : b != b ? T(a) : T(a) > T(b) ? T(a) : T(b);
    else return T(a) > T(b) ? T(a) : T(b);
}
inline unsigned umin(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned umax(unsigned a, unsigned b) { return a > b ? a : b; }

// ---- Single operations with a named rounding; kernels are compiled with -ffp-contract=off.

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return float(1.0 / sqrt(double(a))); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// ---- Fast variants: the emulator is exact where the device is not; tests need tolerances.

inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline double rsqrt(double v) { return 1.0 / sqrt(v); }
inline float __expf(float v) { return expf(v); }
inline float __exp10f(float v) { return exp10f(v); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __tanhf(float v) { return tanhf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
inline void __sincosf(float v, float* s, float* c) { *s = sinf(v), *c = cosf(v); }

// ---- Conversions. Float to integer saturates and takes NaN to zero.

namespace emu {
template <class To, class From>
inline To saturated(From v) {
    const From low = std::is_signed_v<To> ? -From(1ull << (8 * sizeof(To) - 1)) : From(0);
    const From beyond = From(1ull << (8 * sizeof(To) - 1)) * (std::is_signed_v<To> ? From(1) : From(2));
    if (v != v) return 0;
    if (v >= beyond) return To(~(std::is_signed_v<To> ? 1ull << (8 * sizeof(To) - 1) : 0ull));
    if (v < low) return To(low);
    return To(v);
}
}  // namespace emu
inline int __float2int_rn(float v) { return emu::saturated<int>(rintf(v)); }
inline int __float2int_rz(float v) { return emu::saturated<int>(truncf(v)); }
inline int __float2int_rd(float v) { return emu::saturated<int>(floorf(v)); }
inline int __float2int_ru(float v) { return emu::saturated<int>(ceilf(v)); }
inline unsigned __float2uint_rn(float v) { return emu::saturated<unsigned>(rintf(v)); }
inline unsigned __float2uint_rz(float v) { return emu::saturated<unsigned>(truncf(v)); }
inline long long __float2ll_rn(float v) { return emu::saturated<long long>(rintf(v)); }
inline int __double2int_rn(double v) { return emu::saturated<int>(rint(v)); }
inline float __double2float_rn(double v) { return float(v); }
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }
inline double __int2double_rn(int v) { return v; }

// ---- Bits.

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) >> (by < 32 ? by : 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
// Each nibble of `select` picks one of eight bytes, or, with its high bit, that byte's sign.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = select >> 4 * i;
        unsigned byte = unsigned(bytes >> 8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 4; ++i) c += (a >> 8 * i & 255) * (b >> 8 * i & 255);
    return c;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) r |= (((a >> 8 * i) - (b >> 8 * i)) & 255) << 8 * i;
    return r;
}
inline long long clock64() { return 0; }
