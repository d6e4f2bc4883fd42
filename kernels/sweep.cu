// Coordinate descent on (w - q)' H (w - q), block by block (`quantize::pass` is the twin). One warp a row, as in
// gptq.cu; between blocks the caller brings the rest of the gradient up to date, from `moved` and H.
#include "gptq_grid.cuh"

// w - q, `out` [rows][n]. Grid (rows, ceil(n/256)), block 256.
extern "C" __global__ void residual(const float* w, const uint8_t* codes, const uint32_t* groups, const float* scales,
                                    const float* zeros, float* out, uint32_t n, uint32_t group_count) {
    const uint32_t i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * n + i;
    const uint64_t group = static_cast<uint64_t>(blockIdx.x) * group_count + groups[i];
    out[at] = __fsub_rn(w[at], value_of(codes[at], {scales[group], zeros[group]}));
}

// One block of a sweep over columns start..end (at most 128): the best scale for the codes of each group that
// lies in it whole, then the best code of each column. `whole_ends[i]` is the end of such a group that begins at
// column i, 0 elsewhere. `gradient` H (w - q) and `codes` are [rows][n]; inside the block the gradient follows.
// `moved` [rows][128] is by how much q has changed. Grid ceil(rows/8), block 256.
extern "C" __global__ void __launch_bounds__(256, 2)
    sweep_block(float* gradient, const float* h, const uint32_t* groups, const uint32_t* whole_ends, uint8_t* codes,
                float* scales, const float* zeros, float* moved, uint32_t rows, uint32_t n, uint32_t group_count,
                uint32_t start, uint32_t end, float top) {
    __shared__ float all_steps[WARPS][BLOCK];
    // Terms of the slope and of the curvature of a group's loss as its scale changes.
    __shared__ float2 all_terms[WARPS][BLOCK];
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t row = blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    float* steps = all_steps[warp];
    float2* terms = all_terms[warp];
    float* row_gradient = gradient + row * n;
    uint8_t* row_codes = codes + row * n;
    float* row_scales = scales + row * group_count;
    const float* row_zeros = zeros + row * group_count;

    float g[OWN];
    float code[OWN];
    float before[OWN];
    float inverse[OWN];
    float scale[OWN];
    float zero[OWN];
#pragma unroll
    for (uint32_t s = 0; s < OWN; ++s) {
        const uint32_t c = start + 32 * s + lane;
        const bool in = c < end;
        g[s] = in ? row_gradient[c] : 0.0f;
        code[s] = in ? row_codes[c] : 0.0f;
        scale[s] = in ? row_scales[groups[c]] : 1.0f;
        zero[s] = in ? row_zeros[groups[c]] : 0.0f;
        inverse[s] = __fdiv_rn(1.0f, in ? h[static_cast<uint64_t>(c) * n + c] : 1.0f);
        before[s] = value_of(code[s], {scale[s], zero[s]});
        if (in) steps[c - start] = __fsub_rn(code[s], zero[s]);
    }
    __syncwarp();

    for (uint32_t from = start; from < end; ++from) {
        const uint32_t to = whole_ends[from];
        if (!to) continue;
        const float old = row_scales[groups[from]];
        float product[OWN] = {};
        for (uint32_t j = from; j < to; ++j) {
#pragma unroll
            for (uint32_t s = 0; s < OWN; ++s) {
                const uint32_t c = start + 32 * s + lane;
                if (c >= from && c < to) {
                    const float term = __fmul_rn(h[static_cast<uint64_t>(j) * n + c], steps[j - start]);
                    product[s] = __fadd_rn(product[s], term);
                }
            }
        }
#pragma unroll
        for (uint32_t s = 0; s < OWN; ++s) {
            const uint32_t c = start + 32 * s + lane;
            if (c < from || c >= to) continue;
            const float step = steps[c - start];
            terms[c - start].x = __fmul_rn(step, g[s]);
            terms[c - start].y = __fmul_rn(step, product[s]);
        }
        __syncwarp();
        float slope = 0.0f;
        float curve = 0.0f;
        for (uint32_t j = from; j < to; ++j) {
            slope = __fadd_rn(slope, terms[j - start].x);
            curve = __fadd_rn(curve, terms[j - start].y);
        }
        const float fresh = round_scale(curve > 0.0f ? __fadd_rn(old, __fdiv_rn(slope, curve)) : old);
        const float delta = __fsub_rn(fresh, old);
        // The objective changes by delta² curve - 2 delta slope.
        const float cost = __fmul_rn(__fmul_rn(delta, delta), curve);
        if (cost < __fmul_rn(__fmul_rn(2.0f, delta), slope)) {
#pragma unroll
            for (uint32_t s = 0; s < OWN; ++s) {
                const uint32_t c = start + 32 * s + lane;
                if (c >= from && c < to) scale[s] = fresh;
            }
            for (uint32_t j = from; j < to; ++j) {
                const float change = __fmul_rn(delta, steps[j - start]);
#pragma unroll
                for (uint32_t s = 0; s < OWN; ++s) {
                    const uint32_t c = start + 32 * s + lane;
                    if (c < end) g[s] = __fsub_rn(g[s], __fmul_rn(change, h[static_cast<uint64_t>(j) * n + c]));
                }
            }
            if (lane == 0) row_scales[groups[from]] = fresh;
        }
    }

    for (uint32_t i = start; i < end; ++i) {
        const uint32_t owner = (i - start) % 32;
        // Each lane improves a column of its own; the one that is due counts.
        const uint32_t slot = (i - start) / 32;
        const Levels levels = {pick(scale, slot), pick(zero, slot)};
        const float old = value_of(pick(code, slot), levels);
        const float better = code_of(__fadd_rn(old, __fmul_rn(pick(g, slot), pick(inverse, slot))), levels, top);
        float change = __fsub_rn(value_of(better, levels), old);
#pragma unroll
        for (uint32_t s = 0; s < OWN; ++s) {
            if (s == slot && lane == owner) code[s] = better;
        }
        change = __shfl_sync(0xffffffffu, change, owner);
#pragma unroll
        for (uint32_t s = 0; s < OWN; ++s) {
            const uint32_t c = start + 32 * s + lane;
            if (c < end) g[s] = __fsub_rn(g[s], __fmul_rn(change, h[static_cast<uint64_t>(i) * n + c]));
        }
    }
#pragma unroll
    for (uint32_t s = 0; s < OWN; ++s) {
        const uint32_t c = start + 32 * s + lane;
        if (c >= end) continue;
        row_gradient[c] = g[s];
        row_codes[c] = static_cast<uint8_t>(static_cast<int>(code[s]));
        moved[row * BLOCK + (c - start)] = __fsub_rn(value_of(code[s], {scale[s], zero[s]}), before[s]);
    }
}

// loss[row] = half of residual · gradient. Grid rows, block 256.
extern "C" __global__ void __launch_bounds__(256)
    sweep_loss(const float* residual, const float* gradient, float* loss, uint32_t n) {
    __shared__ float scratch[32];
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * n;
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) sum += 0.5f * residual[row + i] * gradient[row + i];
    sum = qk_block_sum(sum, scratch);
    if (threadIdx.x == 0) loss[blockIdx.x] = sum;
}
