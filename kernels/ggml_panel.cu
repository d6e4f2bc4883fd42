// Products with a weight that is decoded a panel of rows at a time.
#include "device.cuh"

// out[r][first + c] = part[r][c] + bias[first + c]: a panel's outputs [rows][width] to their place in [rows][n]; bias
// may be null. Grid (rows, ceil(width / 256)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) ggml_place(const float* __restrict__ part,
                                                             const float* __restrict__ bias, float* __restrict__ out,
                                                             uint32_t width, uint32_t first, uint32_t n) {
    const uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= width) return;
    const float v = part[static_cast<uint64_t>(blockIdx.x) * width + c];
    out[static_cast<uint64_t>(blockIdx.x) * n + first + c] = v + (bias != nullptr ? bias[first + c] : 0.0f);
}
