// Products of signed bytes: out = (x w') * scales + bias, sums in integers.
//
//   gemv_int8: one to four rows; gemm_int8_small: up to a few dozen; gemm_int8, gemm_int8_segments: many
//
// x [rows][k], w [n][k], both in segments of `padded` bytes, filled up with zeros; k is segments * padded, padded a
// multiple of 64, and both are aligned to 16 bytes. Each row's segment has a scale and a zero point, xs and xz
// [rows][segments]; each output has a scale, ws [n], and, where zero points are not all 0, the sums of its segments,
// sums [segments][n], otherwise null. A segment is summed in integers, times its scale in f32, then added in f32 in
// order: as the CPU does it, to the last bit.
#include "gemm_ring.cuh"

const uint32_t SEGMENT_UNIT = 64;  // bytes that tensor cores are fed at once: two steps of 32

// What all kernels are told beside the matrices.
struct Factors {
    const float* xs;
    const int32_t* xz;
    const float* ws;
    const int32_t* sums;
    const float* bias;
    uint32_t segments, n;

    // A segment's sum as part of the result.
    QK_INLINE float part(int sum, uint32_t row, uint32_t col, uint32_t segment) const {
        const uint64_t at = static_cast<uint64_t>(row) * segments + segment;
        if (sums != nullptr) sum -= xz[at] * sums[static_cast<uint64_t>(segment) * n + col];
        return __fmul_rn(__int2float_rn(sum), xs[at]);
    }
    // The result of all parts.
    QK_INLINE float whole(float total, uint32_t col) const {
        const float v = __fmul_rn(total, ws[col]);
        return bias != nullptr ? __fadd_rn(v, bias[col]) : v;
    }
};

#define FACTORS                                                                                                \
    const float *__restrict__ xs, const int32_t *__restrict__ xz, const float *__restrict__ ws,                \
        const int32_t *__restrict__ sums, const float *__restrict__ bias, float *__restrict__ out,             \
        uint32_t rows, uint32_t n, uint32_t segments, uint32_t padded

const int WARPS = 4;

// A warp's output for ROWS rows; the last is computed again where there are fewer.
template <int ROWS>
QK_INLINE void gemv(const int8_t* x, const int8_t* w, const Factors& f, float* out, uint32_t rows, uint32_t padded) {
    const uint32_t lane = threadIdx.x % 32, o = blockIdx.x * WARPS + threadIdx.x / 32;
    if (o >= f.n) return;
    const uint64_t k = static_cast<uint64_t>(f.segments) * padded;
    float total[ROWS] = {};
    for (uint32_t s = 0; s < f.segments; ++s) {
        int sum[ROWS] = {};
        for (uint32_t c = lane * 16; c < padded; c += 512) {
            const uint64_t at = static_cast<uint64_t>(s) * padded + c;
            const int4 b = *reinterpret_cast<const int4*>(w + o * k + at);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int4 a = *reinterpret_cast<const int4*>(x + (r < rows ? r : rows - 1) * k + at);
                sum[r] = qk_dp4a(a.x, b.x, sum[r]);
                sum[r] = qk_dp4a(a.y, b.y, sum[r]);
                sum[r] = qk_dp4a(a.z, b.z, sum[r]);
                sum[r] = qk_dp4a(a.w, b.w, sum[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int step = 16; step > 0; step >>= 1) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], step);
            total[r] = __fadd_rn(total[r], f.part(sum[r], r < rows ? r : rows - 1, o, s));
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (lane == 0 && r < rows) out[static_cast<uint64_t>(r) * f.n + o] = f.whole(total[r], o);
    }
}

// Grid ceil(n / 4), block 128, no dynamic shared memory; rows 1 to 4.
extern "C" __global__ void __launch_bounds__(128)
    gemv_int8(const int8_t* __restrict__ x, const int8_t* __restrict__ w, FACTORS) {
    const Factors f{xs, xz, ws, sums, bias, segments, n};
    if (rows == 1) gemv<1>(x, w, f, out, rows, padded);
    else if (rows == 2) gemv<2>(x, w, f, out, rows, padded);
    else gemv<4>(x, w, f, out, rows, padded);
}

// The four results of a thread in a product of 16 rows and 8 outputs.
template <typename V, typename F>
QK_INLINE void each_of_four(V (&v)[4], uint32_t row, uint32_t col, uint32_t rows, uint32_t n, F f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t r = row + i / 2 * 8, c = col + i % 2;
        if (r < rows && c < n) f(i, r, c);
    }
}

// A warp computes 16 rows of 8 outputs on its own, with everything in registers. Bytes are taken in pairs, which makes
// 16-bit numbers of them for what only moves them; see gemm_tile.cuh for the order of columns.
// Grid (ceil(rows / 16), ceil(n / 32)), block 128, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(128)
    gemm_int8_small(const uint16_t* __restrict__ x, const uint16_t* __restrict__ w, FACTORS) {
    const Factors f{xs, xz, ws, sums, bias, segments, n};
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row0 = blockIdx.x * SMALL_ROWS, col0 = blockIdx.y * 32 + warp * 8;
    if (col0 >= n) return;
    const uint32_t k = segments * (padded / 2), units = padded / SEGMENT_UNIT;
    const RowsSource<1> source(x, nullptr, row0, rows, k);
    const uint16_t* weights = clamped_row(w, col0 + lane / 4, n, k) + lane % 4 * 8;
    const uint32_t row = row0 + lane / 4, col = col0 + lane % 4 * 2;
    float total[4] = {};
    for (uint32_t s = 0; s < segments; ++s) {
        int sum[4] = {};
        for (uint32_t u = s * units; u < (s + 1) * units; ++u) {
            RowsUnit<1> rows_unit;
            source.load(rows_unit, u);
            const uint4 c = *reinterpret_cast<const uint4*>(weights + u * UNIT);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t a[4];
                rows_unit.fragment(0, step, a);
                const uint32_t b[2] = {step == 0 ? c.x : c.z, step == 0 ? c.y : c.w};
                qk_mma_s8(sum, a, b);
            }
        }
        each_of_four(sum, row, col, rows, n,
                     [&](int i, uint32_t r, uint32_t o) { total[i] = __fadd_rn(total[i], f.part(sum[i], r, o, s)); });
    }
    each_of_four(total, row, col, rows, n, [&](int i, uint32_t r, uint32_t o) {
        out[static_cast<uint64_t>(r) * n + o] = f.whole(total[i], o);
    });
}

// 2 x 4 warps of 64 rows x 32 outputs, as the large products of 16-bit numbers: a pair of bytes is one of those to all
// that moves them.
template <bool SEGMENTS>
QK_INLINE void gemm_big(const uint16_t* x, const uint16_t* w, const Factors& f, float* out, uint32_t rows,
                        uint32_t padded) {
    constexpr int STAGES = 4;
    constexpr int STAGE = 2 * PLANE;
    QK_DYN_SMEM(uint16_t, ring);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = f.n;
    const uint32_t row0 = blockIdx.x * TILE, col0 = blockIdx.y * TILE;
    const uint32_t k = f.segments * (padded / 2), units_of_segment = padded / SEGMENT_UNIT;
    const uint32_t units = f.segments * units_of_segment;
    const TileSource xs(row0, rows, k), ws(col0, n, k);
    auto fetch = [&](uint32_t unit, uint32_t slot) {
        uint16_t* stage = ring + slot * STAGE;
        xs.copy(stage, x, unit * UNIT);
        ws.copy(stage + PLANE, w, unit * UNIT);
    };
#pragma unroll
    for (uint32_t u = 0; u < STAGES - 1; ++u) {
        if (u < units) fetch(u, u);
        qk_cp_async_commit();
    }

    const uint32_t x_row = warp / 4 * 64 + lane % 16, x_chunk = lane / 16;
    const uint32_t w_row = warp % 4 * 32 + lane % 8 + lane / 16 * 8, w_chunk = lane / 8 % 2;
    const uint32_t row = row0 + warp / 4 * 64 + lane / 4, col = col0 + warp % 4 * 32 + lane % 4 * 2;

    int sum[4][4][4] = {};
    float total[SEGMENTS ? 4 : 1][4][4] = {};
    auto end_segment = [&](uint32_t s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                each_of_four(sum[i][j], row + i * 16, col + j * 8, rows, n, [&](int v, uint32_t r, uint32_t o) {
                    float& so_far = total[SEGMENTS ? i : 0][j][v];
                    so_far = __fadd_rn(so_far, f.part(sum[i][j][v], r, o, s));
                    sum[i][j][v] = 0;
                });
            }
        }
    };
    uint32_t slot = 0, in_segment = 0, segment = 0;
    for (uint32_t u = 0; u < units; ++u) {
        qk_cp_async_wait<STAGES - 2>();
        __syncthreads();
        const uint32_t ahead = u + STAGES - 1;
        if (ahead < units) fetch(ahead, slot == 0 ? STAGES - 1 : slot - 1);
        qk_cp_async_commit();

        const uint16_t* stage = ring + slot * STAGE;
#pragma unroll
        for (uint32_t step = 0; step < 2; ++step) {
            uint32_t b[4][2];
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                uint32_t two[4];
                qk_ldmatrix_x4(two, stage + PLANE + swizzled(w_row + j * 8, step * 2 + w_chunk));
                b[j][0] = two[0], b[j][1] = two[1], b[j + 1][0] = two[2], b[j + 1][1] = two[3];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t a[4];
                qk_ldmatrix_x4(a, stage + swizzled(x_row + i * 16, step * 2 + x_chunk));
#pragma unroll
                for (int j = 0; j < 4; ++j) qk_mma_s8(sum[i][j], a, b[j]);
            }
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if (SEGMENTS && ++in_segment == units_of_segment) {
            end_segment(segment++);
            in_segment = 0;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            each_of_four(sum[i][j], row + i * 16, col + j * 8, rows, n, [&](int v, uint32_t r, uint32_t o) {
                const float all =
                    SEGMENTS ? total[SEGMENTS ? i : 0][j][v] : __fadd_rn(0.0f, f.part(sum[i][j][v], r, o, 0));
                out[static_cast<uint64_t>(r) * n + o] = f.whole(all, o);
            });
        }
    }
}

// One segment. Grid (ceil(rows / 128), ceil(n / 128)), block 256, dynamic shared memory 65536 bytes. Blocks along x
// share weights.
extern "C" __global__ void __launch_bounds__(256, 2)
    gemm_int8(const uint16_t* __restrict__ x, const uint16_t* __restrict__ w, FACTORS) {
    gemm_big<false>(x, w, Factors{xs, xz, ws, sums, bias, segments, n}, out, rows, padded);
}

// As gemm_int8: grid (ceil(rows / 128), ceil(n / 128)), block 256, dynamic shared memory 65536 bytes.
extern "C" __global__ void __launch_bounds__(256, 1)
    gemm_int8_segments(const uint16_t* __restrict__ x, const uint16_t* __restrict__ w, FACTORS) {
    gemm_big<true>(x, w, Factors{xs, xz, ws, sums, bias, segments, n}, out, rows, padded);
}
