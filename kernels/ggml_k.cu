// ggml's K types: blocks of 256 values in sub-blocks of 16 or 32, whose scales are quantized in turn.
#include "ggml.cuh"

template <int SIZE, int DISTANCE, int ZERO_CODE, bool WITH_ADD>
struct Super {
    static const uint32_t VALUES = 256, BYTES = SIZE, PAIR = DISTANCE;
    static constexpr float ZERO = ZERO_CODE;
    static const bool ADDS = WITH_ADD;
    static const int AT_ONCE = 2;
};

// Two bits a value: byte 32 h + l holds values 128 h + l + 32 k, k from the lowest bits up. A chunk has two
// neighbouring k. Its first byte, and the shift of its lower bits:
QK_INLINE uint32_t pair_byte(uint32_t c) { return c / 8 * 32 + c % 4 * 8; }
QK_INLINE uint32_t pair_shift(uint32_t c) { return c / 4 % 2 * 4; }

// 16 bytes of scale and minimum, four bits each; 64 of codes; the scale of all and of the minima.
struct Q2K : Super<84, 32, 0, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        bit_pairs(read_8<4>(b + 16 + pair_byte(c)), pair_shift(c), chunk.codes);
        const uint32_t both = read_u32<4>(b + 80);
        const float d = __half2float(__ushort_as_half(both & 0xffff)), m = __half2float(__ushort_as_half(both >> 16));
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const uint32_t s = b[c / 4 * 4 + run * 2 + c % 4 / 2];
            chunk.scale[run] = d * (s & 15);
            chunk.add[run] = -(m * (s >> 4));
        }
    }
};

// 32 bytes of high bits, bit k of byte l for value l + 32 k; 64 of low bits; twelve of 6-bit scales: four low bits in
// nibbles, two high bits in the last four bytes; the scale of all.
struct Q3K : Super<110, 32, 4, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        bit_pairs(read_8<2>(b + 32 + pair_byte(c)), pair_shift(c), chunk.codes);
        const uint2 high = read_8<2>(b + c % 4 * 8);
        const uint32_t bit = c / 4 * 2;
        chunk.codes[0] |= (high.x >> bit & 0x01010101u) << 2;
        chunk.codes[1] |= (high.y >> bit & 0x01010101u) << 2;
        chunk.codes[2] |= (high.x >> (bit + 1) & 0x01010101u) << 2;
        chunk.codes[3] |= (high.y >> (bit + 1) & 0x01010101u) << 2;
        const float d = read_half(b + 108);
        // Scale j = 4 (c / 4) + 2 run + c % 4 / 2: a nibble of byte j % 8, two bits of byte 8 + j % 4.
        const uint8_t *lows = b + 96 + c / 4 % 2 * 4 + c % 4 / 2, *uppers = b + 104 + c % 4 / 2;
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const uint32_t low = lows[2 * run] >> (c / 8 * 4) & 15, upper = uppers[2 * run] >> (c / 4 * 2) & 3;
            chunk.scale[run] = d * (static_cast<int32_t>(low | upper << 4) - 32);
        }
    }
};

// Scales and minima of sub-blocks j and j + 1, j even, of Q4_K and Q5_K. After the two scales of all come twelve
// bytes: the first four of each kind plain in six bits, the others in the nibbles of the last four bytes, their high
// bits in the two that the first leave free.
QK_INLINE void scales_and_minima(const uint8_t* b, uint32_t j, Chunk& chunk) {
    const uint4 head = *reinterpret_cast<const uint4*>(b);
    const float d = __half2float(__ushort_as_half(head.x & 0xffff)), m = __half2float(__ushort_as_half(head.x >> 16));
    const uint32_t shift = j % 4 * 8, s = head.y >> shift, t = head.z >> shift, rest = head.w >> shift;
    const bool plain = j < 4;
    const uint32_t scales = plain ? s & 0x3f3f : (rest & 0x0f0f) | (s >> 2 & 0x3030);
    const uint32_t minima = plain ? t & 0x3f3f : (rest >> 4 & 0x0f0f) | (t >> 2 & 0x3030);
    chunk.scale[0] = d * (scales & 63);
    chunk.scale[1] = d * (scales >> 8 & 63);
    chunk.add[0] = -(m * (minima & 63));
    chunk.add[1] = -(m * (minima >> 8 & 63));
}

// After scales and minima 128 bytes, byte 32 j + l for values 64 j + l and 64 j + l + 32.
struct Q4K : Super<144, 32, 0, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<8>(b + 16 + 8 * c), chunk.codes);
        scales_and_minima(b, c / 4 * 2, chunk);
    }
};

// As Q4_K, with 32 bytes of fifth bits in between, bit j of byte l for value l + 32 j.
struct Q5K : Super<176, 32, 0, true> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<8>(b + 48 + 8 * c), chunk.codes);
        const uint2 high = read_8<8>(b + 16 + c % 4 * 8);
        const uint32_t bit = c / 4 * 2;
        chunk.codes[0] |= (high.x >> bit & 0x01010101u) << 4;
        chunk.codes[1] |= (high.y >> bit & 0x01010101u) << 4;
        chunk.codes[2] |= (high.x >> (bit + 1) & 0x01010101u) << 4;
        chunk.codes[3] |= (high.y >> (bit + 1) & 0x01010101u) << 4;
        scales_and_minima(b, c / 4 * 2, chunk);
    }
};

// 128 bytes of four low bits, byte 64 h + l for values 128 h + l and 128 h + l + 64; 64 of two high bits, as the two
// bits above; 16 signed scales of 16 values; the scale of all.
struct Q6K : Super<210, 64, 32, false> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        nibbles(read_8<2>(b + 8 * c), chunk.codes);
        const uint2 high = read_8<2>(b + 128 + c / 8 * 32 + c % 4 * 8);
        const uint32_t shift = c / 4 % 2 * 2;
        chunk.codes[0] |= (high.x >> shift & 0x03030303u) << 4;
        chunk.codes[1] |= (high.y >> shift & 0x03030303u) << 4;
        chunk.codes[2] |= (high.x >> (shift + 4) & 0x03030303u) << 4;
        chunk.codes[3] |= (high.y >> (shift + 4) & 0x03030303u) << 4;
        const float d = read_half(b + 208);
        const uint8_t* scales = b + 192 + c / 8 * 8 + c % 8 / 2;
        chunk.scale[0] = d * static_cast<int8_t>(scales[0]);
        chunk.scale[1] = d * static_cast<int8_t>(scales[4]);
    }
};

// gemv: grid ceil(n / 8) * ceil(rows / 4), block 128. decode: grid ceil(chunks / 256), block 256. embed: grid exactly the number of
// ids, block 128. No dynamic shared memory. A multiprocessor has registers for RESIDENT blocks of gemv; for one more,
// the compiler would spill some.
#define KERNELS(name, T, RESIDENT)                                                                      \
    extern "C" __global__ void __launch_bounds__(128, RESIDENT) ggml_gemv_##name(GGML_GEMV_ARGUMENTS) { \
        ggml_gemv<T>(GGML_GEMV_PASSED);                                                                 \
    }                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) ggml_decode_##name(GGML_DECODE_ARGUMENTS) {       \
        ggml_decode<T>(GGML_DECODE_PASSED);                                                             \
    }                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128) ggml_embed_##name(GGML_EMBED_ARGUMENTS) {         \
        ggml_embed<T>(GGML_EMBED_PASSED);                                                               \
    }

KERNELS(q2_k, Q2K, 4)
KERNELS(q3_k, Q3K, 3)
KERNELS(q4_k, Q4K, 4)
KERNELS(q5_k, Q5K, 4)
KERNELS(q6_k, Q6K, 4)
