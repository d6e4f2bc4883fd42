// Element types of keys and values, how the paged cache lays them out, and how they become f16 words for the
// tensor cores.
//
// A page holds PAGE tokens of all heads: [page][kv_head][slot][dim]. A format names its element, and how many
// f16 planes stand for it: one where codes are f16 numbers, two (x = hi + lo, 22 bits) where they are not. Scales
// never touch the codes; they go to scores, weights and sums.
#pragma once
#include "device.cuh"

constexpr uint32_t PAGE = 16;

// f16 ends at 6e-8, and low halves should lose nothing that matters: f32 values are multiplied by this.
constexpr float VALUE_BOOST = 16.0f;

// The largest f16; beyond it `hi` saturates, and `lo` takes up as much again.
constexpr float F16_MAX = 65504.0f;

// What `at` of a pool of rows of `dim` elements is: page, head and slot of a position.
QK_INLINE uint64_t page_row(const uint32_t* table, uint32_t position, uint32_t kv_heads, uint32_t head) {
    const uint64_t page = table[position / PAGE];
    return (page * kv_heads + head) * PAGE + position % PAGE;
}

QK_INLINE float f16_range(float x) { return fabsf(x) > F16_MAX ? copysignf(F16_MAX, x) : x; }

QK_INLINE uint32_t word_of(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }

QK_INLINE float2 floats_of(uint32_t word) { return __half22float2(*reinterpret_cast<__half2*>(&word)); }

// a, b = hi + lo, the first in the low half of each word.
QK_INLINE void split_pair(float a, float b, uint32_t& hi, uint32_t& lo) {
    hi = word_of(__floats2half2_rn(f16_range(a), f16_range(b)));
    const float2 near = floats_of(hi);
    lo = word_of(__floats2half2_rn(a - near.x, b - near.y));
}

// Powers of two for a query's weights times the scales of values, which can be of any size: `up` takes the largest product
// of a tile to 2^13 or more, where none is beyond f16 and low halves lose nothing that matters; `down` goes to the sums.
struct Boost {
    float up, down;
};

// For products of which `most` is the largest; whatever it is, both are normal numbers.
QK_INLINE Boost boost_for(float most) {
    constexpr uint32_t POWER = 13;
    const uint32_t exponent = max(__float_as_uint(most) >> 23, POWER + 1);
    return {__uint_as_float((254 + POWER - exponent) << 23), __uint_as_float((exponent - POWER) << 23)};
}

// N elements of a row as they stand in memory. Only the first `valid` exist; the rest become zero. WIDE: rows are
// multiples of 8 elements, so that N of them (4 or 8) are there or not, and aligned; otherwise of 2.
template <bool WIDE, class Element, int N>
QK_INLINE void read_row(const Element* p, int valid, uint32_t (&raw)[N * sizeof(Element) / 4]) {
    constexpr int WORDS = N * sizeof(Element) / 4;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) raw[i] = 0;
    if (valid <= 0) return;
    if constexpr (WIDE) {
        if constexpr (WORDS == 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(p);
            raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w;
        } else if constexpr (WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(p);
            raw[0] = v.x, raw[1] = v.y;
        } else {
            static_assert(WORDS == 1, "4, 8 or 16 bytes");
            raw[0] = *reinterpret_cast<const uint32_t*>(p);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            if (i >= valid) continue;
            if constexpr (sizeof(Element) == 4) {
                const uint2 v = *reinterpret_cast<const uint2*>(p + i);
                raw[i] = v.x, raw[i + 1] = v.y;
            } else if constexpr (sizeof(Element) == 2) {
                raw[i / 2] = *reinterpret_cast<const uint32_t*>(p + i);
            } else {
                raw[i / 4] |= uint32_t(*reinterpret_cast<const uint16_t*>(p + i)) << (i % 4 * 8);
            }
        }
    }
}

// Each format: `keys` and `values` turn the raw words of N elements into N / 2 words of two f16 (`lo` untouched where
// there is one plane). Scores are to be multiplied by key_unit, weighted sums by value_unit, which take the scales of the
// layer's heads. TOKEN_SCALES: there is instead a scale for each row of the pool, and scores are to be multiplied by the
// key's, weights by the value's, within a Boost. NaN stays NaN in each of them.

// f32 rows outside any cache.
struct F32 {
    typedef float Element;
    static constexpr int PLANES = 2;
    static constexpr bool TOKEN_SCALES = false;

    template <int N>
    static QK_INLINE void split(const uint32_t (&raw)[N], float boost, uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i)
            split_pair(__uint_as_float(raw[2 * i]) * boost, __uint_as_float(raw[2 * i + 1]) * boost, hi[i], lo[i]);
    }
    template <int N>
    static QK_INLINE void keys(const uint32_t (&raw)[N], uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
        split<N>(raw, 1.0f, hi, lo);
    }
    template <int N>
    static QK_INLINE void values(const uint32_t (&raw)[N], uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
        split<N>(raw, VALUE_BOOST, hi, lo);
    }
    static QK_INLINE float key_unit(const float*, uint32_t) { return 1.0f; }
    static QK_INLINE float value_unit(const float*, uint32_t) { return 1.0f / VALUE_BOOST; }
};

struct F16 {
    typedef uint16_t Element;
    static constexpr int PLANES = 1;
    static constexpr bool TOKEN_SCALES = false;

    template <int N>
    static QK_INLINE void keys(const uint32_t (&raw)[N / 2], uint32_t (&hi)[N / 2], uint32_t (&)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) hi[i] = raw[i];
    }
    template <int N>
    static QK_INLINE void values(const uint32_t (&raw)[N / 2], uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
        keys<N>(raw, hi, lo);
    }
    static QK_INLINE float key_unit(const float*, uint32_t) { return 1.0f; }
    static QK_INLINE float value_unit(const float*, uint32_t) { return 1.0f; }
};

// A scale for the keys and one for the values of each head.
struct E4m3 {
    typedef uint8_t Element;
    static constexpr int PLANES = 1;
    static constexpr bool TOKEN_SCALES = false;

    // With its exponent and mantissa moved into their f16 places, a code stands for 2^-8 of its value, exactly
    // and subnormals too: the biases are 7 and 15. In NaN, all ones, another 1 carries into the exponent's first bit, which
    // makes it one of f16.
    template <int N>
    static QK_INLINE void keys(const uint32_t (&raw)[N / 4], uint32_t (&hi)[N / 2], uint32_t (&)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const uint32_t spread = __byte_perm(raw[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            const uint32_t magnitude = (spread & 0x7f007f00u) >> 1;
            hi[i] = (spread & 0x80008000u) | magnitude | ((magnitude + 0x00800080u) & 0x40004000u);
        }
    }
    template <int N>
    static QK_INLINE void values(const uint32_t (&raw)[N / 4], uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
        keys<N>(raw, hi, lo);
    }
    static QK_INLINE float key_unit(const float* scales, uint32_t head) { return scales[head] * 256.0f; }
    static QK_INLINE float value_unit(const float* scales, uint32_t head) { return scales[head] * 256.0f; }
};

// Likewise. A code is the upper byte of the f16 that it stands for.
struct E5m2 {
    typedef uint8_t Element;
    static constexpr int PLANES = 1;
    static constexpr bool TOKEN_SCALES = false;

    template <int N>
    static QK_INLINE void keys(const uint32_t (&raw)[N / 4], uint32_t (&hi)[N / 2], uint32_t (&)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) hi[i] = __byte_perm(raw[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
    }
    template <int N>
    static QK_INLINE void values(const uint32_t (&raw)[N / 4], uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
        keys<N>(raw, hi, lo);
    }
    static QK_INLINE float key_unit(const float* scales, uint32_t head) { return scales[head]; }
    static QK_INLINE float value_unit(const float* scales, uint32_t head) { return scales[head]; }
};

// A scale per token and head; of a token with a NaN it is NaN, for which codes have no word.
struct I8 {
    typedef int8_t Element;
    static constexpr int PLANES = 1;
    static constexpr bool TOKEN_SCALES = true;

    // 0x6400 + u is the f16 1024 + u.
    template <int N>
    static QK_INLINE void keys(const uint32_t (&raw)[N / 4], uint32_t (&hi)[N / 2], uint32_t (&)[N / 2]) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            uint32_t word = __byte_perm(raw[i / 2] ^ 0x80808080u, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
            const __half2 shifted = *reinterpret_cast<__half2*>(&word);
            hi[i] = word_of(__hsub2(shifted, __float2half2_rn(1024.0f + 128.0f)));
        }
    }
    template <int N>
    static QK_INLINE void values(const uint32_t (&raw)[N / 4], uint32_t (&hi)[N / 2], uint32_t (&lo)[N / 2]) {
        keys<N>(raw, hi, lo);
    }
    static QK_INLINE float key_unit(const float*, uint32_t) { return 1.0f; }
    static QK_INLINE float value_unit(const float*, uint32_t) { return 1.0f; }
};
