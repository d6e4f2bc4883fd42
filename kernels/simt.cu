// Products in f32 without tensor cores, for statistics and the solvers, and their sums in f64.
#include "device.cuh"

const int TILE_M = 128, TILE_N = 64, TILE_K = 16;
// Four floats between rows keep 16-byte reads aligned and spread a transposing write over the banks.
const int PITCH_M = TILE_M + 4, PITCH_N = TILE_N + 4;

// One thread's part of a [TILE_K][EXTENT] tile of an operand whose element (i, p) is at i * major + p * minor.
// Threads run along whichever index is contiguous in memory.
template <int EXTENT, int PITCH>
struct Operand {
    static constexpr int EACH = EXTENT * TILE_K / 256;
    const float* from;
    int64_t major, minor;
    uint32_t first, extent, k;
    bool along_k;
    float held[EACH];

    QK_INLINE Operand(const float* from, int64_t major, int64_t minor, uint32_t first, uint32_t extent, uint32_t k)
        : from(from), major(major), minor(minor), first(first), extent(extent), k(k), along_k(minor == 1) {}

    QK_INLINE uint32_t index(int e) const {
        const uint32_t at = threadIdx.x + e * 256;
        return along_k ? at / TILE_K : at % EXTENT;
    }
    QK_INLINE uint32_t depth(int e) const {
        const uint32_t at = threadIdx.x + e * 256;
        return along_k ? at % TILE_K : at / EXTENT;
    }
    QK_INLINE void fetch(uint32_t p0) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const uint32_t i = first + index(e), p = p0 + depth(e);
            held[e] = i < extent && p < k ? from[i * major + p * minor] : 0.0f;
        }
    }
    QK_INLINE void put(float* tile) const {
#pragma unroll
        for (int e = 0; e < EACH; ++e) tile[depth(e) * PITCH + index(e)] = held[e];
    }
};

// c = keep * c + alpha * a b: c [m][n] with rows ldc apart; a (m x k) and b (k x n) at any strides. Sums run
// over k in order. With `lower`, tiles wholly above the diagonal are left alone. Without `keep`, c is not read.
// Grid (ceil(m / 128), ceil(n / 64)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 2) sgemm(float* c, const float* a, const float* b, uint32_t m,
                                                           uint32_t n, uint32_t k, int64_t ldc, int64_t a_row,
                                                           int64_t a_col, int64_t b_row, int64_t b_col, float alpha,
                                                           int keep, int lower) {
    __shared__ __align__(16) float as[2][TILE_K * PITCH_M], bs[2][TILE_K * PITCH_N];
    const uint32_t row0 = blockIdx.x * TILE_M, col0 = blockIdx.y * TILE_N;
    if (lower != 0 && col0 >= row0 + TILE_M) return;

    // Threads in 16 x 16, each with 8 x 4 results: two runs of four rows, 64 apart, so that the eight or
    // sixteen lanes that read shared memory together read neighbours.
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    Operand<TILE_M, PITCH_M> left(a, a_row, a_col, row0, m, k);
    Operand<TILE_N, PITCH_N> right(b, b_col, b_row, col0, n, k);
    float sum[8][4] = {};
    if (k > 0) {
        left.fetch(0);
        right.fetch(0);
        left.put(as[0]);
        right.put(bs[0]);
    }
    __syncthreads();
    uint32_t now = 0;
    for (uint32_t p0 = 0; p0 < k; p0 += TILE_K) {
        const bool more = p0 + TILE_K < k;
        if (more) {
            left.fetch(p0 + TILE_K);
            right.fetch(p0 + TILE_K);
        }
#pragma unroll
        for (int p = 0; p < TILE_K; ++p) {
            const float4 x0 = *reinterpret_cast<const float4*>(&as[now][p * PITCH_M + ty * 4]);
            const float4 x1 = *reinterpret_cast<const float4*>(&as[now][p * PITCH_M + 64 + ty * 4]);
            const float4 y = *reinterpret_cast<const float4*>(&bs[now][p * PITCH_N + tx * 4]);
            const float x[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[i][0] += x[i] * y.x;
                sum[i][1] += x[i] * y.y;
                sum[i][2] += x[i] * y.z;
                sum[i][3] += x[i] * y.w;
            }
        }
        if (more) {
            left.put(as[now ^ 1]);
            right.put(bs[now ^ 1]);
        }
        __syncthreads();
        now ^= 1;
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t row = row0 + i / 4 * 64 + ty * 4 + i % 4;
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t col = col0 + tx * 4 + j;
            if (col >= n) continue;
            float* at = c + row * ldc + col;
            *at = keep != 0 ? *at * static_cast<float>(keep) + alpha * sum[i][j] : alpha * sum[i][j];
        }
    }
}

// sum += part, element by element. Any grid, any block.
extern "C" __global__ void accumulate(double* __restrict__ sum, const float* __restrict__ part, uint64_t n) {
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) sum[i] += part[i];
}
