// Attention for head dimensions up to 64 (even). A file for each size: the driver translates only what a model needs.
#include "attention_decode.cuh"
#include "attention_prefill.cuh"

// Prefill over f32 rows or the cache. Launch: grid (tasks, heads), block 128 (PREFILL_THREADS), dynamic shared memory
// 4 * (PREFILL_ROWS * 64 + PLANES * PREFILL_KEYS * 64 + 2 * PREFILL_KEYS) bytes; 64 rows, 32 keys, 2 planes for rows, else 1
// plane; the last term for i8 only.
extern "C" __global__ void __launch_bounds__(128) attention_rows_64(ROWS_PARAMETERS) { ROWS_BODY(64) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_f16_64(PAGES_PARAMETERS) { PAGES_BODY(F16, 64) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_e4m3_64(PAGES_PARAMETERS) { PAGES_BODY(E4m3, 64) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_e5m2_64(PAGES_PARAMETERS) { PAGES_BODY(E5m2, 64) }
extern "C" __global__ void __launch_bounds__(128) attention_pages_i8_64(PAGES_PARAMETERS) { PAGES_BODY(I8, 64) }

// Decoding, to be followed by attention_combine. Launch: grid (kv_heads, splits, rows), block 128.
extern "C" __global__ void __launch_bounds__(128) attention_decode_f16_64(DECODE_PARAMETERS) { DECODE_BODY(F16, 64) }
extern "C" __global__ void __launch_bounds__(128) attention_decode_e4m3_64(DECODE_PARAMETERS) { DECODE_BODY(E4m3, 64) }
extern "C" __global__ void __launch_bounds__(128) attention_decode_e5m2_64(DECODE_PARAMETERS) { DECODE_BODY(E5m2, 64) }
extern "C" __global__ void __launch_bounds__(128) attention_decode_i8_64(DECODE_PARAMETERS) { DECODE_BODY(I8, 64) }
