// The splits of decoding attention become one.
#include "device.cuh"

constexpr uint32_t MOST_SPLITS = 64;

// out f32 [rows][heads * dim] from partial f32 [rows][heads][splits][2 + dim] (attention_decode.cuh), added in
// the order of the splits, of which there are at most 64. Launch: grid (heads, rows), block 128.
extern "C" __global__ void __launch_bounds__(128) attention_combine(const float* partial, float* out, uint32_t heads,
                                                                    uint32_t dim, uint32_t splits) {
    __shared__ float maxima[MOST_SPLITS], sums[MOST_SPLITS], weights[MOST_SPLITS];
    const uint64_t row = uint64_t(blockIdx.y) * heads + blockIdx.x;
    const uint32_t next = dim + 2, own = threadIdx.x;
    const float* part = partial + row * splits * next;
    if (own < splits) maxima[own] = part[own * next], sums[own] = part[own * next + 1];
    __syncthreads();
    if (own < splits) {
        float best = maxima[0];
        for (uint32_t i = 1; i < splits; ++i) best = fmaxf(best, maxima[i]);
        // A split without pages wrote no values.
        weights[own] = maxima[own] == -INFINITY ? 0.0f : exp2f((maxima[own] - best) * 1.4426950408889634f);
    }
    __syncthreads();
    float total = 0.0f;
    for (uint32_t i = 0; i < splits; ++i) total += weights[i] * sums[i];
    for (uint32_t d = own; d < dim; d += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint32_t i = 0; i < splits; ++i) {
            sum += maxima[i] == -INFINITY ? 0.0f : weights[i] * part[i * next + 2 + d];
        }
        out[row * dim + d] = sum / total;
    }
}
