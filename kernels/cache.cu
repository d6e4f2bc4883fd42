// Writes new keys and values into the paged cache.
#include "cache_types.cuh"

// Round to nearest; saturates at the largest f16, NaN stays.
QK_INLINE uint16_t encode_f16(float x) {
    const __half h = __float2half_rn(f16_range(x));
    return *reinterpret_cast<const uint16_t*>(&h);
}

// Round to nearest, saturating at 448.
QK_INLINE uint8_t encode_e4m3(float x) {
    const __nv_fp8_e4m3 code(x);
    return *reinterpret_cast<const uint8_t*>(&code);
}

// Round to nearest, saturating at 57344.
QK_INLINE uint8_t encode_e5m2(float x) {
    const __nv_fp8_e5m2 code(x);
    return *reinterpret_cast<const uint8_t*>(&code);
}

// One row of one head by one warp; `scale` becomes what a stored 1 stands for: `fixed`, or where that is 0 what the row
// needs. It becomes NaN where the row has a NaN, or an infinity that `fixed` does not cut off.
QK_INLINE void append_i8(const float* x, int8_t* codes, float* scale, uint32_t dim, float fixed) {
    const bool settled = fixed > 0.0f;
    float largest = 0.0f;
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) {
        // fmaxf would pass over NaN.
        const float size = x[i] != x[i] ? INFINITY : settled ? 0.0f : fabsf(x[i]);
        largest = fmaxf(largest, size);
    }
    largest = qk_warp_max(largest);
    const float broken = __int_as_float(0x7fffffff);
    const float step = largest == INFINITY ? broken : settled ? fixed : largest / 127.0f;
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) {
        const float code = step > 0.0f ? rintf(x[i] / step) : 0.0f;
        codes[i] = static_cast<int8_t>(fminf(fmaxf(code, -127.0f), 127.0f));
    }
    if (threadIdx.x % 32 == 0) *scale = step;
}

// What `cache_append_*` takes: k and v f32 [rows][kv_heads * dim]; of each row its sequence and its position there;
// scales [kv_heads] that are settled, none for f16 and optional for i8, whose scales of rows go to key_scales and
// value_scales.
#define APPEND_PARAMETERS                                                                                        \
    const float *k, const float *v, void *keys, void *values, float *key_scales, float *value_scales,           \
        const uint32_t *tables, uint32_t table_stride, const uint32_t *sequence, const uint32_t *positions,     \
        uint32_t kv_heads, uint32_t dim, const float *fixed_keys, const float *fixed_values

// Where the block's row and head stand in k or v, and in the pool.
struct Row {
    const float* x;
    uint64_t at;
};

QK_INLINE Row own_row(const float* k, const float* v, const uint32_t* tables, uint32_t table_stride,
                      const uint32_t* sequence, const uint32_t* positions, uint32_t kv_heads, uint32_t dim) {
    const uint32_t row = blockIdx.x, head = blockIdx.y;
    const uint32_t* table = tables + uint64_t(sequence[row]) * table_stride;
    const float* x = threadIdx.x < 32 ? k : v;
    return {x + (uint64_t(row) * kv_heads + head) * dim, page_row(table, positions[row], kv_heads, head)};
}

// Launch of all four: grid (rows, kv_heads), block 64: the first warp writes the key, the second the value.

extern "C" __global__ void cache_append_f16(APPEND_PARAMETERS) {
    const Row row = own_row(k, v, tables, table_stride, sequence, positions, kv_heads, dim);
    uint16_t* pool = static_cast<uint16_t*>(threadIdx.x < 32 ? keys : values) + row.at * dim;
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) pool[i] = encode_f16(row.x[i]);
}

extern "C" __global__ void cache_append_e4m3(APPEND_PARAMETERS) {
    const Row row = own_row(k, v, tables, table_stride, sequence, positions, kv_heads, dim);
    uint8_t* pool = static_cast<uint8_t*>(threadIdx.x < 32 ? keys : values) + row.at * dim;
    const float scale = (threadIdx.x < 32 ? fixed_keys : fixed_values)[blockIdx.y];
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) pool[i] = encode_e4m3(row.x[i] / scale);
}

extern "C" __global__ void cache_append_e5m2(APPEND_PARAMETERS) {
    const Row row = own_row(k, v, tables, table_stride, sequence, positions, kv_heads, dim);
    uint8_t* pool = static_cast<uint8_t*>(threadIdx.x < 32 ? keys : values) + row.at * dim;
    const float scale = (threadIdx.x < 32 ? fixed_keys : fixed_values)[blockIdx.y];
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) pool[i] = encode_e5m2(row.x[i] / scale);
}

extern "C" __global__ void cache_append_i8(APPEND_PARAMETERS) {
    const Row row = own_row(k, v, tables, table_stride, sequence, positions, kv_heads, dim);
    int8_t* pool = static_cast<int8_t*>(threadIdx.x < 32 ? keys : values) + row.at * dim;
    const float* fixed = threadIdx.x < 32 ? fixed_keys : fixed_values;
    float* scale = (threadIdx.x < 32 ? key_scales : value_scales) + row.at;
    append_i8(row.x, pool, scale, dim, fixed ? fixed[blockIdx.y] : 0.0f);
}
