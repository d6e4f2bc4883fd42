// Dense products for few rows of activations, as in decoding: out = x w' + bias, all in f32. A row's results do not
// depend on the other rows.
//
//   gemv_f16, gemv_bf16: w [n][stride]; gemv_f32: the same in two bf16 planes, wh + wl
//
// stride is a multiple of 32, zero from `cols` on; weights are aligned to 16 bytes. x [rows][cols], out [rows][n].
#include "slices.cuh"

const int WARPS = 4, OUTPUTS = 2;   // a warp computes two outputs: each x that it reads serves both

QK_INLINE float2 halves_f16(uint32_t v) { return __half22float2(*reinterpret_cast<const __half2*>(&v)); }
QK_INLINE float2 halves_bf16(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000));
}

// Eight weights from one or two planes.
struct WeightsF16 {
    const uint16_t* w;
    QK_INLINE void load(uint64_t at, float (&v)[8]) const {
        const uint4 raw = *reinterpret_cast<const uint4*>(w + at);
        const float2 a = halves_f16(raw.x), b = halves_f16(raw.y), c = halves_f16(raw.z), d = halves_f16(raw.w);
        v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y, v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
    }
};
struct WeightsBf16 {
    const uint16_t* w;
    QK_INLINE void load(uint64_t at, float (&v)[8]) const {
        const uint4 raw = *reinterpret_cast<const uint4*>(w + at);
        const float2 a = halves_bf16(raw.x), b = halves_bf16(raw.y), c = halves_bf16(raw.z), d = halves_bf16(raw.w);
        v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y, v[4] = c.x, v[5] = c.y, v[6] = d.x, v[7] = d.y;
    }
};
struct WeightsF32 {
    const uint16_t *wh, *wl;
    QK_INLINE void load(uint64_t at, float (&v)[8]) const {
        float low[8];
        WeightsBf16{wh}.load(at, v);
        WeightsBf16{wl}.load(at, low);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] += low[i];
    }
};

// x[from .. from + 8], zero from `cols` on.
QK_INLINE void load_x(const float* x, uint32_t from, uint32_t cols, float (&v)[8]) {
    if (cols % 4 == 0 && from + 8 <= cols) {
        const float4 a = *reinterpret_cast<const float4*>(x + from), b = *reinterpret_cast<const float4*>(x + from + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = from + i < cols ? x[from + i] : 0.0f;
    }
}

// ROWS is `rows`, or one more: then the last row is computed twice.
template <int ROWS, typename W>
QK_INLINE void gemv(const W& weights, const float* x, const float* bias, float* out, uint32_t rows, uint32_t n,
                    uint32_t cols, uint32_t stride, uint32_t block) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t first = (block * WARPS + threadIdx.x / 32) * OUTPUTS;
    if (first >= n) return;
    uint64_t at[OUTPUTS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) at[o] = static_cast<uint64_t>(first + o < n ? first + o : n - 1) * stride;

    float sum[OUTPUTS][ROWS] = {};
#pragma unroll(ROWS == 1 ? 2 : 1)
    for (uint32_t c = lane * 8; c < stride; c += 256) {
        float w[OUTPUTS][8];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) weights.load(at[o] + c, w[o]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float v[8];
            load_x(x + static_cast<uint64_t>(r < rows ? r : rows - 1) * cols, c, cols, v);
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[o][r] += w[o][i] * v[i];
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float total = qk_warp_sum(sum[o][r]);
            if (lane == 0 && first + o < n && r < rows)
                out[static_cast<uint64_t>(r) * n + first + o] = total + (bias != nullptr ? bias[first + o] : 0.0f);
        }
    }
}

template <typename W>
QK_INLINE void gemv_rows(const W& weights, const float* x, const float* bias, float* out, uint32_t rows, uint32_t n,
                         uint32_t cols, uint32_t stride) {
    const Slice s(rows);
    x += static_cast<uint64_t>(s.first) * cols;
    out += static_cast<uint64_t>(s.first) * n;
    if (s.rows == 1) gemv<1>(weights, x, bias, out, s.rows, n, cols, stride, s.block);
    else if (s.rows == 2) gemv<2>(weights, x, bias, out, s.rows, n, cols, stride, s.block);
    else gemv<4>(weights, x, bias, out, s.rows, n, cols, stride, s.block);
}

// Grid ceil(n / 8) * ceil(rows / 4), block 128, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(128) gemv_f16(
    const uint16_t* __restrict__ w, const float* __restrict__ x, const float* __restrict__ bias,
    float* __restrict__ out, uint32_t rows, uint32_t n, uint32_t cols, uint32_t stride) {
    gemv_rows(WeightsF16{w}, x, bias, out, rows, n, cols, stride);
}

// As gemv_f16: grid ceil(n / 8) * ceil(rows / 4), block 128.
extern "C" __global__ void __launch_bounds__(128) gemv_bf16(
    const uint16_t* __restrict__ w, const float* __restrict__ x, const float* __restrict__ bias,
    float* __restrict__ out, uint32_t rows, uint32_t n, uint32_t cols, uint32_t stride) {
    gemv_rows(WeightsBf16{w}, x, bias, out, rows, n, cols, stride);
}

// As gemv_f16: grid ceil(n / 8) * ceil(rows / 4), block 128.
extern "C" __global__ void __launch_bounds__(128) gemv_f32(
    const uint16_t* __restrict__ wh, const uint16_t* __restrict__ wl, const float* __restrict__ x,
    const float* __restrict__ bias, float* __restrict__ out, uint32_t rows, uint32_t n, uint32_t cols,
    uint32_t stride) {
    gemv_rows(WeightsF32{wh, wl}, x, bias, out, rows, n, cols, stride);
}
