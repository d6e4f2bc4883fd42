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

    QK_INLINE Operand(const float* from, int64_t major, int64_t minor, uint32_t first, uint32_t extent, uint32_t k,
                      bool along_k)
        : from(from), major(major), minor(minor), first(first), extent(extent), k(k), along_k(along_k) {}

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

// The shared tiles of a block, double-buffered.
struct Tiles {
    float left[2][TILE_K * PITCH_M], right[2][TILE_K * PITCH_N];
};

// sum += the products over k in [from, to), `from` being a multiple of TILE_K; sums run over k in order. Threads in
// 16 x 16, each with 8 x 4 results: two runs of four rows, 64 apart, so that the eight or sixteen lanes that read
// shared memory together read neighbours.
QK_INLINE void multiply(float (&sum)[8][4], Operand<TILE_M, PITCH_M>& left, Operand<TILE_N, PITCH_N>& right,
                        Tiles& tiles, uint32_t from, uint32_t to) {
    const uint32_t tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    left.fetch(from);
    right.fetch(from);
    left.put(tiles.left[0]);
    right.put(tiles.right[0]);
    __syncthreads();
    uint32_t now = 0;
    for (uint32_t p0 = from; p0 < to; p0 += TILE_K) {
        const bool more = p0 + TILE_K < to;
        if (more) {
            left.fetch(p0 + TILE_K);
            right.fetch(p0 + TILE_K);
        }
#pragma unroll
        for (int p = 0; p < TILE_K; ++p) {
            const float4 x0 = *reinterpret_cast<const float4*>(&tiles.left[now][p * PITCH_M + ty * 4]);
            const float4 x1 = *reinterpret_cast<const float4*>(&tiles.left[now][p * PITCH_M + 64 + ty * 4]);
            const float4 y = *reinterpret_cast<const float4*>(&tiles.right[now][p * PITCH_N + tx * 4]);
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
            left.put(tiles.left[now ^ 1]);
            right.put(tiles.right[now ^ 1]);
        }
        __syncthreads();
        now ^= 1;
    }
}

// The row and column of a thread's result (i, j) inside its tile.
QK_INLINE uint32_t result_row(int i) { return i / 4 * 64 + threadIdx.x / 16 * 4 + i % 4; }
QK_INLINE uint32_t result_col(int j) { return threadIdx.x % 16 * 4 + j; }

// c = keep * c + alpha * a b: c [m][n] with rows ldc apart; a (m x k) and b (k x n) at any strides. Without `keep`,
// c is not read.
// Grid (ceil(m / 128), ceil(n / 64)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 2) sgemm(float* c, const float* a, const float* b, uint32_t m,
                                                           uint32_t n, uint32_t k, int64_t ldc, int64_t a_row,
                                                           int64_t a_col, int64_t b_row, int64_t b_col, float alpha,
                                                           int keep) {
    __shared__ __align__(16) Tiles tiles;
    const uint32_t row0 = blockIdx.x * TILE_M, col0 = blockIdx.y * TILE_N;
    Operand<TILE_M, PITCH_M> left(a, a_row, a_col, row0, m, k, a_col == 1);
    Operand<TILE_N, PITCH_N> right(b, b_col, b_row, col0, n, k, b_row == 1);
    float sum[8][4] = {};
    multiply(sum, left, right, tiles, 0, k);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t row = row0 + result_row(i);
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint32_t col = col0 + result_col(j);
            if (col >= n) continue;
            float* at = c + row * ldc + col;
            *at = keep != 0 ? *at * static_cast<float>(keep) + alpha * sum[i][j] : alpha * sum[i][j];
        }
    }
}

// Rows whose products are summed in f32 before they join the sum in f64: what calibration rounds off decides codes.
const uint32_t GRAM_ROWS = 256;

// sum += x' x for x [t][n], in the tiles that touch the lower triangle.
// Grid (ceil(n / 128), ceil(n / 64)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256, 2) gram(double* __restrict__ sum, const float* __restrict__ x,
                                                          uint32_t t, uint32_t n) {
    __shared__ __align__(16) Tiles tiles;
    const uint32_t row0 = blockIdx.x * TILE_M, col0 = blockIdx.y * TILE_N;
    if (col0 >= row0 + TILE_M) return;
    Operand<TILE_M, PITCH_M> left(x, 1, n, row0, n, t, false);
    Operand<TILE_N, PITCH_N> right(x, 1, n, col0, n, t, false);
    // What is fetched beyond `t` is zero; a run of rows ends where a tile does.
    for (uint32_t from = 0; from < t; from += GRAM_ROWS) {
        float part[8][4] = {};
        multiply(part, left, right, tiles, from, from + GRAM_ROWS < t ? from + GRAM_ROWS : t);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t row = row0 + result_row(i), col = col0 + result_col(j);
                if (row < n && col < n) sum[static_cast<uint64_t>(row) * n + col] += part[i][j];
            }
        }
    }
}

// sum += part, element by element. Any grid, any block.
extern "C" __global__ void accumulate(double* __restrict__ sum, const double* __restrict__ part, uint64_t n) {
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) sum[i] += part[i];
}
