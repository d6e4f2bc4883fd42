// Prefill attention: blocks of consecutive queries of one head, over f32 rows or over the paged cache.
#pragma once
#include "attention_tile.cuh"

// Keys and values by row: `row(position)` times `dim` is where a token's own begin.
template <class F>
struct RowSource {
    typedef F Format;
    const float* keys;
    const float* values;
    uint32_t first;
    uint32_t kv_heads, head;
    QK_INLINE uint64_t row(uint32_t position) const { return uint64_t(first + position) * kv_heads + head; }
    QK_INLINE float key_scale(uint64_t) const { return 1.0f; }
    QK_INLINE float value_scale(uint64_t) const { return 1.0f; }
};

template <class F>
struct PageSource {
    typedef F Format;
    const typename F::Element* keys;
    const typename F::Element* values;
    const float* key_scales;
    const float* value_scales;
    const uint32_t* table;
    uint32_t kv_heads, head;
    QK_INLINE uint64_t row(uint32_t position) const { return page_row(table, position, kv_heads, head); }
    QK_INLINE float key_scale(uint64_t row) const { return key_scales[row]; }
    QK_INLINE float value_scale(uint64_t row) const { return value_scales[row]; }
};

// Queries of a block; a warp has 16 of them.
constexpr int PREFILL_ROWS = 64, PREFILL_THREADS = 128;

// Keys of a tile. All of a block then fits into 96 KB.
template <int DIM>
constexpr int PREFILL_KEYS = DIM > 128 ? 16 : 32;

// Word of a shared tile of values, pairs of keys by dimensions, where 4 dimensions begin. Four rows side by side meet
// all banks.
template <int DIM>
QK_INLINE uint32_t quad(uint32_t pair, uint32_t d) {
    return pair * DIM + (d ^ (pair % 4 * 8));
}

template <class F, int DIM>
struct SharedKeys {
    const uint32_t* words;
    const float* scales;
    QK_INLINE void read(int n, int chunk, uint32_t (&hi)[4], uint32_t (&lo)[4]) const {
        const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uint32_t* from = words + piece<DIM>(8 * n + g, chunk) + 4 * t;
        read4(hi, from);
        if constexpr (F::PLANES == 2) read4(lo, from + PREFILL_KEYS<DIM> * DIM / 2);
    }
    QK_INLINE float factor(uint32_t key) const { return F::TOKEN_SCALES ? scales[key] : 1.0f; }
};

template <class F, int DIM>
struct SharedValues {
    static constexpr bool TOKEN_SCALES = F::TOKEN_SCALES;
    const uint32_t* words;
    const float* scales;
    QK_INLINE void read(int k, int i, uint32_t (&hi)[2][4], uint32_t (&lo)[2][4]) const {
        const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const uint32_t* from = words + quad<DIM>(8 * k + 4 * w + t, 32 * i + 4 * g);
            read4(hi[w], from);
            if constexpr (F::PLANES == 2) read4(lo[w], from + PREFILL_KEYS<DIM> / 2 * DIM);
        }
    }
    QK_INLINE float factor(uint32_t key) const { return scales[key]; }
};

// Keys `first_key` on to shared memory, zeros after `last`.
template <bool WIDE, int DIM, class Source>
QK_INLINE void stage_keys(uint32_t* words, const Source& source, uint32_t first_key, uint32_t last, uint32_t dim) {
    typedef typename Source::Format F;
    typedef typename F::Element Element;
    constexpr int KEYS = PREFILL_KEYS<DIM>;
#pragma unroll WIDE ? 4 : 1
    for (uint32_t item = threadIdx.x; item < KEYS * DIM / 4; item += PREFILL_THREADS) {
        const uint32_t key = item / (DIM / 4), d = item % (DIM / 4) * 4;
        const bool there = first_key + key <= last && d < dim;
        const uint64_t row = there ? source.row(first_key + key) : 0;
        uint32_t raw[sizeof(Element)], hi[2], lo[2];
        read_row<WIDE, Element, 4>(source.keys + row * dim + d, there ? int(dim - d) : 0, raw);
        F::template keys<4>(raw, hi, lo);
        uint32_t* to = words + piece<DIM>(key, d / 32) + d % 32 / 2;
        *reinterpret_cast<uint2*>(to) = make_uint2(hi[0], hi[1]);
        if constexpr (F::PLANES == 2) *reinterpret_cast<uint2*>(to + KEYS * DIM / 2) = make_uint2(lo[0], lo[1]);
    }
}

// Likewise the values: pairs of keys, one word a dimension.
template <bool WIDE, int DIM, class Source>
QK_INLINE void stage_values(uint32_t* words, const Source& source, uint32_t first_key, uint32_t last, uint32_t dim) {
    typedef typename Source::Format F;
    typedef typename F::Element Element;
    constexpr int PAIRS = PREFILL_KEYS<DIM> / 2;
#pragma unroll WIDE ? 2 : 1
    for (uint32_t item = threadIdx.x; item < PAIRS * DIM / 4; item += PREFILL_THREADS) {
        const uint32_t pair = item / (DIM / 4), d = item % (DIM / 4) * 4;
        uint32_t hi[2][2], lo[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t position = first_key + 2 * pair + i;
            const bool there = position <= last && d < dim;
            const uint64_t row = there ? source.row(position) : 0;
            uint32_t raw[sizeof(Element)];
            read_row<WIDE, Element, 4>(source.values + row * dim + d, there ? int(dim - d) : 0, raw);
            F::template values<4>(raw, hi[i], lo[i]);
        }
        uint32_t pairs[4];
        uint32_t* to = words + quad<DIM>(pair, d);
        interleave<2>(pairs, hi[0], hi[1]);
        *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        if constexpr (F::PLANES == 2) {
            interleave<2>(pairs, lo[0], lo[1]);
            *reinterpret_cast<uint4*>(to + PAIRS * DIM) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

template <bool WIDE, int DIM, class Source>
QK_INLINE void stage(uint32_t* keys, uint32_t* values, float* key_scales, float* value_scales, const Source& source,
                     uint32_t first_key, uint32_t last, uint32_t dim) {
    stage_keys<WIDE, DIM>(keys, source, first_key, last, dim);
    stage_values<WIDE, DIM>(values, source, first_key, last, dim);
    if (Source::Format::TOKEN_SCALES && threadIdx.x < PREFILL_KEYS<DIM>) {
        const bool there = first_key + threadIdx.x <= last;
        const uint64_t row = there ? source.row(first_key + threadIdx.x) : 0;
        key_scales[threadIdx.x] = there ? source.key_scale(row) : 0.0f;
        value_scales[threadIdx.x] = there ? source.value_scale(row) : 0.0f;
    }
}

// Rows of the warp divided by their sums, to `out`, the block's first row and head; `rows` of them are real.
template <int DIM>
QK_INLINE void write_rows(float* out, const Rows<DIM>& state, float unit, uint64_t stride, uint32_t rows,
                          uint32_t dim) {
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float factor = unit / row_sum(state.sum[r]);
        const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
        if (row >= rows) continue;
#pragma unroll
        for (int i = 0; i < DIM / 32; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const uint32_t d = 32 * i + 8 * t + 4 * c;
                float* to = out + row * stride + d;
                float x[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) x[j] = state.out[i][j][2 * r + c] * factor;
                if (dim % 4 == 0) {
                    if (d < dim) *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
                } else {
                    if (d < dim) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
                    if (d + 2 < dim) *reinterpret_cast<float2*>(to + 2) = make_float2(x[2], x[3]);
                }
            }
    }
}

// One task (first query row, rows, position of the first) of one head.
template <int DIM, class Source>
QK_INLINE void prefill(const float* q, const Source& source, float* out, uint4 task, uint32_t heads, uint32_t dim,
                       const Rule& rule, float unit) {
    typedef typename Source::Format F;
    constexpr int KEYS = PREFILL_KEYS<DIM>, TILES = KEYS / 8;
    QK_DYN_SMEM(uint32_t, queries);
    uint32_t* key_words = queries + PREFILL_ROWS * DIM;
    uint32_t* value_words = key_words + F::PLANES * KEYS * DIM / 2;
    float* key_scales = reinterpret_cast<float*>(value_words + F::PLANES * KEYS / 2 * DIM);
    float* value_scales = key_scales + KEYS;

    const uint32_t warp_row = threadIdx.x / 32 * 16;
    const uint32_t position = task.z + warp_row, last = task.z + task.y - 1;
    const uint64_t stride = uint64_t(heads) * dim, at = task.x * stride + blockIdx.y * dim;
    stage_queries<DIM, PREFILL_ROWS, PREFILL_THREADS>(queries, q + at, stride, task.y, dim);

    Rows<DIM> state;
    clear(state);
    for (uint32_t key = first_seen(task.z, rule.window) / KEYS * KEYS; key <= last; key += KEYS) {
        __syncthreads();
        if (dim % 8 == 0)
            stage<true, DIM>(key_words, value_words, key_scales, value_scales, source, key, last, dim);
        else
            stage<false, DIM>(key_words, value_words, key_scales, value_scales, source, key, last, dim);
        __syncthreads();
        // Warps without rows, and tiles after a warp's last query, have nothing to do.
        if (warp_row >= task.y || key > position + 15) continue;
        const SharedKeys<F, DIM> keys{key_words, key_scales};
        const SharedValues<F, DIM> values{value_words, value_scales};
        float s[TILES][4];
        Weights<TILES> weights;
        scores<DIM, TILES, F::PLANES>(s, queries + warp_row * (DIM / 2), PREFILL_ROWS * DIM / 2, keys, dim);
        soften<DIM, TILES>(state, weights, s, keys, values, rule, key, position + threadIdx.x % 32 / 4, 8);
        weigh<DIM, TILES, F::PLANES>(state, weights, values, dim);
    }
    write_rows<DIM>(out + at, state, unit, stride, task.y, dim);
}

// Parameters and bodies of the kernels. q, out f32 [rows][heads * dim]. A task is: first row of q, rows (at most
// PREFILL_ROWS), position of the first, and what the kernel says.

// The fourth word of a task is the row of k and v (f32 [rows][kv_heads * dim]) that is position 0 of its sequence.
#define ROWS_PARAMETERS                                                                                           \
    const float *q, const float *k, const float *v, float *out, const uint4 *tasks, uint32_t heads,               \
        uint32_t kv_heads, uint32_t dim, float scale, uint32_t window, float softcap

#define ROWS_BODY(D)                                                                                              \
    const uint4 task = tasks[blockIdx.x];                                                                         \
    const RowSource<F32> source = {k, v, task.w, kv_heads, blockIdx.y / (heads / kv_heads)};                      \
    prefill<D>(q, source, out, task, heads, dim, Rule{scale, softcap, window}, F32::value_unit(nullptr, 0));

// The fourth word of a task is its sequence: row of `tables`. The cache holds the queries' own tokens already.
#define PAGES_PARAMETERS                                                                                          \
    const float *q, const void *keys, const void *values, const float *key_scales, const float *value_scales,     \
        const uint32_t *tables, uint32_t table_stride, float *out, const uint4 *tasks, uint32_t heads,            \
        uint32_t kv_heads, uint32_t dim, float scale, uint32_t window, float softcap

#define PAGES_BODY(F, D)                                                                                          \
    const uint4 task = tasks[blockIdx.x];                                                                         \
    const uint32_t kv_head = blockIdx.y / (heads / kv_heads);                                                     \
    const PageSource<F> source = {static_cast<const F::Element*>(keys), static_cast<const F::Element*>(values),   \
                                  key_scales, value_scales, tables + uint64_t(task.w) * table_stride, kv_heads,   \
                                  kv_head};                                                                       \
    prefill<D>(q, source, out, task, heads, dim,                                                                  \
               Rule{scale * F::key_unit(key_scales, kv_head), softcap, window},                                   \
               F::value_unit(value_scales, kv_head));
