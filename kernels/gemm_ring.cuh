// How the large matrix products bring their operands to shared memory: tiles of 128 rows and units of 64 bytes a row,
// 32 numbers of 16 bits or 64 of 8, in a ring of stages.
#pragma once
#include "gemm_tile.cuh"

const int TILE = 128;                // rows and outputs of a block in the big form
const int PLANE = TILE * UNIT;       // 16-bit elements of one plane of a stage
const int BIG_THREADS = 256;

// Shared rows are 64 bytes, four chunks of 16; this placing lets ldmatrix read eight rows of one chunk, and
// cp.async write whole rows, without bank conflicts.
QK_INLINE uint32_t swizzled(uint32_t row, uint32_t chunk) { return row * UNIT + (chunk ^ (row / 2 % 4)) * 8; }

// One thread's part in copying a 128 x 32 tile: two chunks.
struct TileSource {
    uint64_t from[2];
    uint32_t to[2];
    QK_INLINE TileSource(uint32_t row0, uint32_t rows, uint32_t k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t chunk = threadIdx.x + i * BIG_THREADS, r = chunk / 4, c = chunk % 4;
            const uint32_t row = row0 + r < rows ? row0 + r : rows - 1;
            from[i] = static_cast<uint64_t>(row) * k + c * 8;
            to[i] = swizzled(r, c);
        }
    }
    QK_INLINE void copy(uint16_t* tile, const uint16_t* plane, uint32_t column) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) qk_cp_async16(tile + to[i], plane + from[i] + column);
    }
};
