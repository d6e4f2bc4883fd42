// Levels of a group of weights, and codes among them: `quantize::grid` for the device. Every rounding is named,
// because a fused multiply-add would choose other codes than the CPU.
#pragma once
#include "device.cuh"

// Warps of a block, each with a row of its own.
constexpr uint32_t WARPS = 8;
// Columns between two updates of all that follow, and columns of a group that are in shared memory at a time.
constexpr uint32_t BLOCK = 128;
// Columns of a block that one lane looks after: lane, lane + 32, ...
constexpr uint32_t OWN = BLOCK / 32;

// The value a lane has for its column number `slot`; an array that is indexed would leave the registers.
QK_INLINE float pick(const float (&values)[OWN], uint32_t slot) {
    const float low = slot == 0 ? values[0] : values[1];
    const float high = slot == 2 ? values[2] : values[3];
    return slot < 2 ? low : high;
}

struct Levels {
    float scale;
    float zero;
};

// What holds for all groups of a weight. `trials` are the candidates of the search, {shrink, sign, shift} each,
// in the order in which the CPU tries them, the plain range first.
struct Rule {
    const float* trials;
    uint32_t trial_count;
    float top;
    float middle;
    float lowest;
    bool sym;
};

// As `num::simd::round`: to the nearest integer, ties to even.
QK_INLINE float round_even(float x) { return __fsub_rn(__fadd_rn(x, 12582912.0f), 12582912.0f); }

// The code nearest to `w`.
QK_INLINE float code_of(float w, const Levels& levels, float top) {
    float steps = __fdiv_rn(w, levels.scale);
    steps = steps < -levels.zero ? -levels.zero : steps;
    const float most = __fsub_rn(top, levels.zero);
    return __fadd_rn(round_even(steps > most ? most : steps), levels.zero);
}

// What a code stands for.
QK_INLINE float value_of(float code, const Levels& levels) {
    return __fmul_rn(__fsub_rn(code, levels.zero), levels.scale);
}

// Rounds to f16, away from zero and infinity.
QK_INLINE float round_scale(float scale) {
    scale = __half2float(__float2half_rn(scale));
    if (scale == 0.0f) return 5.9604644775390625e-8f;
    return scale < -65504.0f ? -65504.0f : scale > 65504.0f ? 65504.0f : scale;
}

QK_INLINE Levels candidate(const Rule& rule, float base, float low, uint32_t trial) {
    const float shrink = rule.trials[3 * trial];
    const float sign = rule.trials[3 * trial + 1];
    const float shift = rule.trials[3 * trial + 2];
    Levels levels = {round_scale(__fmul_rn(base, __fmul_rn(shrink, sign))), rule.middle};
    if (!rule.sym) {
        const float steps = fminf(__fdiv_rn(__fmul_rn(-low, shrink), levels.scale), 300.0f);
        const float zero = __fadd_rn(round_even(steps), shift);
        levels.zero = zero < rule.lowest ? rule.lowest : zero > rule.top ? rule.top : zero;
    }
    return levels;
}

// Running weighted squared error of one candidate. Clamping as fminf and fmaxf do differs from the CPU's only
// for NaN, which the last subtraction brings back.
struct Trial {
    Levels levels;
    float inverse;
    float least;
    float most;
    float error;

    QK_INLINE void begin(const Levels& of, float top) {
        levels = of;
        inverse = __fdiv_rn(1.0f, of.scale);
        least = -of.zero;
        most = __fsub_rn(top, of.zero);
        error = 0.0f;
    }

    QK_INLINE void add(float w, float weight) {
        const float steps = round_even(fminf(fmaxf(__fmul_rn(w, inverse), least), most));
        const float e = __fsub_rn(__fmul_rn(steps, levels.scale), w);
        error = __fadd_rn(error, __fmul_rn(__fmul_rn(weight, e), e));
    }
};

// The step of the plain range from `low` to `high`.
QK_INLINE float base_of(const Rule& rule, float low, float high) {
    const float range = rule.sym ? __fmul_rn(2.0f, fmaxf(high, -low)) : __fsub_rn(high, low);
    float base = range == 0.0f ? 1.0f : __fdiv_rn(range, rule.top);
    // A raised zero point leaves fewer codes above it, which must reach as high.
    if (!rule.sym && rule.lowest > 0.0f) base = fmaxf(base, __fdiv_rn(high, __fsub_rn(rule.top, rule.lowest)));
    return base;
}

// Chooses the levels of the group whose columns are `members[from..to]`, or from..to themselves where `members`
// is null, of a row of weights in global memory; errors are weighted by `importance`. All lanes of a warp call it
// together, share out the candidates, and get the same answer: the least error, the first of equals. `stage` is
// [BLOCK] of shared memory for this warp.
QK_INLINE Levels choose_levels(const Rule& rule, const float* row, const uint32_t* members, const float* importance,
                               uint32_t from, uint32_t to, float2* stage) {
    const uint32_t lane = threadIdx.x % 32;
    float low = 0.0f;
    float high = 0.0f;
    for (uint32_t k = from + lane; k < to; k += 32) {
        const float w = row[members ? members[k] : k];
        low = w < low ? w : low;
        high = w > high ? w : high;
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
    }
    const float base = base_of(rule, low, high);
    const uint32_t last = rule.trial_count - 1;
    if (last == 0) return candidate(rule, base, low, 0);

    float least = INFINITY;
    uint32_t best = 0;
    float plain = 0.0f;
    for (uint32_t first = 0; first <= last; first += 64) {
        const uint32_t index[2] = {first + lane, first + lane + 32};
        Trial trial[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) trial[t].begin(candidate(rule, base, low, min(index[t], last)), rule.top);
        for (uint32_t chunk = from; chunk < to; chunk += BLOCK) {
            const uint32_t size = min(to - chunk, BLOCK);
            // What is staged stays for all candidates where the group is one chunk.
            if (first == 0 || to - from > BLOCK) {
                __syncwarp();
                for (uint32_t k = lane; k < size; k += 32) {
                    const uint32_t at = members ? members[chunk + k] : chunk + k;
                    stage[k].x = row[at];
                    stage[k].y = importance[at];
                }
                __syncwarp();
            }
            for (uint32_t k = 0; k < size; ++k) {
                const float2 column = stage[k];
                trial[0].add(column.x, column.y);
                trial[1].add(column.x, column.y);
            }
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            if (index[t] <= last && trial[t].error < least) {
                least = trial[t].error;
                best = index[t];
            }
        }
        if (first == 0) plain = trial[0].error;
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        const float other = __shfl_xor_sync(0xffffffffu, least, step);
        const uint32_t index = __shfl_xor_sync(0xffffffffu, best, step);
        if (other < least || (other == least && index < best)) {
            least = other;
            best = index;
        }
    }
    // Nothing is less than NaN: then the plain range stays, as on the CPU.
    plain = __shfl_sync(0xffffffffu, plain, 0);
    return candidate(rule, base, low, plain == plain ? best : 0);
}
