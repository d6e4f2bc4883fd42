// Attention for head dimensions up to 128 (even). A file for each size: the driver translates only what a model needs.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

// Prefill over f32 rows or the cache. Launch: grid (tasks, heads), block 128 (PREFILL_THREADS), dynamic shared memory
// 4 * (PREFILL_ROWS * 128 + PLANES * PREFILL_KEYS * 128 + 2 * PREFILL_KEYS) bytes; 64 rows, 32 keys, 2 planes for rows, else 1
// plane; the last term for i8 only.
extern "C" __global__ void __launch_bounds__(128) attention_rows_128(ROWS_PARAMETERS) { ROWS_BODY(128) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_f16_128(PAGES_PARAMETERS) { PAGES_BODY(F16, 128) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_e4m3_128(PAGES_PARAMETERS) { PAGES_BODY(E4m3, 128) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_e5m2_128(PAGES_PARAMETERS) { PAGES_BODY(E5m2, 128) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_i8_128(PAGES_PARAMETERS) { PAGES_BODY(I8, 128) }

// Decoding, to be followed by attention_combine. Launch: grid (kv_heads, splits, rows), block 128.
extern "C" __global__ void __launch_bounds__(128) attention_decode_f16_128(DECODE_PARAMETERS) { DECODE_BODY(F16, 128) }
extern "C" __global__ void __launch_bounds__(128) attention_decode_e4m3_128(DECODE_PARAMETERS) { DECODE_BODY(E4m3, 128) }
extern "C" __global__ void __launch_bounds__(128) attention_decode_e5m2_128(DECODE_PARAMETERS) { DECODE_BODY(E5m2, 128) }
extern "C" __global__ void __launch_bounds__(128) attention_decode_i8_128(DECODE_PARAMETERS) { DECODE_BODY(I8, 128) }
