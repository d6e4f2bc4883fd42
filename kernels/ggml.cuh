// What the kernels for ggml blocks share: reading blocks, and the three uses of what was read.
//
// Weights stay as a file holds them: a row is whole blocks, blocks follow one another without gaps. A thread takes
// a chunk, 16 values in two runs of 8 that the layout stores together (as low and high nibbles, say). Whatever the
// type, a chunk becomes unsigned bytes: value = scale * (byte - ZERO) + add, with a scale and an addend a run.
//
// A type is a struct with
//   VALUES, BYTES  of a block
//   PAIR           how far the second run lies from the first
//   ZERO, ADDS     the byte that stands for 0; whether `add` is anything but 0
//   AT_ONCE        chunks that a product with one row has in work at once, as registers allow
//   read           chunk `c` of the block at `b`
// src/num/ggml holds the layouts in plain words.
#pragma once
#include "slices.cuh"

struct Chunk {
    uint32_t codes[4];   // two words a run, the first value lowest
    float scale[2], add[2];
};

// ---- Reading. Blocks of an even number of bytes begin at even addresses, and so on: ALIGN is a power of two that
// divides the address.

QK_INLINE uint32_t read_u16(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
QK_INLINE float read_half(const uint8_t* p) {
    return __half2float(__ushort_as_half(*reinterpret_cast<const uint16_t*>(p)));
}

// Four bytes, the first lowest.
template <int ALIGN>
QK_INLINE uint32_t read_u32(const uint8_t* p) {
    if (ALIGN >= 4) return *reinterpret_cast<const uint32_t*>(p);
    return read_u16(p) | read_u16(p + 2) << 16;
}

// Eight bytes.
template <int ALIGN>
QK_INLINE uint2 read_8(const uint8_t* p) {
    if (ALIGN >= 8) return *reinterpret_cast<const uint2*>(p);
    if (ALIGN > 1) return make_uint2(read_u32<ALIGN>(p), read_u32<ALIGN>(p + 4));
    // The words that hold any of the eight; no other is touched.
    const uint64_t at = reinterpret_cast<uint64_t>(p);
    const uint32_t shift = at % 4 * 8;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(at - at % 4);
    const uint32_t last = *reinterpret_cast<const uint32_t*>((at + 7) - (at + 7) % 4);
    return make_uint2(__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], last, shift));
}

// Four bits to the lowest bits of four bytes. The product's terms do not meet.
QK_INLINE uint32_t bits_to_bytes(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Both runs from the nibbles of eight bytes.
QK_INLINE void nibbles(uint2 q, uint32_t (&codes)[4]) {
    codes[0] = q.x & 0x0f0f0f0fu;
    codes[1] = q.y & 0x0f0f0f0fu;
    codes[2] = q.x >> 4 & 0x0f0f0f0fu;
    codes[3] = q.y >> 4 & 0x0f0f0f0fu;
}

// Both runs from neighbouring pairs of bits of eight bytes, the first at bit `shift`.
QK_INLINE void bit_pairs(uint2 q, uint32_t shift, uint32_t (&codes)[4]) {
    codes[0] = q.x >> shift & 0x03030303u;
    codes[1] = q.y >> shift & 0x03030303u;
    codes[2] = q.x >> (shift + 2) & 0x03030303u;
    codes[3] = q.y >> (shift + 2) & 0x03030303u;
}

// Sixteen levels of a byte each; looks up four bytes that are below 16.
struct Levels {
    uint32_t a, b, c, d;
    QK_INLINE uint32_t operator()(uint32_t four) const {
        // The permutation takes its four indices, three bits each, from nibbles.
        const uint32_t low = four & 0x07070707u;
        const uint32_t select = __byte_perm(low | low >> 4, 0, 0x4420);
        const uint32_t upper = (four >> 3 & 0x01010101u) * 255;
        return (__byte_perm(a, b, select) & ~upper) | (__byte_perm(c, d, select) & upper);
    }
};

// The levels of IQ4_NL and IQ4_XS plus 128.
QK_INLINE Levels iq4_levels() { return {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}; }

// ---- The uses

// The column, within its block, of the first value of chunk `c`.
template <typename T>
QK_INLINE uint32_t first_of(uint32_t c) {
    constexpr uint32_t EACH = T::PAIR / 8;
    return c / EACH * (2 * T::PAIR) + c % EACH * 8;
}

template <typename T>
constexpr uint32_t CHUNKS = T::VALUES / 16;

// Value i of run r without its scale where there is no addend, else complete. After unrolling, i and r are
// constants. 2^23 + code has the code in its lowest byte.
template <typename T>
QK_INLINE float partial(const Chunk& chunk, int r, int i) {
    const uint32_t bits = __byte_perm(chunk.codes[2 * r + i / 4], 0x4b000000u, 0x7540 + i % 4);
    const float code = __uint_as_float(bits) - (8388608.0f + T::ZERO);
    return T::ADDS ? chunk.scale[r] * code + chunk.add[r] : code;
}

template <typename T>
QK_INLINE float value(const Chunk& chunk, int r, int i) {
    return T::ADDS ? partial<T>(chunk, r, i) : chunk.scale[r] * partial<T>(chunk, r, i);
}

// A run of x: eight floats.
QK_INLINE void load_8(const float* x, float (&v)[8]) {
    const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

const int GGML_WARPS = 4, GGML_OUTPUTS = 2;   // a warp computes two outputs: each x that it reads serves both

// One to ROWS rows; where there are fewer, the last is computed again. A warp's lanes lie along the columns.
template <typename T, int ROWS>
QK_INLINE void ggml_gemv_rows(const uint8_t* blocks, const float* x, const float* bias, float* out, uint32_t rows,
                              uint32_t n, uint32_t cols, uint32_t out_block) {
    const uint32_t lane = threadIdx.x % 32, c = lane % CHUNKS<T>;
    const uint32_t first = (out_block * GGML_WARPS + threadIdx.x / 32) * GGML_OUTPUTS;
    if (first >= n) return;
    const uint32_t count = cols / T::VALUES;
    const uint8_t* from[GGML_OUTPUTS];
#pragma unroll
    for (int o = 0; o < GGML_OUTPUTS; ++o)
        from[o] = blocks + static_cast<uint64_t>(first + o < n ? first + o : n - 1) * count * T::BYTES;

    float sum[GGML_OUTPUTS][ROWS] = {};
#pragma unroll(ROWS == 1 ? T::AT_ONCE : 1)
    for (uint32_t block = lane / CHUNKS<T>; block < count; block += 32 / CHUNKS<T>) {
        Chunk chunk[GGML_OUTPUTS];
#pragma unroll
        for (int o = 0; o < GGML_OUTPUTS; ++o) T::read(from[o] + static_cast<uint64_t>(block) * T::BYTES, c, chunk[o]);
        const float* columns = x + block * T::VALUES + first_of<T>(c);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            float w[GGML_OUTPUTS][8];
#pragma unroll
            for (int o = 0; o < GGML_OUTPUTS; ++o) {
#pragma unroll
                for (int i = 0; i < 8; ++i) w[o][i] = partial<T>(chunk[o], run, i);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float v[8];
                load_8(columns + static_cast<uint64_t>(r < rows ? r : rows - 1) * cols + run * T::PAIR, v);
#pragma unroll
                for (int o = 0; o < GGML_OUTPUTS; ++o) {
                    float part = __fmul_rn(w[o][0], v[0]);   // not to be fused: two products could be
#pragma unroll
                    for (int i = 1; i < 8; ++i) part += w[o][i] * v[i];
                    sum[o][r] += T::ADDS ? part : chunk[o].scale[run] * part;
                }
            }
        }
    }
#pragma unroll
    for (int o = 0; o < GGML_OUTPUTS; ++o) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float total = qk_warp_sum(sum[o][r]);
            if (lane == 0 && first + o < n && r < rows)
                out[static_cast<uint64_t>(r) * n + first + o] = total + (bias != nullptr ? bias[first + o] : 0.0f);
        }
    }
}

template <typename T>
QK_INLINE void ggml_gemv(const uint8_t* blocks, const float* x, const float* bias, float* out, uint32_t rows,
                         uint32_t n, uint32_t cols) {
    const Slice s(rows);
    x += static_cast<uint64_t>(s.first) * cols;
    out += static_cast<uint64_t>(s.first) * n;
    if (s.rows == 1) ggml_gemv_rows<T, 1>(blocks, x, bias, out, s.rows, n, cols, s.block);
    else ggml_gemv_rows<T, 4>(blocks, x, bias, out, s.rows, n, cols, s.block);
}

QK_INLINE uint4 packed(const uint16_t (&v)[8]) {
    return make_uint4(v[0] | static_cast<uint32_t>(v[1]) << 16, v[2] | static_cast<uint32_t>(v[3]) << 16,
                      v[4] | static_cast<uint32_t>(v[5]) << 16, v[6] | static_cast<uint32_t>(v[7]) << 16);
}

// Beyond the largest finite value it stays there.
QK_INLINE uint16_t narrow_f16(float v) {
    v = v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
    return __half_as_ushort(__float2half_rn(v));
}

template <typename T>
QK_INLINE void ggml_decode(const uint8_t* blocks, uint16_t* high, uint16_t* low, uint32_t chunks) {
    const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= chunks) return;
    const uint32_t c = at % CHUNKS<T>;
    const uint64_t block = at / CHUNKS<T>, to = block * T::VALUES + first_of<T>(c);
    Chunk chunk;
    T::read(blocks + block * T::BYTES, c, chunk);
#pragma unroll
    for (int run = 0; run < 2; ++run) {
        uint16_t h[8], l[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float v = value<T>(chunk, run, i);
            h[i] = low != nullptr ? __bfloat16_as_ushort(__float2bfloat16_rn(v)) : narrow_f16(v);
            const float rest = v - __bfloat162float(__ushort_as_bfloat16(h[i]));
            l[i] = __bfloat16_as_ushort(__float2bfloat16_rn(rest));
        }
        *reinterpret_cast<uint4*>(high + to + run * T::PAIR) = packed(h);
        if (low != nullptr) *reinterpret_cast<uint4*>(low + to + run * T::PAIR) = packed(l);
    }
}

template <typename T>
QK_INLINE void ggml_embed(const uint8_t* table, const uint32_t* ids, float* out, float factor, uint32_t cols) {
    const uint8_t* from = table + static_cast<uint64_t>(ids[blockIdx.x]) * (cols / T::VALUES) * T::BYTES;
    for (uint32_t at = threadIdx.x; at < cols / 16; at += blockDim.x) {
        const uint32_t block = at / CHUNKS<T>, c = at % CHUNKS<T>;
        float* to = out + static_cast<uint64_t>(blockIdx.x) * cols + block * T::VALUES + first_of<T>(c);
        Chunk chunk;
        T::read(from + static_cast<uint64_t>(block) * T::BYTES, c, chunk);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = value<T>(chunk, run, i) * factor;
            float4* into = reinterpret_cast<float4*>(to + run * T::PAIR);
            into[0] = make_float4(v[0], v[1], v[2], v[3]);
            into[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
}

// The three kernels of a type, as each file defines them with its own macro:
//
// ggml_gemv_*: out = x w' + bias for few rows, all in f32; w [n][cols] in blocks, x [rows][cols], out [rows][n]. A
// row's results do not depend on the other rows.
// ggml_decode_*: the values of `chunks` chunks, in order, as the sum of two bf16 planes; where `low` is null, as one
// plane of f16.
// ggml_embed_*: rows `ids` of a table, times `factor`, as f32.
#define GGML_GEMV_ARGUMENTS                                                                            \
    const uint8_t *__restrict__ blocks, const float *__restrict__ x, const float *__restrict__ bias,   \
        float *__restrict__ out, uint32_t rows, uint32_t n, uint32_t cols
#define GGML_GEMV_PASSED blocks, x, bias, out, rows, n, cols
#define GGML_DECODE_ARGUMENTS \
    const uint8_t *__restrict__ blocks, uint16_t *__restrict__ high, uint16_t *__restrict__ low, uint32_t chunks
#define GGML_DECODE_PASSED blocks, high, low, chunks
#define GGML_EMBED_ARGUMENTS                                                                           \
    const uint8_t *__restrict__ table, const uint32_t *__restrict__ ids, float *__restrict__ out,      \
        float factor, uint32_t cols
#define GGML_EMBED_PASSED table, ids, out, factor, cols
