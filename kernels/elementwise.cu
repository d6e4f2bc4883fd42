// Operations on rows and single values, as src/backend/cpu/elementwise.rs defines them, and the splitting of
// f32 rows into 16-bit planes for the tensor cores. Every grid here is a suggestion: kernels loop over what a
// grid does not cover, except where it says "exactly". None uses dynamic shared memory.
#include "device.cuh"

// ---- Widening and rounding. 16-bit floats travel as their bits.

struct F16 {
    static QK_INLINE float widen(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    static QK_INLINE uint16_t narrow(float v) { return __half_as_ushort(__float2half_rn(v)); }
};

struct Bf16 {
    static QK_INLINE float widen(uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
    static QK_INLINE uint16_t narrow(float v) { return __bfloat16_as_ushort(__float2bfloat16_rn(v)); }
};

// ---- Embedding

template <class Format>
QK_INLINE void embed(const uint16_t* table, const uint32_t* ids, float* out, float scale, uint32_t cols,
                     uint32_t stride) {
    const uint16_t* from = table + static_cast<uint64_t>(ids[blockIdx.x]) * stride;
    float* to = out + static_cast<uint64_t>(blockIdx.x) * cols;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) to[i] = Format::widen(from[i]) * scale;
}

// Rows `ids` of a table whose rows lie `stride` elements apart, times `scale`.
// Launch: grid exactly rows, block 128, no dynamic shared memory.
extern "C" __global__ void embed_f16(const uint16_t* __restrict__ table, const uint32_t* __restrict__ ids,
                                     float* __restrict__ out, float scale, uint32_t cols, uint32_t stride) {
    embed<F16>(table, ids, out, scale, cols, stride);
}

// Launch: as embed_f16 (grid exactly rows, block 128).
extern "C" __global__ void embed_bf16(const uint16_t* __restrict__ table, const uint32_t* __restrict__ ids,
                                      float* __restrict__ out, float scale, uint32_t cols, uint32_t stride) {
    embed<Bf16>(table, ids, out, scale, cols, stride);
}

// The table is the sum of two bf16 planes.
// Launch: as embed_f16 (grid exactly rows, block 128).
extern "C" __global__ void embed_planes(const uint16_t* __restrict__ high, const uint16_t* __restrict__ low,
                                        const uint32_t* __restrict__ ids, float* __restrict__ out, float scale,
                                        uint32_t cols, uint32_t stride) {
    const uint64_t from = static_cast<uint64_t>(ids[blockIdx.x]) * stride;
    float* to = out + static_cast<uint64_t>(blockIdx.x) * cols;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) {
        to[i] = (Bf16::widen(high[from + i]) + Bf16::widen(low[from + i])) * scale;
    }
}

// ---- Norms

// The row's normal factor from each thread's part of the sum of squares, then out = x * factor * w. Every
// thread reads and writes the same columns in both passes, so `out` may be `x`.
QK_INLINE void scale_row(const float* x, const float* w, float* out, float squares, float eps, uint32_t cols) {
    __shared__ float scratch[32];
    const float mean = qk_block_sum(squares, scratch) / static_cast<float>(cols);
    const float factor = 1.0f / sqrtf(mean + eps);
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) out[i] = x[i] * factor * w[i];
}

// x / sqrt(mean(x²) + eps) * w, row by row. `out` may be `x`.
// Launch: grid exactly rows, block a multiple of 32 up to 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm(const float* x, const float* __restrict__ w, float* out, float eps, uint32_t cols) {
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * cols;
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) squares += x[row + i] * x[row + i];
    scale_row(x + row, w, out + row, squares, eps, cols);
}

// x += y, then the norm of x into `out`, which is not `x`.
// Launch: grid exactly rows, block a multiple of 32 up to 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256)
    add_rms_norm(float* x, const float* __restrict__ y, const float* __restrict__ w, float* __restrict__ out, float eps,
                 uint32_t cols) {
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * cols;
    float squares = 0.0f;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) {
        const float sum = x[row + i] + y[row + i];
        x[row + i] = sum;
        squares += sum * sum;
    }
    scale_row(x + row, w, out + row, squares, eps, cols);
}

// ---- Single values

// This thread's first value and the distance to its next: neighbours go to neighbouring threads.
QK_INLINE uint64_t first_value() { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
QK_INLINE uint64_t next_value() { return static_cast<uint64_t>(gridDim.x) * blockDim.x; }

// x += y.
// Launch: grid up to n / 256, block 256, no dynamic shared memory.
extern "C" __global__ void add(float* __restrict__ x, const float* __restrict__ y, uint64_t n) {
    for (uint64_t i = first_value(); i < n; i += next_value()) x[i] += y[i];
}

// out = a - b; `out` may be either.
// Launch: grid up to n / 256, block 256, no dynamic shared memory.
extern "C" __global__ void subtract(const float* a, const float* b, float* out, uint64_t n) {
    for (uint64_t i = first_value(); i < n; i += next_value()) out[i] = a[i] - b[i];
}

// Adds `bias` to each of the n / cols rows.
// Launch: grid (up to rows, up to cols / 256), block 256, no dynamic shared memory.
extern "C" __global__ void add_row(float* __restrict__ x, const float* __restrict__ bias, uint64_t n, uint32_t cols) {
    const uint64_t step = static_cast<uint64_t>(gridDim.x) * cols;
    for (uint64_t row = static_cast<uint64_t>(blockIdx.x) * cols; row < n; row += step) {
        for (uint32_t i = blockIdx.y * blockDim.x + threadIdx.x; i < cols; i += gridDim.y * blockDim.x) {
            x[row + i] += bias[i];
        }
    }
}

QK_INLINE float silu(float x) { return x / (1.0f + expf(-x)); }

// x/2 (1 + tanh(t)) = x / (1 + e^(-2t)) with t = sqrt(2/pi) (x + 0.044715 x³)
QK_INLINE float gelu_tanh(float x) {
    const float t = 0.7978846f * (x + 0.044715f * x * x * x);
    return x / (1.0f + expf(-2.0f * t));
}

// activation(gate) * up; kind 0 is silu, 1 the tanh form of gelu. `out` may be `gate` or `up`.
// Launch: grid up to n / 256, block 256, no dynamic shared memory.
extern "C" __global__ void gated(const float* gate, const float* up, float* out, uint64_t n, int kind) {
    for (uint64_t i = first_value(); i < n; i += next_value()) {
        const float g = gate[i];
        out[i] = (kind == 0 ? silu(g) : gelu_tanh(g)) * up[i];
    }
}

// cap * tanh(x / cap).
// Launch: grid up to n / 256, block 256, no dynamic shared memory.
extern "C" __global__ void softcap(float* x, uint64_t n, float cap) {
    for (uint64_t i = first_value(); i < n; i += next_value()) x[i] = cap * tanhf(x[i] / cap);
}

// ---- Rotary embedding

// Turns channels i and half + i of each head by the angle of the row's position, for i < half; cos and sin
// are [positions][half].
// Launch: grid (up to rows, up to heads * half / 128), block 128, no dynamic shared memory.
extern "C" __global__ void rope(float* __restrict__ x, const uint32_t* __restrict__ positions,
                                const float* __restrict__ cos, const float* __restrict__ sin, uint32_t rows,
                                uint32_t heads, uint32_t head_dim, uint32_t half) {
    const uint32_t pairs = heads * half;
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
        float* values = x + static_cast<uint64_t>(row) * heads * head_dim;
        const uint64_t angles = static_cast<uint64_t>(positions[row]) * half;
        for (uint32_t pair = blockIdx.y * blockDim.x + threadIdx.x; pair < pairs; pair += gridDim.y * blockDim.x) {
            const uint32_t head = pair / half, i = pair % half;
            float* low = values + head * head_dim + i;
            float* high = low + half;
            const float a = *low, b = *high, c = cos[angles + i], s = sin[angles + i];
            *low = a * c - b * s;
            *high = b * c + a * s;
        }
    }
}

// ---- Logits

// Negative log-likelihood (nats) of each row's target under the softmax of the row; NaN if the row holds one.
// Launch: grid exactly rows, block a multiple of 32 up to 1024 (256), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(1024)
    nll(const float* __restrict__ logits, const uint32_t* __restrict__ targets, float* __restrict__ out,
        uint32_t vocab) {
    __shared__ float scratch[32];
    const float* row = logits + static_cast<uint64_t>(blockIdx.x) * vocab;
    float best = -INFINITY;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) best = fmaxf(best, row[i]);
    best = qk_block_max(best, scratch);
    // The maximum passes over NaN, the sum does not.
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) sum += expf(row[i] - best);
    sum = qk_block_sum(sum, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = logf(sum) + best - row[targets[blockIdx.x]];
}

// A candidate for the largest logit.
struct Best {
    float value;
    uint32_t token;
};

QK_INLINE Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

QK_INLINE Best best_of_warp(Best best) {
    for (int step = 16; step > 0; step >>= 1) {
        const float value = __shfl_xor_sync(0xffffffffu, best.value, step);
        const uint32_t token = __shfl_xor_sync(0xffffffffu, best.token, step);
        best = better(best, Best{value, token});
    }
    return best;
}

// The lowest index of each row's largest logit; 0xffffffff where a logit is NaN or +inf, or none is finite.
// Launch: grid exactly rows, block a multiple of 32 up to 1024 (256), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(1024)
    argmax(const float* __restrict__ logits, uint32_t* __restrict__ token, uint32_t vocab) {
    const uint32_t none = 0xffffffffu;
    __shared__ float values[32];
    __shared__ uint32_t tokens[32];
    const float* row = logits + static_cast<uint64_t>(blockIdx.x) * vocab;
    Best best{-INFINITY, none};
    bool broken = false;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        const float v = row[i];
        if (v > best.value) best = Best{v, i};
        broken |= !(v < INFINITY);
    }
    // +inf without a token wins over everything that is sound.
    if (broken) best = Best{INFINITY, none};
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = best.value;
        tokens[threadIdx.x / 32] = best.token;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) best = better(best, Best{values[warp], tokens[warp]});
        token[blockIdx.x] = best.token;
    }
}

// ---- Planes for the tensor cores

// One row: hi = round(x) and lo = round(x - hi), x times `up`, two columns at a time so that stores are 32 bits wide;
// this thread's pairs are `pair` and then each `step` further. The columns that `gather` or the padding leave empty
// become zeros.
template <class Format>
QK_INLINE void split(const float* x, uint32_t* hi, uint32_t* lo, const int32_t* gather, float up, uint32_t cols,
                     uint32_t padded, uint32_t pair, uint32_t step) {
    for (; pair < padded / 2; pair += step) {
        uint32_t highs = 0, lows = 0;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t at = 2 * pair + i;
            const int32_t source = gather ? gather[at] : at < cols ? static_cast<int32_t>(at) : -1;
            const float v = source < 0 ? 0.0f : x[source] * up;
            const uint16_t high = Format::narrow(v);
            highs |= static_cast<uint32_t>(high) << (16 * i);
            lows |= static_cast<uint32_t>(Format::narrow(v - Format::widen(high))) << (16 * i);
        }
        hi[pair] = highs;
        if (lo) lo[pair] = lows;
    }
}

// The f16 planes hi and lo (may be null) of x [rows][cols], each [rows][padded], `padded` even. Column j comes
// from column gather[j], or is zero if that is -1; without `gather` from column j, or is zero beyond `cols`.
//
// f16 ends at 65504 and at 6e-8, and activations do not. So each row has a unit of its own, in of_rows [rows]: the power
// of two for which its largest finite number is between 2^14 and 2^15. Where the maximum is below 2^15, numbers that were
// normal in f16 keep their bits; above, the smallest lose some.
// Launch: grid exactly rows, block a multiple of 32 up to 1024 (256), no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(1024)
    split_f16(const float* __restrict__ x, uint16_t* __restrict__ hi, uint16_t* __restrict__ lo,
              float* __restrict__ of_rows, const int32_t* __restrict__ gather, uint32_t cols, uint32_t padded) {
    __shared__ float scratch[32];
    const float* from = x + static_cast<uint64_t>(blockIdx.x) * cols;
    float most = 0.0f;
    for (uint32_t i = threadIdx.x; i < cols; i += blockDim.x) {
        const float size = fabsf(from[i]);
        if (size < INFINITY) most = fmaxf(most, size);
    }
    most = qk_block_max(most, scratch);
    // 127 is the exponent of 1; that of the factor stays below 2^127, so that its inverse is a normal number.
    const uint32_t exponent = most == 0.0f ? 127 + 14 : umax(__float_as_uint(most) >> 23, 15);
    const float up = __uint_as_float((2 * 127 + 14 - exponent) << 23);
    if (threadIdx.x == 0) of_rows[blockIdx.x] = __uint_as_float((exponent - 14) << 23);
    const uint64_t to = static_cast<uint64_t>(blockIdx.x) * (padded / 2);
    uint32_t* low = lo ? reinterpret_cast<uint32_t*>(lo) + to : nullptr;
    split<F16>(from, reinterpret_cast<uint32_t*>(hi) + to, low, gather, up, cols, padded, threadIdx.x, blockDim.x);
}

// The same in bf16, which has the range of f32: no units. Two planes also hold f32 weights.
// Launch: grid (up to rows, up to padded / 256), block 128, no dynamic shared memory.
extern "C" __global__ void split_bf16(const float* __restrict__ x, uint16_t* __restrict__ hi, uint16_t* __restrict__ lo,
                                      const int32_t* __restrict__ gather, uint32_t rows, uint32_t cols,
                                      uint32_t padded) {
    for (uint32_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint64_t to = static_cast<uint64_t>(row) * (padded / 2);
        uint32_t* low = lo ? reinterpret_cast<uint32_t*>(lo) + to : nullptr;
        split<Bf16>(x + static_cast<uint64_t>(row) * cols, reinterpret_cast<uint32_t*>(hi) + to, low, gather, 1.0f,
                    cols, padded, blockIdx.y * blockDim.x + threadIdx.x, gridDim.y * blockDim.x);
    }
}

// ---- Statistics

// The sum of squares of each column, in f64: eight rows side by side, then their sums in order.
// Launch: grid exactly ceil(cols / 32), block 256, no dynamic shared memory.
extern "C" __global__ void column_squares(const float* __restrict__ x, double* __restrict__ sums, uint32_t rows,
                                          uint32_t cols) {
    __shared__ double parts[8][32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = blockIdx.x * 32 + lane;
    double sum = 0.0;
    if (col < cols) {
        for (uint64_t row = warp; row < rows; row += 8) {
            const double value = x[row * cols + col];
            sum += value * value;
        }
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= cols) return;
    for (int i = 1; i < 8; ++i) sum += parts[i][lane];
    sums[col] = sum;
}

// The sum of magnitudes of each column, in f64: eight rows side by side, then their sums in order.
// Launch: grid exactly ceil(cols / 32), block 256, no dynamic shared memory.
extern "C" __global__ void column_abs_sum(const float* __restrict__ x, double* __restrict__ sums, uint32_t rows,
                                          uint32_t cols) {
    __shared__ double parts[8][32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = blockIdx.x * 32 + lane;
    double sum = 0.0;
    if (col < cols) {
        for (uint64_t row = warp; row < rows; row += 8) sum += static_cast<double>(fabsf(x[row * cols + col]));
    }
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= cols) return;
    for (int i = 1; i < 8; ++i) sum += parts[i][lane];
    sums[col] = sum;
}

// The largest magnitude of each column; NaN where there is one.
// Launch: grid exactly ceil(cols / 32), block 256, no dynamic shared memory.
extern "C" __global__ void column_abs_max(const float* __restrict__ x, float* __restrict__ most, uint32_t rows,
                                          uint32_t cols) {
    __shared__ uint32_t parts[8][32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = blockIdx.x * 32 + lane;
    // Without their sign, floats are in the order of their bits, NaN above all.
    uint32_t best = 0;
    if (col < cols) {
        for (uint64_t row = warp; row < rows; row += 8) {
            best = umax(best, __float_as_uint(x[row * cols + col]) & 0x7fffffffu);
        }
    }
    parts[warp][lane] = best;
    __syncthreads();
    if (warp != 0 || col >= cols) return;
    for (int i = 1; i < 8; ++i) best = umax(best, parts[i][lane]);
    most[col] = __uint_as_float(best);
}
