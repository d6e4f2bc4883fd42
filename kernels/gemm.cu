// Dense matrix products on tensor cores: out = x w' + bias, with x as one or two 16-bit planes, w as one or two.
//
//   gemm_{f16,bf16}_{x1,x2}[_small], gemm_bf16_x3[_small]
//
// x [rows][k], w [n][k], out [rows][n]; k is a multiple of 32, planes are aligned to 16 bytes. x1 reads only
// xh and wh; x2 adds xl*wh; x3 adds xl*wh and xh*wl. Rows of x are in units of of_rows (f32 [rows], powers of two), or
// of 1 where that is null.
#include "gemm_ring.cuh"

// 2 x 4 warps of 64 rows x 32 outputs; XP planes of x, WP of w, in a ring of stages.
template <typename T, int XP, int WP>
QK_INLINE void gemm_big(const uint16_t* xh, const uint16_t* xl, const uint16_t* wh, const uint16_t* wl,
                        const float* bias, const float* of_rows, float* out, uint32_t rows, uint32_t n, uint32_t k) {
    constexpr int STAGES = 12 / (XP + WP);
    constexpr int STAGE = (XP + WP) * PLANE;
    QK_DYN_SMEM(uint16_t, ring);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = blockIdx.x * TILE, col0 = blockIdx.y * TILE;
    const TileSource xs(row0, rows, k), ws(col0, n, k);

    auto fetch = [&](uint32_t unit, uint32_t slot) {
        uint16_t* stage = ring + slot * STAGE;
        xs.copy(stage, xh, unit * UNIT);
        if (XP == 2) xs.copy(stage + PLANE, xl, unit * UNIT);
        ws.copy(stage + XP * PLANE, wh, unit * UNIT);
        if (WP == 2) ws.copy(stage + (XP + 1) * PLANE, wl, unit * UNIT);
    };

    const uint32_t units = k / UNIT;
#pragma unroll
    for (uint32_t u = 0; u < STAGES - 1; ++u) {
        if (u < units) fetch(u, u);
        qk_cp_async_commit();
    }

    // Which row and chunk this lane names to ldmatrix: of x, 16 rows and 2 chunks; of w, 16 outputs and 2.
    const uint32_t x_row = warp / 4 * 64 + lane % 16, x_chunk = lane / 16;
    const uint32_t w_row = warp % 4 * 32 + lane % 8 + lane / 16 * 8, w_chunk = lane / 8 % 2;

    float total[4][4][4] = {}, sum[4][4][4] = {};
    uint32_t slot = 0;
    for (uint32_t first = 0; first < units; first += CHAIN) {
        const uint32_t last = first + CHAIN < units ? first + CHAIN : units;
        for (uint32_t u = first; u < last; ++u) {
            qk_cp_async_wait<STAGES - 2>();
            __syncthreads();
            const uint32_t ahead = u + STAGES - 1;
            if (ahead < units) fetch(ahead, slot == 0 ? STAGES - 1 : slot - 1);
            qk_cp_async_commit();

            const uint16_t* stage = ring + slot * STAGE;
#pragma unroll
            for (uint32_t step = 0; step < 2; ++step) {
                uint32_t b[WP][4][2];
#pragma unroll
                for (int p = 0; p < WP; ++p) {
#pragma unroll
                    for (int j = 0; j < 4; j += 2) {
                        uint32_t two[4];
                        qk_ldmatrix_x4(two,
                                       stage + (XP + p) * PLANE + swizzled(w_row + j * 8, step * 2 + w_chunk));
                        b[p][j][0] = two[0];
                        b[p][j][1] = two[1];
                        b[p][j + 1][0] = two[2];
                        b[p][j + 1][1] = two[3];
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int p = 0; p < XP; ++p) {
                        uint32_t a[4];
                        qk_ldmatrix_x4(a, stage + p * PLANE + swizzled(x_row + i * 16, step * 2 + x_chunk));
#pragma unroll
                        for (int j = 0; j < 4; ++j) T::mma(sum[i][j], a, b[0][j]);
                        if (WP == 2 && p == 0) {
#pragma unroll
                            for (int j = 0; j < 4; ++j) T::mma(sum[i][j], a, b[WP - 1][j]);
                        }
                    }
                }
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) end_chain(total[i], sum[i]);
    }

    const uint32_t row = row0 + warp / 4 * 64 + lane / 4, col = col0 + warp % 4 * 32 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float(&v)[4] = total[i][j];
            store_pair(out, bias, of_rows, row + i * 16, col + j * 8, rows, n, v[0], v[1]);
            store_pair(out, bias, of_rows, row + i * 16 + 8, col + j * 8, rows, n, v[2], v[3]);
        }
    }
}

const int SMALL_COLS = 32;

// Ends a chain in shared memory, where a warp has a place of its own: a second set of registers would halve the blocks
// that a processor holds. total += sum (at first, = sum), and sum = 0.
QK_INLINE void take_up(float (&total)[SMALL_ROWS][SMALL_COLS], float (&sum)[4][4], bool first) {
    const uint32_t row = threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float& to = total[row + c / 2 * 8][j * 8 + col + c % 2];
            to = first ? sum[j][c] : to + sum[j][c];
            sum[j][c] = 0.0f;
        }
    }
}

// 8 warps, each with its run of the units and all 16 x 32 sums; AHEAD units are on their way at any time.
template <typename T, int XP, int WP>
QK_INLINE void gemm_small(const uint16_t* xh, const uint16_t* xl, const uint16_t* wh, const uint16_t* wl,
                          const float* bias, const float* of_rows, float* out, uint32_t rows, uint32_t n, uint32_t k) {
    constexpr int AHEAD = XP + WP == 4 ? 2 : 3;
    __shared__ float part[SMALL_WARPS][SMALL_ROWS][SMALL_COLS];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = blockIdx.x * SMALL_ROWS, col0 = blockIdx.y * SMALL_COLS;
    const RowsSource<XP> xs(xh, xl, row0, rows, k);
    const uint16_t* ws[WP][4];
#pragma unroll
    for (int p = 0; p < WP; ++p) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            ws[p][j] = clamped_row(p == 0 ? wh : wl, col0 + j * 8 + lane / 4, n, k) + lane % 4 * 8;
    }

    RowsUnit<XP> x[AHEAD];
    uint4 w[AHEAD][WP][4];
    auto fetch = [&](int slot, uint32_t u) {
        xs.load(x[slot], u);
#pragma unroll
        for (int p = 0; p < WP; ++p) {
#pragma unroll
            for (int j = 0; j < 4; ++j) w[slot][p][j] = *reinterpret_cast<const uint4*>(ws[p][j] + u * UNIT);
        }
    };

    const Run run(k / UNIT, warp);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (run.first + i < run.last) fetch(i, run.first + i);
    }
    float sum[4][4] = {};
    take_up(part[warp], sum, true);
    uint32_t chain = 0;
    for (uint32_t u = run.first; u < run.last; u += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (u + i >= run.last) break;
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t a[XP][4];
#pragma unroll
                for (int p = 0; p < XP; ++p) x[i].fragment(p, step, a[p]);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                    for (int p = 0; p < WP; ++p) {
                        const uint4& c = w[i][p][j];
                        const uint32_t b[2] = {step == 0 ? c.x : c.z, step == 0 ? c.y : c.w};
                        T::mma(sum[j], a[0], b);
                        if (XP == 2 && p == 0) T::mma(sum[j], a[XP - 1], b);
                    }
                }
            }
            if (u + i + AHEAD < run.last) fetch(i, u + i + AHEAD);
            if (++chain == CHAIN || u + i + 1 == run.last) {
                take_up(part[warp], sum, false);
                chain = 0;
            }
        }
    }
    reduce_small(part, bias, of_rows, out, row0, col0, rows, n);
}

#define DENSE_ARGUMENTS                                                                                     \
    const uint16_t *__restrict__ xh, const uint16_t *__restrict__ xl, const uint16_t *__restrict__ wh,      \
        const uint16_t *__restrict__ wl, const float *__restrict__ bias, const float *__restrict__ of_rows, \
        float *__restrict__ out, uint32_t rows, uint32_t n, uint32_t k

// Big: grid (ceil(rows / 128), ceil(n / 128)), block 256, dynamic shared memory 98304 bytes. Small: grid
// (ceil(rows / 16), ceil(n / 32)), block 256, none. Blocks along x share weights.
#define DENSE(name, T, XP, WP)                                                           \
    extern "C" __global__ void __launch_bounds__(256, 1) name(DENSE_ARGUMENTS) {         \
        gemm_big<T, XP, WP>(xh, xl, wh, wl, bias, of_rows, out, rows, n, k);             \
    }                                                                                    \
    extern "C" __global__ void __launch_bounds__(256, 2) name##_small(DENSE_ARGUMENTS) { \
        gemm_small<T, XP, WP>(xh, xl, wh, wl, bias, of_rows, out, rows, n, k);           \
    }

DENSE(gemm_f16_x1, F16, 1, 1)
DENSE(gemm_f16_x2, F16, 2, 1)
DENSE(gemm_bf16_x1, Bf16, 1, 1)
DENSE(gemm_bf16_x2, Bf16, 2, 1)
DENSE(gemm_bf16_x3, Bf16, 2, 2)
