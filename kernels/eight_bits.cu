// Numbers of 8 bits: inputs rounded to signed bytes or to E4M3, weights decoded to 16-bit planes, products of few
// rows with E4M3 weights, and the scales of outputs.
//
// x [rows][cols] f32. How inputs are rounded: 0 by the largest magnitude of a group, 1 by its range and a zero point
// (bytes only), 2 by the scale and zero point given. Nothing here may be fused: the CPU rounds every step.
#include "slices.cuh"

const float EPSILON = 1.1920929e-7f;  // of f32
const float LARGEST = 448.0f;         // of E4M3

// A scale of zero becomes a small one; what is not finite becomes NaN, which then is the result.
QK_INLINE float usable(float scale) {
    if (scale == 0.0f) return EPSILON;
    return fabsf(scale) < INFINITY ? scale : __int_as_float(0x7fffffff);
}

struct Range {
    float low, high;  // with zero among them
    float most;       // the largest magnitude; NaN where there is one
};

// The range of x[first..last) for the whole block of 256 threads.
QK_INLINE Range range_of(const float* x, uint32_t first, uint32_t last, float* scratch) {
    float low = 0.0f, high = 0.0f, bad = 0.0f;
    for (uint32_t c = first + threadIdx.x; c < last; c += blockDim.x) {
        low = fminf(low, x[c]);
        high = fmaxf(high, x[c]);
        if (x[c] != x[c]) bad = 1.0f;
    }
    low = -qk_block_max(-low, scratch);
    high = qk_block_max(high, scratch);
    bad = qk_block_max(bad, scratch);
    const float most = bad != 0.0f ? __int_as_float(0x7fffffff) : fmaxf(-low, high);
    return Range{low, high, most};
}

// Inputs as signed bytes q [rows][segments * padded], zeros from the end of a segment on; scales and zero points
// [rows][segments]. A group is `group` columns, in segments of `segment` columns each; all segments of a group have
// its scale. Grid (rows, ceil(cols / group)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) round_int8(const float* __restrict__ x, int8_t* __restrict__ q,
                                                             float* __restrict__ scales, int32_t* __restrict__ zeros,
                                                             uint32_t cols, uint32_t group, uint32_t segment,
                                                             uint32_t padded, int kind, float scale, int zero) {
    __shared__ float scratch[32];
    const uint32_t first = blockIdx.y * group, last = first + group < cols ? first + group : cols;
    const float* row = x + static_cast<uint64_t>(blockIdx.x) * cols;
    const Range range = range_of(row, first, last, scratch);
    if (kind == 1) {
        scale = usable(__fdiv_rn(__fsub_rn(range.high, range.low), 255.0f));
        const float exact = __fsub_rn(-128.0f, __fdiv_rn(range.low, scale));
        zero = scale == scale ? __float2int_rn(fminf(fmaxf(exact, -128.0f), 127.0f)) : 0;
        if (range.most != range.most) scale = range.most;
    } else if (kind == 0) {
        scale = usable(__fdiv_rn(range.most, 127.5f));
    } else if (range.most != range.most) {
        scale = range.most;
    }
    const uint32_t segments = (cols + segment - 1) / segment;
    for (uint32_t s = first / segment; s * segment < last; ++s) {
        const uint64_t at = static_cast<uint64_t>(blockIdx.x) * segments + s;
        if (threadIdx.x == 0) {
            scales[at] = scale;
            zeros[at] = zero;
        }
        for (uint32_t i = threadIdx.x; i < padded; i += blockDim.x) {
            const uint32_t c = s * segment + i;
            int value = 0;
            if (i < segment && c < last) {
                const float exact = __fadd_rn(__fdiv_rn(row[c], scale), static_cast<float>(zero));
                value = __float2int_rn(fminf(fmaxf(exact, -128.0f), 127.0f));
            }
            q[at * padded + i] = static_cast<int8_t>(value);
        }
    }
}

// The nearest E4M3 number, ties to even, at most 448; NaN stays.
QK_INLINE float nearest(float x) {
    const float magnitude = fminf(fabsf(x), LARGEST);
    // Steps are 2^-3 of the power of two below, but no smaller than 2^-9. Adding and taking away 1.5 * 2^23 steps
    // rounds to a whole number of them.
    const float power = __uint_as_float(__float_as_uint(fmaxf(magnitude, 1.0f / 64.0f)) & 0x7f800000u);
    const float shift = __fmul_rn(power, 1.5f * 8388608.0f / 8.0f);
    const float rounded = __fsub_rn(__fadd_rn(magnitude, shift), shift);
    return x != x ? x : copysignf(rounded, x);
}

// Inputs rounded to E4M3 numbers, as f32: times their scale, or by themselves where `scales` [rows] takes it (one
// group a row then). Grid (rows, ceil(cols / group)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) round_fp8(const float* __restrict__ x, float* __restrict__ out,
                                                            float* __restrict__ scales, uint32_t cols, uint32_t group,
                                                            int kind, float scale) {
    __shared__ float scratch[32];
    const uint32_t first = blockIdx.y * group, last = first + group < cols ? first + group : cols;
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * cols;
    if (kind != 2) scale = usable(__fdiv_rn(range_of(x + row, first, last, scratch).most, LARGEST));
    if (scales != nullptr && threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (uint32_t c = first + threadIdx.x; c < last; c += blockDim.x) {
        const float value = nearest(__fdiv_rn(x[row + c], scale));
        out[row + c] = scales != nullptr ? value : __fmul_rn(scale, value);
    }
}

// The value of an E4M3 code.
QK_INLINE float e4m3(uint32_t code) {
    const uint32_t magnitude = code & 127;
    // Without an exponent the mantissa counts steps of 2^-9: above 2^-6 they are as long.
    float value = magnitude < 8 ? __uint_as_float((magnitude << 20) + (121u << 23)) - 1.0f / 64.0f
                                : __uint_as_float((magnitude << 20) + (120u << 23));
    if (magnitude == 127) value = __int_as_float(0x7fffffff);
    return code & 128 ? -value : value;
}

// Signed bytes w [rows][stride] as f16 or bf16, which hold them exactly; columns from the end of a segment on are not
// columns of the planes [rows][plane_stride], whose own filling is zeros.
template <typename T>
QK_INLINE void decode_bytes(const int8_t* w, T* plane, uint32_t cols, uint32_t segment, uint32_t padded,
                            uint32_t stride, uint32_t plane_stride) {
    const uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= plane_stride) return;
    float value = 0.0f;
    if (c < cols) value = w[static_cast<uint64_t>(blockIdx.x) * stride + c / segment * padded + c % segment];
    plane[static_cast<uint64_t>(blockIdx.x) * plane_stride + c] = T(value);
}

// Grid (rows, ceil(plane_stride / 256)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256)
    decode_int8_f16(const int8_t* __restrict__ w, __half* __restrict__ plane, uint32_t cols, uint32_t segment,
                    uint32_t padded, uint32_t stride, uint32_t plane_stride) {
    decode_bytes(w, plane, cols, segment, padded, stride, plane_stride);
}

// As decode_int8_f16: grid (rows, ceil(plane_stride / 256)), block 256.
extern "C" __global__ void __launch_bounds__(256)
    decode_int8_bf16(const int8_t* __restrict__ w, __nv_bfloat16* __restrict__ plane, uint32_t cols, uint32_t segment,
                     uint32_t padded, uint32_t stride, uint32_t plane_stride) {
    decode_bytes(w, plane, cols, segment, padded, stride, plane_stride);
}

// E4M3 weights w [rows][cols] by themselves as f16 or bf16, which hold them exactly.
template <typename T>
QK_INLINE void decode_floats(const uint8_t* w, T* plane, uint32_t cols, uint32_t plane_stride) {
    const uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= plane_stride) return;
    const float value = c < cols ? e4m3(w[static_cast<uint64_t>(blockIdx.x) * cols + c]) : 0.0f;
    plane[static_cast<uint64_t>(blockIdx.x) * plane_stride + c] = T(value);
}

// Grid (rows, ceil(plane_stride / 256)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) decode_fp8_f16(const uint8_t* __restrict__ w,
                                                                 __half* __restrict__ plane, uint32_t cols,
                                                                 uint32_t plane_stride) {
    decode_floats(w, plane, cols, plane_stride);
}

// As decode_fp8_f16: grid (rows, ceil(plane_stride / 256)), block 256.
extern "C" __global__ void __launch_bounds__(256) decode_fp8_bf16(const uint8_t* __restrict__ w,
                                                                  __nv_bfloat16* __restrict__ plane, uint32_t cols,
                                                                  uint32_t plane_stride) {
    decode_floats(w, plane, cols, plane_stride);
}

// Rows from `first` on of E4M3 weights w (a pointer to that row), times their tiles' scales
// [ceil(n / tile_rows)][ceil(cols / tile_cols)], as the sum of two bf16 planes.
// Grid (rows, ceil(plane_stride / 256)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256)
    decode_fp8_planes(const uint8_t* __restrict__ w, const float* __restrict__ scales, __nv_bfloat16* __restrict__ high,
                      __nv_bfloat16* __restrict__ low, uint32_t first, uint32_t cols, uint32_t tile_rows,
                      uint32_t tile_cols, uint32_t plane_stride) {
    const uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= plane_stride) return;
    float value = 0.0f;
    if (c < cols) {
        const uint32_t across = (cols + tile_cols - 1) / tile_cols;
        const float scale = scales[static_cast<uint64_t>((first + blockIdx.x) / tile_rows) * across + c / tile_cols];
        value = __fmul_rn(scale, e4m3(w[static_cast<uint64_t>(blockIdx.x) * cols + c]));
    }
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * plane_stride + c;
    const __nv_bfloat16 top = __float2bfloat16(value);
    high[at] = top;
    low[at] = __float2bfloat16(value - __bfloat162float(top));
}

// out [rows][n] times the scales of rows and of outputs, plus bias; each of the three may be null.
// Grid (rows, ceil(n / 256)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256)
    scale_outputs(float* __restrict__ out, const float* __restrict__ of_rows, const float* __restrict__ of_outputs,
                  const float* __restrict__ bias, uint32_t n) {
    const uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= n) return;
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * n + c;
    float v = out[at];
    if (of_rows != nullptr) v = __fmul_rn(v, of_rows[blockIdx.x]);
    if (of_outputs != nullptr) v = __fmul_rn(v, of_outputs[c]);
    out[at] = bias != nullptr ? __fadd_rn(v, bias[c]) : v;
}

const int WARPS = 4;

// A warp's output for ROWS rows of x; with 16 codes at a time where rows and tiles are whole sixteens.
template <int ROWS>
QK_INLINE void gemv(const uint8_t* w, const float* scales, const float* x, const float* bias, float* out,
                    uint32_t rows, uint32_t n, uint32_t cols, uint32_t tile_rows, uint32_t tile_cols, uint32_t block) {
    const uint32_t lane = threadIdx.x % 32, o = block * WARPS + threadIdx.x / 32;
    if (o >= n) return;
    const uint8_t* codes = w + static_cast<uint64_t>(o) * cols;
    const float* of_row = scales + static_cast<uint64_t>(o / tile_rows) * ((cols + tile_cols - 1) / tile_cols);
    float sum[ROWS] = {};
    const bool aligned = cols % 16 == 0 && (tile_cols % 16 == 0 || tile_cols >= cols);
    if (aligned) {
        for (uint32_t c = lane * 16; c < cols; c += 512) {
            const uint4 raw = *reinterpret_cast<const uint4*>(codes + c);
            const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
            const float scale = of_row[c / tile_cols];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float value[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) value[i] = __fmul_rn(scale, e4m3(words[j] >> 8 * i & 255));
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const uint64_t row = static_cast<uint64_t>(r < rows ? r : rows - 1) * cols;
                    const float4 v = *reinterpret_cast<const float4*>(x + row + c + j * 4);
                    float part = __fmul_rn(value[0], v.x);   // not to be fused: two products could be
                    part += value[1] * v.y;
                    part += value[2] * v.z;
                    part += value[3] * v.w;
                    sum[r] += part;
                }
            }
        }
    } else {
        for (uint32_t c = lane; c < cols; c += 32) {
            const float value = __fmul_rn(of_row[c / tile_cols], e4m3(codes[c]));
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sum[r] += value * x[static_cast<uint64_t>(r < rows ? r : rows - 1) * cols + c];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float total = qk_warp_sum(sum[r]);
        if (lane == 0 && r < rows)
            out[static_cast<uint64_t>(r) * n + o] = total + (bias != nullptr ? bias[o] : 0.0f);
    }
}

// out = x w' + bias for few rows and E4M3 weights w [n][cols] with their tiles' scales, all in f32. A row's results do
// not depend on the other rows. Grid ceil(n / 4) * ceil(rows / 4), block 128, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(128)
    gemv_fp8(const uint8_t* __restrict__ w, const float* __restrict__ scales, const float* __restrict__ x,
             const float* __restrict__ bias, float* __restrict__ out, uint32_t rows, uint32_t n, uint32_t cols,
             uint32_t tile_rows, uint32_t tile_cols) {
    const Slice s(rows);
    x += static_cast<uint64_t>(s.first) * cols;
    out += static_cast<uint64_t>(s.first) * n;
    if (s.rows == 1) gemv<1>(w, scales, x, bias, out, s.rows, n, cols, tile_rows, tile_cols, s.block);
    else if (s.rows == 2) gemv<2>(w, scales, x, bias, out, s.rows, n, cols, tile_rows, tile_cols, s.block);
    else gemv<4>(w, scales, x, bias, out, s.rows, n, cols, tile_rows, tile_cols, s.block);
}
