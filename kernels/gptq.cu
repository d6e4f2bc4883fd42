// GPTQ's pass over a block of columns, and the grids of static groups (`quantize::pass` is the twin). One warp
// a row: a lane looks after up to four columns, whose weights stay in its registers. All per-column arrays are
// in the order in which columns are taken.
#include "gptq_grid.cuh"

// Levels of every group from the weights as they are. The columns of group g are members[offsets[g]] up to
// members[offsets[g + 1]], ascending. `w` [rows][n]; `scales`, `zeros` [rows][groups]; `importance` [n] is
// what a column weighs in the search. Grid (ceil(rows/8), groups or fewer), block 256.
extern "C" __global__ void __launch_bounds__(256, 2)
    original_grids(const float* w, const uint32_t* members, const uint32_t* offsets, const float* importance,
                   const float* trials, uint32_t trial_count, float top, float middle, float lowest, uint32_t sym,
                   float* scales, float* zeros, uint32_t rows, uint32_t n, uint32_t groups) {
    __shared__ float2 stage[WARPS][BLOCK];
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t row = blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const Rule rule = {trials, trial_count, top, middle, lowest, sym != 0};
    for (uint32_t g = blockIdx.y; g < groups; g += gridDim.y) {
        // The group before may still be read.
        __syncwarp();
        const Levels levels = choose_levels(rule, w + static_cast<uint64_t>(row) * n, members, importance, offsets[g],
                                            offsets[g + 1], stage[warp]);
        if (threadIdx.x % 32 == 0) {
            scales[static_cast<uint64_t>(row) * groups + g] = levels.scale;
            zeros[static_cast<uint64_t>(row) * groups + g] = levels.zero;
        }
    }
}

// Codes of columns start..end (at most 128), one after another; what each rounding breaks is mended in the rest
// of the block. The columns after `end` are the caller's to mend, from `errors` [rows][128] and U.
// `run_ends[i]` is the end of the run of one group that begins at column i, 0 where none begins: there the levels
// are chosen from the weights as mended by then. With static groups it is null and all levels stand already.
// `w`, `codes` [rows][n]; `u` [n][n]; `scales`, `zeros` [rows][group_count]; `loss` [rows] is added to. The
// block's own part of `w` is scratch afterwards. Grid ceil(rows/8), block 256.
extern "C" __global__ void __launch_bounds__(256, 2)
    gptq_block(float* w, const float* u, const uint32_t* groups, const uint32_t* run_ends, const float* importance,
               const float* trials, uint32_t trial_count, float top, float middle, float lowest, uint32_t sym,
               uint8_t* codes, float* errors, float* scales, float* zeros, float* loss, uint32_t rows, uint32_t n,
               uint32_t group_count, uint32_t start, uint32_t end) {
    __shared__ float2 stage[WARPS][BLOCK];
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t row = blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const Rule rule = {trials, trial_count, top, middle, lowest, sym != 0};
    float* row_w = w + row * n;
    float* row_scales = scales + row * group_count;
    float* row_zeros = zeros + row * group_count;

    float x[OWN];
    float diagonal[OWN];
    float scale[OWN];
    float zero[OWN];
    float above[OWN];
#pragma unroll
    for (uint32_t s = 0; s < OWN; ++s) {
        const uint32_t c = start + 32 * s + lane;
        const bool in = c < end;
        x[s] = in ? row_w[c] : 0.0f;
        diagonal[s] = in ? u[static_cast<uint64_t>(c) * n + c] : 1.0f;
        // Of a group that begins in this block, what is read here is replaced in time.
        scale[s] = in ? row_scales[groups[c]] : 1.0f;
        zero[s] = in ? row_zeros[groups[c]] : 0.0f;
        above[s] = in ? u[static_cast<uint64_t>(start) * n + c] : 0.0f;
    }
    float sum = loss[row];
    for (uint32_t i = start; i < end; ++i) {
        const uint32_t run_end = run_ends ? run_ends[i] : 0;
        if (run_end) {
            // A group that reaches beyond the block begins with it, so the weights there are up to date too.
#pragma unroll
            for (uint32_t s = 0; s < OWN; ++s) {
                const uint32_t c = start + 32 * s + lane;
                if (c < end) row_w[c] = x[s];
            }
            __syncwarp();
            const Levels levels = choose_levels(rule, row_w, nullptr, importance, i, run_end, stage[warp]);
#pragma unroll
            for (uint32_t s = 0; s < OWN; ++s) {
                const uint32_t c = start + 32 * s + lane;
                if (c < i || c >= run_end) continue;
                scale[s] = levels.scale;
                zero[s] = levels.zero;
            }
            if (lane == 0) {
                row_scales[groups[i]] = levels.scale;
                row_zeros[groups[i]] = levels.zero;
            }
            __syncwarp();
        }
        // The next row of U is on its way while this column is worked on.
        float next[OWN];
#pragma unroll
        for (uint32_t s = 0; s < OWN; ++s) {
            const uint32_t c = start + 32 * s + lane;
            next[s] = c < end && i + 1 < end ? u[static_cast<uint64_t>(i + 1) * n + c] : 0.0f;
        }
        // Each lane rounds a column of its own; the one that is due counts.
        const uint32_t slot = (i - start) / 32;
        const uint32_t owner = (i - start) % 32;
        const float mine = pick(x, slot);
        const Levels levels = {pick(scale, slot), pick(zero, slot)};
        const float code = code_of(mine, levels, top);
        float error = __fdiv_rn(__fsub_rn(mine, value_of(code, levels)), pick(diagonal, slot));
        if (lane == owner) {
            codes[row * n + i] = static_cast<uint8_t>(static_cast<int>(code));
            errors[row * BLOCK + (i - start)] = error;
        }
        error = __shfl_sync(0xffffffffu, error, owner);
        sum = __fadd_rn(sum, __fmul_rn(__fmul_rn(0.5f, error), error));
#pragma unroll
        for (uint32_t s = 0; s < OWN; ++s) {
            if (start + 32 * s + lane > i) x[s] = __fsub_rn(x[s], __fmul_rn(error, above[s]));
            above[s] = next[s];
        }
    }
    if (lane == 0) loss[row] = sum;
}
