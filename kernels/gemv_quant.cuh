// Products with GPTQ integers for few rows of activations: out = x w' + bias, all in f32. A row's results do not depend
// on the other rows.
//
// A block computes 32 outputs, a lane each, so that a warp reads 128 contiguous bytes of every row of words;
// 16 warps share the units out in contiguous runs and add their sums in warp order. Position i of the packed
// columns takes x column gather[i] (-1: none), or column i itself where gather is null.
#pragma once
#include "slices.cuh"

const int GEMV_WARPS = 16;

// Code i of a unit as a float, by the trick of gemm_quant: 2^23 + code. After unrolling, i is a constant.
template <int BITS>
QK_INLINE float code_plus(const uint32_t (&words)[BITS], int i) {
    const int word = i * BITS / 32, shift = i * BITS % 32;
    uint32_t v = words[word] >> shift;
    if (shift + BITS > 32) v |= words[word + 1 < BITS ? word + 1 : word] << (32 - shift);
    return __uint_as_float((v & ((1u << BITS) - 1)) | 0x4b000000);
}

// ROWS is `rows`, or one more: then the last row is computed twice. scratch: GEMV_SCRATCH floats.
template <int BITS, int ROWS>
QK_INLINE void gemv_quant_rows(const uint32_t* q, const float* scales, const uint8_t* zeros, const float* x,
                               const int32_t* gather, const float* bias, float* out, uint32_t rows, uint32_t n,
                               uint32_t cols, uint32_t units, uint32_t units_per_group, uint32_t block,
                               float* scratch) {
    // Units on their way besides the one at work; all take the same path through a queue of registers.
    constexpr int AHEAD = BITS == 8 ? 1 : 3;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t mine = block * 32 + lane, output = mine < n ? mine : n - 1;
    const uint32_t each = (units + GEMV_WARPS - 1) / GEMV_WARPS;
    const uint32_t first = warp * each < units ? warp * each : units;
    const uint32_t last = first + each < units ? first + each : units;

    uint32_t words[AHEAD + 1][BITS];
    auto fetch = [&](uint32_t (&to)[BITS], uint32_t u) {
        if (u >= last) return;
#pragma unroll
        for (int w = 0; w < BITS; ++w) to[w] = q[(static_cast<uint64_t>(u) * BITS + w) * n + output];
    };
    // This lane's column of unit u.
    float column[ROWS];
    auto fetch_x = [&](uint32_t u) {
        if (u >= last) return;
        const uint32_t position = u * 32 + lane;
        const int32_t c = gather != nullptr ? gather[position] : position < cols ? static_cast<int32_t>(position) : -1;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t row = r < rows ? r : rows - 1;
            column[r] = c < 0 ? 0.0f : x[static_cast<uint64_t>(row) * cols + c];
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(words[i], first + i);
    fetch_x(first);

    // The warp's own two buffers of [ROWS][32]; two, so that one barrier a unit is enough.
    float* shared_x = scratch + warp * 2 * ROWS * 32;
    float sum[ROWS] = {}, part[ROWS] = {}, scale = 0.0f, zero = 0.0f;
    uint32_t group = first / units_per_group, left = units_per_group - first % units_per_group;
    bool fresh = true;
#pragma unroll 1
    for (uint32_t u = first; u < last; ++u) {
        fetch(words[AHEAD], u + AHEAD);
        if (fresh) {
            const uint64_t at = static_cast<uint64_t>(group++) * n + output;
            scale = scales[at];
            zero = __uint_as_float(zeros[at] | 0x4b000000);
        }
        float* now = shared_x + u % 2 * ROWS * 32;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) now[r * 32 + lane] = column[r];
        __syncwarp();
        fetch_x(u + 1);
#pragma unroll
        for (int c = 0; c < 32; c += 4) {
            float difference[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) difference[j] = code_plus<BITS>(words[0], c + j) - zero;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float4 v = *reinterpret_cast<const float4*>(now + r * 32 + c);
                part[r] += difference[0] * v.x;
                part[r] += difference[1] * v.y;
                part[r] += difference[2] * v.z;
                part[r] += difference[3] * v.w;
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
            for (int w = 0; w < BITS; ++w) words[i][w] = words[i + 1][w];
        }
        fresh = --left == 0;
        if (fresh) left = units_per_group;
        if (fresh || u + 1 == last) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                sum[r] += scale * part[r];
                part[r] = 0.0f;
            }
        }
    }

    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scratch[(warp * ROWS + r) * 32 + lane] = sum[r];
    __syncthreads();
    if (warp < rows && mine < n) {
        float total = scratch[warp * 32 + lane];
        for (int w = 1; w < GEMV_WARPS; ++w) total += scratch[(w * ROWS + warp) * 32 + lane];
        out[static_cast<uint64_t>(warp) * n + mine] = total + (bias != nullptr ? bias[mine] : 0.0f);
    }
}

const int GEMV_SCRATCH = GEMV_WARPS * 2 * 4 * 32;

#define GEMV_QUANT_ARGUMENTS                                                                                     \
    const uint32_t *__restrict__ q, const float *__restrict__ scales, const uint8_t *__restrict__ zeros,         \
        const float *__restrict__ x, const int32_t *__restrict__ gather, const float *__restrict__ bias,         \
        float *__restrict__ out, uint32_t rows, uint32_t n, uint32_t cols, uint32_t units, uint32_t units_per_group

template <int BITS>
QK_INLINE void gemv_quant(GEMV_QUANT_ARGUMENTS) {
    __shared__ __align__(16) float scratch[GEMV_SCRATCH];
    const Slice s(rows);
    x += static_cast<uint64_t>(s.first) * cols;
    out += static_cast<uint64_t>(s.first) * n;
#define ROWS_OF(ROWS)                                                                                                 \
    gemv_quant_rows<BITS, ROWS>(q, scales, zeros, x, gather, bias, out, s.rows, n, cols, units, units_per_group, s.block, \
                                scratch)
    if (s.rows == 1) ROWS_OF(1);
    else if (s.rows == 2) ROWS_OF(2);
    else ROWS_OF(4);
#undef ROWS_OF
}
