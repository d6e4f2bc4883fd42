// Decoding attention: one query over the paged cache of its sequence, the context split over blocks.
#pragma once
#include "attention_tile.cuh"

constexpr int DECODE_WARPS = 4;

template <class Element, int N>
QK_INLINE void read_page(const Element* p, uint32_t dim, uint32_t d, uint32_t (&raw)[N * sizeof(Element) / 4]) {
    if (dim % 8 == 0)
        read_row<true, Element, N>(p + d, int(dim) - int(d), raw);
    else
        read_row<false, Element, N>(p + d, int(dim) - int(d), raw);
}

// One page of one head, read where it stands: a warp meets each byte once. The scores of slots that the query
// does not see, or that were never written, are masked.
template <class F>
struct PageKeys {
    const typename F::Element* keys;
    const float* scales;
    uint32_t dim;
    QK_INLINE void read(int n, int chunk, uint32_t (&hi)[4], uint32_t (&lo)[4]) const {
        typedef typename F::Element Element;
        const uint32_t g = threadIdx.x % 32 / 4, d = 32 * chunk + threadIdx.x % 4 * 8;
        uint32_t raw[2 * sizeof(Element)];
        read_page<Element, 8>(keys + (8 * n + g) * dim, dim, d, raw);
        F::template keys<8>(raw, hi, lo);
    }
    QK_INLINE float factor(uint32_t key) const { return F::TOKEN_SCALES ? scales[key] : 1.0f; }
};

// Zero times what the query does not see might be NaN: only `count` slots from `first` on are read.
template <class F>
struct PageValues {
    static constexpr bool TOKEN_SCALES = F::TOKEN_SCALES;
    const typename F::Element* values;
    const float* scales;
    uint32_t dim, first, count;
    QK_INLINE void read(int, int i, uint32_t (&hi)[2][4], uint32_t (&)[2][4]) const {
        typedef typename F::Element Element;
        const uint32_t t = threadIdx.x % 4, d = 32 * i + threadIdx.x % 32 / 4 * 4;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            uint32_t one[2][2], none[2];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const uint32_t slot = 8 * w + 2 * t + odd;
                uint32_t raw[sizeof(Element)];
                read_page<Element, 4>(values + slot * dim, slot - first < count ? dim : 0, d, raw);
                F::template values<4>(raw, one[odd], none);
            }
            interleave<2>(hi[w], one[0], one[1]);
        }
    }
    QK_INLINE float factor(uint32_t key) const { return scales[key]; }
};

// Adds up the warps' rows, in their order, in `sums` (16 x DIM), and leaves max and sum of each row in `totals`.
template <int DIM>
QK_INLINE void merge(float* sums, float (*maxima)[16], float (*totals)[16], const Rows<DIM>& state) {
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = row_sum(state.sum[r]);
        if (t == 0) maxima[warp][g + 8 * r] = state.max[r], totals[warp][g + 8 * r] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint32_t row = g + 8 * r;
        float best = maxima[0][row];
        for (int w = 1; w < DECODE_WARPS; ++w) best = fmaxf(best, maxima[w][row]);
        factor[r] = state.max[r] == -INFINITY ? 0.0f : exp2f((state.max[r] - best) * LOG2E);
    }
    for (int w = 0; w < DECODE_WARPS; ++w) {
        if (warp == w)
#pragma unroll
            for (int i = 0; i < DIM / 32; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        float* to = sums + (g + c / 2 * 8) * DIM + 32 * i + 8 * t + 4 * (c % 2) + j;
                        const float x = state.out[i][j][c] * factor[c / 2];
                        *to = w == 0 ? x : *to + x;
                    }
        __syncthreads();
    }
}

// The block's pages for all heads of its kv head, 16 at a time.
template <class F, int DIM>
QK_INLINE void decode(const float* q, const void* keys, const void* values, const float* key_scales,
                      const float* value_scales, const uint32_t* table, uint32_t position, float* partial,
                      uint32_t heads, uint32_t kv_heads, uint32_t dim, const Rule& rule, float unit) {
    typedef typename F::Element Element;
    __shared__ __align__(16) uint32_t queries[16 * DIM];
    __shared__ float sums[16 * DIM];
    __shared__ float maxima[DECODE_WARPS][16], totals[DECODE_WARPS][16];

    const uint32_t kv_head = blockIdx.x, splits = gridDim.y, split = blockIdx.y, query = blockIdx.z;
    const uint32_t group = heads / kv_heads, warp = threadIdx.x / 32;
    const uint32_t from = first_seen(position, rule.window) / PAGE, pages = position / PAGE + 1 - from;
    const uint32_t share = (pages + splits - 1) / splits;
    const uint32_t begin = from + min(split * share, pages), end = from + min((split + 1) * share, pages);

    for (uint32_t done = 0; done < group; done += 16) {
        const uint32_t count = min(group - done, 16u), head = kv_head * group + done;
        float* to = partial + ((uint64_t(query) * heads + head) * splits + split) * (dim + 2);
        const uint64_t next = uint64_t(splits) * (dim + 2);
        if (begin == end) {
            if (threadIdx.x < count) to[threadIdx.x * next] = -INFINITY, to[threadIdx.x * next + 1] = 0.0f;
            continue;
        }
        stage_queries<DIM, 16, DECODE_WARPS * 32>(queries, q + (uint64_t(query) * heads + head) * dim, dim, count,
                                                  dim);
        __syncthreads();
        Rows<DIM> state;
        clear(state);
        for (uint32_t page = begin + warp; page < end; page += DECODE_WARPS) {
            const uint64_t row = (uint64_t(table[page]) * kv_heads + kv_head) * PAGE;
            const uint32_t first_key = page * PAGE;
            const PageKeys<F> page_keys{static_cast<const Element*>(keys) + row * dim, key_scales + row, dim};
            const uint32_t first = max(first_seen(position, rule.window), first_key) - first_key;
            const PageValues<F> page_values{static_cast<const Element*>(values) + row * dim, value_scales + row, dim,
                                            first, position + 1 - first_key - first};
            float s[2][4];
            Weights<2> weights;
            scores<DIM, 2, 1>(s, queries, 16 * DIM / 2, page_keys, dim);
            soften<DIM, 2>(state, weights, s, page_keys, page_values, rule, first_key, position, 0);
            weigh<DIM, 2, 1>(state, weights, page_values, dim);
        }
        merge<DIM>(sums, maxima, totals, state);
        for (uint32_t item = threadIdx.x; item < count * dim; item += DECODE_WARPS * 32) {
            const uint32_t row = item / dim, d = item % dim;
            to[row * next + 2 + d] = sums[row * DIM + d] * unit;
        }
        if (threadIdx.x < count) {
            const uint32_t row = threadIdx.x;
            float best = maxima[0][row], total = 0.0f;
            for (int w = 1; w < DECODE_WARPS; ++w) best = fmaxf(best, maxima[w][row]);
            for (int w = 0; w < DECODE_WARPS; ++w)
                if (totals[w][row] != 0.0f) total += totals[w][row] * exp2f((maxima[w][row] - best) * LOG2E);
            // Among scores that are NaN there is no largest, and attention_combine passes over splits without one.
            to[row * next] = total == total ? best : INFINITY, to[row * next + 1] = total;
        }
        __syncthreads();
    }
}

// Parameters and body of the kernels. q f32 [rows][heads * dim]; row r is of sequence[r], a row of `tables`, and stands
// at positions[r] (its token is in the cache). partial f32 [rows][heads][splits][2 + dim]: largest score, sum of weights,
// weighted sum of values; of a split without pages only the first two. Nothing depends on the other rows. How many splits there are is the host's choice
// and may not depend on positions, so that a captured launch stays right; how they share the pages is worked out here.
#define DECODE_PARAMETERS                                                                                         \
    const float *q, const void *keys, const void *values, const float *key_scales, const float *value_scales,     \
        const uint32_t *tables, uint32_t table_stride, const uint32_t *sequence, const uint32_t *positions,       \
        float *partial, uint32_t heads, uint32_t kv_heads, uint32_t dim, float scale, uint32_t window,            \
        float softcap

#define DECODE_BODY(F, D)                                                                                         \
    decode<F, D>(q, keys, values, key_scales, value_scales,                                                       \
                 tables + uint64_t(sequence[blockIdx.z]) * table_stride, positions[blockIdx.z], partial, heads,   \
                 kv_heads, dim, Rule{scale * F::key_unit(key_scales, blockIdx.x), softcap, window},               \
                 F::value_unit(value_scales, blockIdx.x));
