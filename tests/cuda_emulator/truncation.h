// How tensor cores add, where sums are to be as inexact as theirs (QUANTKIT_EMULATOR_MMA). The twin's default, f32 rounded
// to nearest, is more exact than any of them.
//
// Products are exact. A block of them and the sum so far are aligned to the largest exponent among them, cut to a number
// of bits after its first, added exactly, and the result is cut to f32: nothing is rounded to nearest, so that long sums
// drift towards zero. The exponent of a product is the sum of its factors' exponents.
//
//   ampere (also Ada): blocks of 8 products, 24 bits    hopper: blocks of 16 products, 25 bits
//
// Sources: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ CS 7:e330 (2021), for the
// method and A100; Khattak, Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004 (2025), and Xie et al.,
// "MMA-Sim", arXiv:2511.10909 (2025), for H100: both compared their models with the hardware bit by bit and agree. Results
// below f32's normal numbers are not modelled.
#pragma once
#include "runtime.h"

namespace emu {

typedef float Floats8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef int64_t Longs8 __attribute__((vector_size(64)));
typedef double Doubles8 __attribute__((vector_size(64)));

// Smallest exponents of normal numbers; subnormal ones keep it.
constexpr int F16_EXPONENT = -14, F32_EXPONENT = -126;

inline Ints8 exponents(Floats8 v, int smallest) {
    const Ints8 found = ((Ints8(v) >> 23) & 255) - 127;
    return found < smallest ? smallest + Ints8{} : found;
}

inline Doubles8 power(Ints8 exponent) {
    return Doubles8((__builtin_convertvector(exponent, Longs8) + 1023) << 52);
}

// What is before the point; magnitudes are below 2^31.
inline Doubles8 whole(Doubles8 v) { return __builtin_convertvector(__builtin_convertvector(v, Ints8), Doubles8); }

// Eight sums, each plus x[k] * y[k] for k below `count`, as tensor cores add that many of 16-bit floats.
inline Floats8 add_block(Floats8 sum, const float* x, const Floats8* y, int count, int bits, int smallest) {
    Floats8 products[16], plain = sum;
    Ints8 largest = exponents(sum, F32_EXPONENT);
    for (int k = 0; k < count; ++k) {
        const Floats8 factor = x[k] + Floats8{};
        products[k] = factor * y[k];
        plain += products[k];
        const Ints8 exponent = exponents(factor, smallest) + exponents(y[k], smallest);
        largest = products[k] != 0.0f && exponent > largest ? exponent : largest;
    }
    const Doubles8 up = power(bits - largest), down = power(largest - bits);
    Doubles8 total = whole(__builtin_convertvector(sum, Doubles8) * up);
    for (int k = 0; k < count; ++k) total += whole(__builtin_convertvector(products[k], Doubles8) * up);
    const Longs8 cut = Longs8(total * down) & ~((int64_t(1) << 29) - 1);
    const Floats8 result = __builtin_convertvector(Doubles8(cut), Floats8);
    // Infinity and NaN pass as in any other arithmetic.
    return plain - plain == 0.0f ? result : plain;
}

// The same for 16 products, by the device's blocks.
inline Floats8 add_truncated(Floats8 sum, const float* x, const Floats8* y, int smallest, const Truncation& device) {
    for (int k = 0; k < 16; k += device.products)
        sum = add_block(sum, x + k, y + k, device.products, device.bits, smallest);
    return sum;
}

}  // namespace emu
