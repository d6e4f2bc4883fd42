// ggml types with blocks of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.
#include "ggml.cuh"

// What they share: but for Q8_0, byte j holds values j (low nibble) and j + 16.
template <int SIZE, int ZERO_CODE, bool WITH_ADD>
struct Nibbles {
    static const uint32_t VALUES = 32, BYTES = SIZE, PAIR = 16;
    static constexpr float ZERO = ZERO_CODE;
    static const bool ADDS = WITH_ADD;
    static const int AT_ONCE = 2;
};

QK_INLINE void both(Chunk& chunk, float scale, float add) {
    chunk.scale[0] = chunk.scale[1] = scale;
    chunk.add[0] = chunk.add[1] = add;
}

// The fifth bits: bit j of `high` belongs to value j.
QK_INLINE void fifth_bits(Chunk& chunk, uint32_t high, uint32_t c) {
    high >>= 8 * c;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.codes[i] |= bits_to_bytes(high >> (i / 2 * 16 + i % 2 * 4)) << 4;
}

struct Q4_0 : Nibbles<18, 8, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<2>(b + 2 + 8 * c), chunk.codes);
        both(chunk, read_half(b), 0.0f);
    }
};

struct Q4_1 : Nibbles<20, 0, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<4>(b + 4 + 8 * c), chunk.codes);
        both(chunk, read_half(b), read_half(b + 2));
    }
};

struct Q5_0 : Nibbles<22, 16, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<2>(b + 6 + 8 * c), chunk.codes);
        fifth_bits(chunk, read_u32<2>(b + 2), c);
        both(chunk, read_half(b), 0.0f);
    }
};

struct Q5_1 : Nibbles<24, 0, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<8>(b + 8 + 8 * c), chunk.codes);
        fifth_bits(chunk, read_u32<4>(b + 4), c);
        both(chunk, read_half(b), read_half(b + 2));
    }
};

struct Q8_0 {
    static const uint32_t VALUES = 32, BYTES = 34, PAIR = 8;
    static constexpr float ZERO = 128;
    static const bool ADDS = false;
    static const int AT_ONCE = 2;
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        const uint2 first = read_8<2>(b + 2 + 16 * c), second = read_8<2>(b + 10 + 16 * c);
        chunk.codes[0] = first.x ^ 0x80808080u;
        chunk.codes[1] = first.y ^ 0x80808080u;
        chunk.codes[2] = second.x ^ 0x80808080u;
        chunk.codes[3] = second.y ^ 0x80808080u;
        both(chunk, read_half(b), 0.0f);
    }
};

QK_INLINE void look_up(Chunk& chunk, const Levels& levels) {
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.codes[i] = levels(chunk.codes[i]);
}

struct Iq4Nl : Nibbles<18, 128, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<2>(b + 2 + 8 * c), chunk.codes);
        look_up(chunk, iq4_levels());
        both(chunk, read_half(b), 0.0f);
    }
};

// Levels are twice the values of E2M1, and here 12 higher; the scale is half the power of two of byte 0, which is
// subnormal for 0 and 1.
struct Mxfp4 : Nibbles<17, 12, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<1>(b + 1 + 8 * c), chunk.codes);
        look_up(chunk, {0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u});
        const uint32_t e = b[0];
        both(chunk, __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23), 0.0f);
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

KERNELS(q4_0, Q4_0)
KERNELS(q4_1, Q4_1)
KERNELS(q5_0, Q5_0)
KERNELS(q5_1, Q5_1)
KERNELS(q8_0, Q8_0)
KERNELS(iq4_nl, Iq4Nl)
KERNELS(mxfp4, Mxfp4)
