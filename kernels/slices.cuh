// What the products of few rows share.
#pragma once
#include "device.cuh"

// Four of `rows` rows, or what is left, for a block of a kernel that takes no more: blocks of the same outputs follow one
// another.
struct Slice {
    uint32_t block, first, rows;
    QK_INLINE explicit Slice(uint32_t all) {
        const uint32_t slices = (all + 3) / 4;
        block = blockIdx.x / slices;
        first = blockIdx.x % slices * 4;
        rows = all - first < 4 ? all - first : 4;
    }
};
