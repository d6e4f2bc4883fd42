// ggml's IQ types with blocks of 256 values: levels from a table (IQ4_XS), or groups of values as points of a grid.
#include "ggml.cuh"
#include "ggml_grids.cuh"

template <int SIZE, int DISTANCE, int ZERO_CODE, bool WITH_ADD>
struct Super {
    static const uint32_t VALUES = 256, BYTES = SIZE, PAIR = DISTANCE;
    static constexpr float ZERO = ZERO_CODE;
    static const bool ADDS = WITH_ADD;
    static const int AT_ONCE = 1;
};

// Per 32 values a 6-bit scale, two high bits in the half after the scale of all, and 16 bytes of nibbles.
struct Iq4Xs : Super<136, 16, 128, false> {
    static const int AT_ONCE = 2;
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<8>(b + 8 + 8 * c), chunk.codes);
        const Levels levels = iq4_levels();
#pragma unroll
        for (int i = 0; i < 4; ++i) chunk.codes[i] = levels(chunk.codes[i]);
        const uint2 head = read_8<8>(b);
        const uint32_t j = c / 2, low = head.y >> (4 * j) & 15, high = head.x >> (16 + 2 * j) & 3;
        const float d = __half2float(__ushort_as_half(head.x & 0xffff));
        chunk.scale[0] = chunk.scale[1] = d * (static_cast<int32_t>(low | high << 4) - 32);
    }
};

// The levels of four values: two bits each, and three.
QK_INLINE uint32_t four_pairs(uint32_t point) {
    uint32_t v = point & 255;
    v = (v | v << 12) & 0x000f000fu;
    return (v | v << 6) & 0x03030303u;
}
QK_INLINE uint32_t four_triples(uint32_t point) {
    const uint32_t v = (point | point << 10) & 0x003f003fu;
    return (v | v << 5) & 0x07070707u;
}

// Four magnitudes with their signs, as 128 + value.
QK_INLINE uint32_t with_signs(uint32_t magnitudes, uint32_t signs) {
    const uint32_t minus = bits_to_bytes(signs);
    return (magnitudes ^ 0x80808080u ^ minus * 255) + minus;
}

// Eight signs of a 7-bit code: the eighth makes the number of minus signs even.
QK_INLINE uint32_t eight_signs(uint32_t code) {
    code &= 127;
    return code | (__popc(code) & 1) << 7;
}

// ---- IQ2: levels 0, 1, 2 are the magnitudes 8, 25, 43.

QK_INLINE uint32_t iq2_magnitudes(uint32_t levels) { return 0x08080808u + levels * 17 + (levels >> 1 & 0x01010101u); }

QK_INLINE void iq2_run(Chunk& chunk, int run, uint32_t point, uint32_t signs) {
    chunk.codes[2 * run] = with_signs(iq2_magnitudes(four_pairs(point)), signs);
    chunk.codes[2 * run + 1] = with_signs(iq2_magnitudes(four_pairs(point >> 8)), signs >> 4);
}

QK_INLINE float iq2_scale(float d, uint32_t code) { return d * (0.5f + code) * 0.25f; }

// Per 32 values four bytes of points, then four codes of signs and the scale in a word.
struct Iq2Xxs : Super<66, 8, 128, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint32_t points = read_u16(b + 2 + c / 2 * 8 + c % 2 * 2), codes = read_u32<2>(b + 6 + c / 2 * 8);
#pragma unroll
        for (int run = 0; run < 2; ++run)
            iq2_run(chunk, run, GRID_IQ2_XXS[points >> (8 * run) & 255], eight_signs(codes >> (c % 2 * 14 + run * 7)));
        chunk.scale[0] = chunk.scale[1] = iq2_scale(read_half(b), codes >> 28);
    }
};

// Per 8 values a point in nine bits and a code of signs in seven; a scale of four bits for 16.
struct Iq2Xs : Super<74, 8, 128, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const uint32_t code = read_u16(b + 2 + 4 * c + 2 * run);
            iq2_run(chunk, run, GRID_IQ2_XS[code & 511], eight_signs(code >> 9));
        }
        chunk.scale[0] = chunk.scale[1] = iq2_scale(read_half(b), b[66 + c / 2] >> (c % 2 * 4) & 15);
    }
};

// Per 8 values the low byte of a point, a byte of signs and two high bits of the point; scales as IQ2_XS.
struct Iq2S : Super<82, 8, 128, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint32_t points = read_u16(b + 2 + 2 * c), signs = read_u16(b + 34 + 2 * c);
        const uint32_t high = b[66 + c / 2] >> (c % 2 * 4);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const uint32_t index = (points >> (8 * run) & 255) | (high >> (2 * run) & 3) << 8;
            iq2_run(chunk, run, GRID_IQ2_S[index], signs >> (8 * run));
        }
        chunk.scale[0] = chunk.scale[1] = iq2_scale(read_half(b), b[74 + c / 2] >> (c % 2 * 4) & 15);
    }
};

// ---- IQ3: points of four values.

// 64 bytes of points, then per 32 values four codes of signs and the scale in a word. The levels are the magnitudes
// 4, 12, and so on in steps of 8, but for the last, 62.
struct Iq3Xxs : Super<98, 8, 128, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint32_t points = read_u32<2>(b + 2 + 4 * c), codes = read_u32<2>(b + 66 + c / 2 * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t levels = four_triples(GRID_IQ3_XXS[points >> (8 * i) & 255]);
            const uint32_t last = levels & levels >> 1 & levels >> 2 & 0x01010101u;
            const uint32_t signs = eight_signs(codes >> (c % 2 * 14 + i / 2 * 7)) >> (i % 2 * 4);
            chunk.codes[i] = with_signs(0x04040404u + levels * 8 + last * 2, signs);
        }
        chunk.scale[0] = chunk.scale[1] = read_half(b) * (0.5f + (codes >> 28)) * 0.5f;
    }
};

// 64 low bytes of points, their ninth bits, 32 bytes of signs, and a scale of four bits for 32 values. The levels are
// the magnitudes 1, 3, ... 15.
struct Iq3S : Super<110, 8, 128, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint32_t points = read_u32<2>(b + 2 + 4 * c), signs = read_u16(b + 74 + 2 * c);
        const uint32_t high = b[66 + c / 2] >> (c % 2 * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t index = (points >> (8 * i) & 255) | (high >> i & 1) << 8;
            chunk.codes[i] = with_signs(0x01010101u + four_triples(GRID_IQ3_S[index]) * 2, signs >> (4 * i));
        }
        const uint32_t scale = b[106 + c / 4] >> (c / 2 % 2 * 4) & 15;
        chunk.scale[0] = chunk.scale[1] = read_half(b) * (1 + 2 * scale);
    }
};

// ---- IQ1: levels -1, 0, 1, all of a group an eighth higher or lower.

QK_INLINE void iq1_run(Chunk& chunk, int run, uint32_t index, float scale, bool lower) {
    const uint32_t point = GRID_IQ1[index];
    chunk.codes[2 * run] = four_pairs(point);
    chunk.codes[2 * run + 1] = four_pairs(point >> 8);
    chunk.scale[run] = scale;
    chunk.add[run] = lower ? scale * -0.125f : scale * 0.125f;
}

// 32 low bytes of points; per 32 values four times three high bits, a scale of three bits and the shift.
struct Iq1S : Super<50, 8, 1, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint32_t points = read_u16(b + 2 + 2 * c), high = read_u16(b + 34 + c / 2 * 2);
        const float scale = read_half(b) * (2 * (high >> 12 & 7) + 1);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const uint32_t index = (points >> (8 * run) & 255) | (high >> (c % 2 * 6 + run * 3) & 7) << 8;
            iq1_run(chunk, run, index, scale, high >> 15 != 0);
        }
    }
};

// 32 low bytes of points; 16 bytes of three high bits and the shift of 8 values each; four words of four scales of
// three bits, each for 16 values, and in their highest bits the half-precision scale of all.
struct Iq1M : Super<56, 8, 1, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint2 words = read_8<8>(b + 48);
        const uint32_t d = (words.x >> 12 & 0x000f) | (words.x >> 24 & 0x00f0) | (words.y >> 4 & 0x0f00) |
                           (words.y >> 16 & 0xf000);
        const uint32_t word = (c < 8 ? words.x : words.y) >> (c / 4 % 2 * 16);
        const float scale = __half2float(__ushort_as_half(d)) * (2 * (word >> (c % 4 * 3) & 7) + 1);
        const uint32_t points = read_u16(b + 2 * c), high = b[32 + c];
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const uint32_t index = (points >> (8 * run) & 255) | (high >> (4 * run) & 7) << 8;
            iq1_run(chunk, run, index, scale, high >> (4 * run) & 8);
        }
    }
};

// gemv: grid ceil(n / 8) * ceil(rows / 4), block 128. decode: grid ceil(chunks / 256), block 256. embed: grid exactly the number of
// ids, block 128. No dynamic shared memory.
#define KERNELS(name, T)                                                                          \
    extern "C" __global__ void __launch_bounds__(128, 4) ggml_gemv_##name(GGML_GEMV_ARGUMENTS) {  \
        ggml_gemv<T>(GGML_GEMV_PASSED);                                                           \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) ggml_decode_##name(GGML_DECODE_ARGUMENTS) { \
        ggml_decode<T>(GGML_DECODE_PASSED);                                                       \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(128) ggml_embed_##name(GGML_EMBED_ARGUMENTS) {   \
        ggml_embed<T>(GGML_EMBED_PASSED);                                                         \
    }

KERNELS(iq4_xs, Iq4Xs)
KERNELS(iq2_xxs, Iq2Xxs)
KERNELS(iq2_xs, Iq2Xs)
KERNELS(iq2_s, Iq2S)
KERNELS(iq3_xxs, Iq3Xxs)
KERNELS(iq3_s, Iq3S)
KERNELS(iq1_s, Iq1S)
KERNELS(iq1_m, Iq1M)
