// ggml's ternary types: 256 values -1, 0, 1 with one scale.
#include "ggml.cuh"

template <int SIZE, int DISTANCE>
struct Ternary {
    static const uint32_t VALUES = 256, BYTES = SIZE, PAIR = DISTANCE;
    static constexpr float ZERO = 1;
    static const bool ADDS = false;
    static const int AT_ONCE = 1;
};

// A byte is a fraction in base 3, scaled to 256. A digit of each of four bytes: the whole part of three times what is
// left after `power`, a power of three, has moved the digits before it out.
QK_INLINE uint32_t digits(uint32_t four, uint32_t power) {
    const uint32_t even = (four & 0x00ff00ffu) * power & 0x00ff00ffu;
    const uint32_t odd = (four >> 8 & 0x00ff00ffu) * power & 0x00ff00ffu;
    return (even * 3 >> 8 & 0x00030003u) | (odd * 3 & 0x03000300u);
}

// 32 bytes of five digits, 16 of five, four of four; a part's byte l holds its values l, l + bytes, and so on.
struct Tq10 : Ternary<54, 8> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        // Chunks 0 to 9, 10 to 14, and 15, which alone has four digits of the same bytes.
        const bool last = c == 15;
        const uint32_t digit = c < 10 ? c / 2 : last ? 0 : c - 10;
        const uint8_t* from = b + (c < 10 ? c % 2 * 16 : last ? 48 : 32);
        uint32_t power = digit == 4 ? 81 : 0x1b090301u >> (8 * digit) & 255;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            chunk.codes[i] = digits(read_u32<2>(from + (last ? 0 : 4 * i)), power);
            power *= last ? 3 : 1;
        }
        chunk.scale[0] = chunk.scale[1] = read_half(b + 52);
    }
};

// Two bits a value: byte 32 h + l holds values 128 h + l + 32 k, k from the lowest bits up.
struct Tq20 : Ternary<66, 32> {
    QK_INLINE static void read(const uint8_t* b, uint32_t c, Chunk& chunk) {
        bit_pairs(read_8<2>(b + c / 8 * 32 + c % 4 * 8), c / 4 % 2 * 4, chunk.codes);
        chunk.scale[0] = chunk.scale[1] = read_half(b + 64);
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

KERNELS(tq1_0, Tq10)
KERNELS(tq2_0, Tq20)
