// Attention of 16 queries of one head by one warp on tensor cores, a tile of keys at a time: scores, running
// softmax, weighted sum of values. Prefill feeds it from shared memory, decoding straight from the cache.
//
// Precision: f32 operands enter as two f16 planes, x = hi + lo, and products are hi*hi + lo*hi + hi*lo, about
// 22 bits. The small products have sums of their own, and the sums of a tile start from zero and are added in
// f32: a tensor core truncates as it adds, and short chains keep that small.
//
// Registers of mma m16n8k16, g = lane / 4, t = lane % 4: a has rows g and g+8, depths 2t, 2t+1 and 2t+8, 2t+9; b
// the same depths of column g; d rows g and g+8 of columns 2t, 2t+1. The order of depths and columns is ours to
// choose, so long as both operands agree. Scores: thread t takes depths 8t to 8t+7 of each 32, for two mma in
// a row, so that both operands are single 16-byte reads. Values: column g of the four mma of 32 dimensions is
// dimension 4g, 4g+1, 4g+2, 4g+3, so that b is one 16-byte read and d eight neighbours of a row.
#pragma once
#include "cache_types.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// What is done to raw scores, and what a query may see.
struct Rule {
    float scale;
    // Scores become cap * tanh(score / cap) if positive.
    float softcap;
    // Tokens that a query sees, itself included; 0: all before it.
    uint32_t window;
};

// First position that a query at `position` sees.
QK_INLINE uint32_t first_seen(uint32_t position, uint32_t window) {
    return window == 0 || position + 1 <= window ? 0 : position + 1 - window;
}

// Running softmax of rows g and g+8: `sum` is the thread's own part; out[i][j][2r + c] belongs to row g + 8r and
// dimension 32i + 8t + 4c + j.
template <int DIM>
struct Rows {
    float max[2];
    float sum[2];
    float out[DIM / 32][4][4];
};

template <int DIM>
QK_INLINE void clear(Rows<DIM>& rows) {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.max[r] = -INFINITY, rows.sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) rows.out[i][j][c] = 0.0f;
}

// Word of a shared tile of f16 rows where 32 dimensions begin. Rows are not padded; odd ones swap neighbouring
// pieces instead, so that eight lanes of two rows meet all banks.
template <int DIM>
QK_INLINE uint32_t piece(uint32_t row, uint32_t chunk) {
    return row * (DIM / 2) + 16 * (chunk ^ (row & 1));
}

QK_INLINE void read4(uint32_t (&words)[4], const uint32_t* p) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

// Brings `count` f32 rows of queries to shared memory as two planes of ROWS x DIM; what is beyond is zero. Row r
// is at q + r * stride.
template <int DIM, int ROWS, int THREADS>
QK_INLINE void stage_queries(uint32_t* queries, const float* q, uint64_t stride, uint32_t count, uint32_t dim) {
    for (uint32_t item = threadIdx.x; item < ROWS * DIM / 4; item += THREADS) {
        const uint32_t row = item / (DIM / 4), d = item % (DIM / 4) * 4;
        uint32_t raw[4], hi[2], lo[2];
        const int valid = row < count ? int(dim) - int(d) : 0;
        if (dim % 4 == 0)
            read_row<true, float, 4>(q + row * stride + d, valid, raw);
        else
            read_row<false, float, 4>(q + row * stride + d, valid, raw);
        F32::keys<4>(raw, hi, lo);
        uint32_t* to = queries + piece<DIM>(row, d / 32) + d % 32 / 2;
        *reinterpret_cast<uint2*>(to) = make_uint2(hi[0], hi[1]);
        *reinterpret_cast<uint2*>(to + ROWS * DIM / 2) = make_uint2(lo[0], lo[1]);
    }
}

// s[n] = scores of the warp's queries and keys 8n to 8n+7, not yet scaled. keys.read(n, chunk, hi, lo) gives the
// words of key 8n + g, dimensions 32 chunk + 8t on. `queries` is the warp's first row; the low plane is
// `plane` words on.
template <int DIM, int TILES, int PLANES, class Keys>
QK_INLINE void scores(float (&s)[TILES][4], const uint32_t* queries, uint32_t plane, const Keys& keys, uint32_t dim) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float small[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] = 0.0f, small[n][c] = 0.0f;
#pragma unroll 2
    for (int chunk = 0; chunk < DIM / 32; ++chunk) {
        if (chunk * 32 >= dim) break;
        uint32_t q[2][2][4];  // [plane][row g, g+8]
#pragma unroll
        for (int p = 0; p < 2; ++p)
#pragma unroll
            for (int r = 0; r < 2; ++r) read4(q[p][r], queries + p * plane + piece<DIM>(g + 8 * r, chunk) + 4 * t);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            uint32_t hi[4], lo[4];
            keys.read(n, chunk, hi, lo);
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const uint32_t b[2] = {hi[half], hi[half + 1]};
                const uint32_t a_hi[4] = {q[0][0][half], q[0][1][half], q[0][0][half + 1], q[0][1][half + 1]};
                const uint32_t a_lo[4] = {q[1][0][half], q[1][1][half], q[1][0][half + 1], q[1][1][half + 1]};
                qk_mma_f16(s[n], a_hi, b);
                qk_mma_f16(small[n], a_lo, b);
                if constexpr (PLANES == 2) {
                    const uint32_t b_lo[2] = {lo[half], lo[half + 1]};
                    qk_mma_f16(small[n], a_hi, b_lo);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] += small[n][c];
}

// Weights of a tile's values, in the registers of an mma's a: two planes for each 16 keys.
template <int TILES>
struct Weights {
    uint32_t hi[TILES / 2][4];
    uint32_t lo[TILES / 2][4];
    // What the sums so far of rows g and g+8 are to be multiplied by.
    float keep[2];
    // What the sums over this tile are to be multiplied by.
    float down[2];
};

// cap * tanh(x / cap), as 1 - 2 / (1 + e^(2x / cap)).
QK_INLINE float capped(float x, float cap) {
    return cap * (1.0f - __fdividef(2.0f, 1.0f + exp2f(x / cap * (2.0f * LOG2E))));
}

// Scales, masks and takes the tile's scores into the running softmax. The tile's keys are at positions `first_key`
// on, the queries of rows g and g+8 at `position` and `position + step`. keys.factor(i) is what key i's scores are
// multiplied by, values.factor(i) its weights, with TOKEN_SCALES and where a query sees it.
template <int DIM, int TILES, class Keys, class Values>
QK_INLINE void soften(Rows<DIM>& rows, Weights<TILES>& weights, float (&s)[TILES][4], const Keys& keys,
                      const Values& values, const Rule& rule, uint32_t first_key, uint32_t position, uint32_t step) {
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const uint32_t own = 8 * n + 2 * t + c % 2, key = first_key + own;
            const uint32_t query = position + c / 2 * step;
            float x = s[n][c] * rule.scale * keys.factor(own);
            if (rule.softcap > 0.0f) x = capped(x, rule.softcap);
            s[n][c] = key <= query && (rule.window == 0 || query - key < rule.window) ? x : -INFINITY;
        }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float best = rows.max[r];
#pragma unroll
        for (int n = 0; n < TILES; ++n) best = fmaxf(best, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
        best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
        // Nothing seen so far: any finite base makes weights of zero.
        const float base = best == -INFINITY ? 0.0f : best;
        weights.keep[r] = exp2f((rows.max[r] - base) * LOG2E);
        rows.max[r] = best;
        float sum = 0.0f, most = 0.0f;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float a = exp2f((s[n][2 * r] - base) * LOG2E), b = exp2f((s[n][2 * r + 1] - base) * LOG2E);
            sum += a + b;
            if constexpr (Values::TOKEN_SCALES) {
                const uint32_t own = 8 * n + 2 * t;
                s[n][2 * r] = s[n][2 * r] == -INFINITY ? 0.0f : a * values.factor(own);
                s[n][2 * r + 1] = s[n][2 * r + 1] == -INFINITY ? 0.0f : b * values.factor(own + 1);
                most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            } else {
                s[n][2 * r] = a, s[n][2 * r + 1] = b;
            }
        }
        Boost boost = {1.0f, 1.0f};
        if constexpr (Values::TOKEN_SCALES) {
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            boost = boost_for(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)));
        }
        weights.down[r] = boost.down;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int word = r + n % 2 * 2;
            split_pair(s[n][2 * r] * boost.up, s[n][2 * r + 1] * boost.up, weights.hi[n / 2][word],
                       weights.lo[n / 2][word]);
        }
        rows.sum[r] = rows.sum[r] * weights.keep[r] + sum;
    }
}

// Takes the tile's values into the weighted sums. values.read(k, i, hi, lo) gives, for w = 0 and 1, dimensions
// 32i + 4g to 32i + 4g + 3 of keys 16k + 8w + 2t and the next, one word a dimension. A NaN reaches all queries of the tile,
// also those that do not see it: zero times NaN is NaN.
template <int DIM, int TILES, int PLANES, class Values>
QK_INLINE void weigh(Rows<DIM>& rows, const Weights<TILES>& weights, const Values& values, uint32_t dim) {
#pragma unroll
    for (int i = 0; i < DIM / 32; ++i) {
        if (i * 32 >= dim) break;
        float part[4][4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) part[j][c] = 0.0f;
#pragma unroll
        for (int k = 0; k < TILES / 2; ++k) {
            uint32_t hi[2][4], lo[2][4];
            values.read(k, i, hi, lo);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t b[2] = {hi[0][j], hi[1][j]};
                qk_mma_f16(part[j], weights.lo[k], b);
                if constexpr (PLANES == 2) {
                    const uint32_t b_lo[2] = {lo[0][j], lo[1][j]};
                    qk_mma_f16(part[j], weights.hi[k], b_lo);
                }
                qk_mma_f16(part[j], weights.hi[k], b);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float old = rows.out[i][j][c] * weights.keep[c / 2];
                rows.out[i][j][c] = old + part[j][c] * weights.down[c / 2];
            }
    }
}

// Sum over a row: the four threads that share it add up.
QK_INLINE float row_sum(float sum) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Words of two keys' values, dimension by dimension, from words of one key each.
template <int WORDS>
QK_INLINE void interleave(uint32_t (&pairs)[2 * WORDS], const uint32_t (&even)[WORDS], const uint32_t (&odd)[WORDS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        pairs[2 * i] = __byte_perm(even[i], odd[i], 0x5410);
        pairs[2 * i + 1] = __byte_perm(even[i], odd[i], 0x7632);
    }
}
