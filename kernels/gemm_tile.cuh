// Parts shared by the dense and the quantized matrix products on tensor cores.
//
// Inputs are consumed in units of 32 columns. A product does not mind in which order it takes the columns of a
// unit, as long as both operands agree. Operands that reach the tensor cores through plain loads use this
// order: lane t of a quad holds columns 8t to 8t+7 of the unit, 16 contiguous bytes, and step s (of two) of
// the m16n8k16 products takes columns 8t+4s to 8t+4s+3 of every lane.
#pragma once
#include "device.cuh"

const uint32_t UNIT = 32;

// Units after which a sum starts anew. Tensor cores cut what they add to some 24 bits instead of rounding it to nearest,
// so that long chains drift towards zero: over 4096 columns whose products have one sign by 2e-5 of the sum on Hopper and
// 5e-5 on Ampere; in chains of 256 columns by 1e-6 and 3e-6, whatever their number.
const uint32_t CHAIN = 8;

// Ends a chain: total += part, rounded to nearest, and part = 0.
template <int TILES>
QK_INLINE void end_chain(float (&total)[TILES][4], float (&part)[TILES][4]) {
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            total[j][c] += part[j][c];
            part[j][c] = 0.0f;
        }
    }
}

// The 16-bit floats that planes hold.
struct F16 {
    QK_INLINE static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { qk_mma_f16(d, a, b); }
};
struct Bf16 {
    QK_INLINE static void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { qk_mma_bf16(d, a, b); }
};

// Row `row` of a matrix, or its last row: rows past the end are computed with whatever is there, never stored.
QK_INLINE const uint16_t* clamped_row(const uint16_t* matrix, uint32_t row, uint32_t rows, uint32_t k) {
    return matrix + static_cast<uint64_t>(row < rows ? row : rows - 1) * k;
}

// out[row][col] and out[row][col + 1], each where it exists, times the row's unit, plus bias.
QK_INLINE void store_pair(float* out, const float* bias, const float* of_rows, uint32_t row, uint32_t col,
                          uint32_t rows, uint32_t n, float v0, float v1) {
    if (row >= rows || col >= n) return;
    float* at = out + static_cast<uint64_t>(row) * n + col;
    const bool both = col + 1 < n;
    if (of_rows != nullptr) {
        v0 = __fmul_rn(v0, of_rows[row]);
        v1 = __fmul_rn(v1, of_rows[row]);
    }
    if (bias != nullptr) {
        v0 += bias[col];
        if (both) v1 += bias[col + 1];
    }
    if (n % 2 == 0) {
        *reinterpret_cast<float2*>(at) = make_float2(v0, v1);
    } else {
        at[0] = v0;
        if (both) at[1] = v1;
    }
}

// ---- The small form: up to a few dozen rows, where reading the weights is all the work. A block computes 16
// rows of a few outputs; its warps share the units out in contiguous runs, keep everything in registers, and
// add their sums in warp order at the end.

const int SMALL_WARPS = 8;
const int SMALL_ROWS = 16;

// The units of this warp: [first, last).
struct Run {
    uint32_t first, last;
    QK_INLINE Run(uint32_t units, uint32_t warp) {
        const uint32_t each = (units + SMALL_WARPS - 1) / SMALL_WARPS;
        first = warp * each < units ? warp * each : units;
        last = first + each < units ? first + each : units;
    }
};

// One unit of the 16 rows of activations: what this lane feeds the tensor cores.
template <int PLANES>
struct RowsUnit {
    uint4 upper[PLANES], lower[PLANES];
    // The left operand for plane p, step s.
    QK_INLINE void fragment(int p, int s, uint32_t (&a)[4]) const {
        a[0] = s == 0 ? upper[p].x : upper[p].z;
        a[1] = s == 0 ? lower[p].x : lower[p].z;
        a[2] = s == 0 ? upper[p].y : upper[p].w;
        a[3] = s == 0 ? lower[p].y : lower[p].w;
    }
};

// Where this lane's share of the 16 rows stands in global memory.
template <int PLANES>
struct RowsSource {
    const uint16_t *upper[PLANES], *lower[PLANES];
    QK_INLINE RowsSource(const uint16_t* xh, const uint16_t* xl, uint32_t row, uint32_t rows, uint32_t k) {
        const uint32_t group = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 8;
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
            upper[p] = clamped_row(p == 0 ? xh : xl, row + group, rows, k) + column;
            lower[p] = clamped_row(p == 0 ? xh : xl, row + group + 8, rows, k) + column;
        }
    }
    QK_INLINE void load(RowsUnit<PLANES>& unit, uint32_t u) const {
#pragma unroll
        for (int p = 0; p < PLANES; ++p) {
            unit.upper[p] = *reinterpret_cast<const uint4*>(upper[p] + u * UNIT);
            unit.lower[p] = *reinterpret_cast<const uint4*>(lower[p] + u * UNIT);
        }
    }
};

// Adds the warps' partial tiles, [16][COLS] each, in warp order; stores those inside the matrix as store_pair does.
template <int COLS>
QK_INLINE void reduce_small(const float (&part)[SMALL_WARPS][SMALL_ROWS][COLS], const float* bias,
                            const float* of_rows, float* out, uint32_t row0, uint32_t col0, uint32_t rows, uint32_t n) {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < SMALL_ROWS * COLS; i += SMALL_WARPS * 32) {
        const uint32_t r = i / COLS, c = i % COLS;
        float sum = part[0][r][c];
#pragma unroll
        for (int w = 1; w < SMALL_WARPS; ++w) sum += part[w][r][c];
        if (row0 + r < rows && col0 + c < n) {
            if (of_rows != nullptr) sum = __fmul_rn(sum, of_rows[row0 + r]);
            if (bias != nullptr) sum += bias[col0 + c];
            out[static_cast<uint64_t>(row0 + r) * n + col0 + c] = sum;
        }
    }
}
