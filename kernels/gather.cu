// Between stored and ordered columns: the Hessian and the weights as the solver takes them, and the codes on
// their way back. `columns[i]` is the stored column that is taken i-th.
#include "device.cuh"

namespace {

// Entry of a symmetric matrix of which only the lower triangle is kept.
QK_INLINE double symmetric(const double* lower, uint32_t n, uint32_t a, uint32_t b) {
    const uint32_t row = a > b ? a : b;
    const uint32_t column = a > b ? b : a;
    return lower[static_cast<uint64_t>(row) * n + column];
}

// scale X'X at places i, j of the order, with `diagonal` in place of its own.
QK_INLINE double hessian(const double* gram, const uint32_t* columns, const double* diagonal, uint32_t n, double scale,
                         uint32_t i, uint32_t j) {
    return i == j ? diagonal[i] : symmetric(gram, n, columns[i], columns[j]) * scale;
}

// 16-bit floats travel as their bits.
QK_INLINE float widen_f16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
QK_INLINE float widen_bf16(uint16_t bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
QK_INLINE float widen_f32(float value) { return value; }

template <class T, float (*WIDEN)(T)>
QK_INLINE void gather(const T* weight, const uint32_t* columns, const uint8_t* dead, float* out, uint32_t n,
                      uint32_t stride) {
    const uint32_t i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const T* row = weight + static_cast<uint64_t>(blockIdx.x) * stride;
    out[static_cast<uint64_t>(blockIdx.x) * n + i] = dead[i] ? 0.0f : WIDEN(row[columns[i]]);
}

}  // namespace

// diagonal[i] = gram[i][i], stored order. Grid ceil(n/256), block 256.
extern "C" __global__ void gram_diagonal(const double* gram, double* diagonal, uint32_t n) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) diagonal[i] = gram[static_cast<uint64_t>(i) * n + i];
}

// Lower triangle of the damped Hessian with its order reversed, which is what the factorization wants; the
// rest of `out` is left alone. `diagonal` is in order. Grid (n, ceil(n/256)), block 256.
extern "C" __global__ void reversed_hessian(const double* gram, const uint32_t* columns, const double* diagonal,
                                            double* out, uint32_t n, double scale) {
    const uint32_t i = blockIdx.x;
    const uint32_t j = blockIdx.y * blockDim.x + threadIdx.x;
    if (j > i) return;
    out[static_cast<uint64_t>(i) * n + j] = hessian(gram, columns, diagonal, n, scale, n - 1 - i, n - 1 - j);
}

// The damped Hessian in order, whole, for coordinate descent. Grid (n, ceil(n/256)), block 256.
extern "C" __global__ void ordered_hessian(const double* gram, const uint32_t* columns, const double* diagonal,
                                           float* out, uint32_t n, double scale) {
    const uint32_t i = blockIdx.x;
    const uint32_t j = blockIdx.y * blockDim.x + threadIdx.x;
    if (j >= n) return;
    out[static_cast<uint64_t>(i) * n + j] = static_cast<float>(hessian(gram, columns, diagonal, n, scale, i, j));
}

// The drift in order, scaled. Grid (n, ceil(n/256)), block 256.
extern "C" __global__ void ordered_drift(const float* drift, const uint32_t* columns, float* out, uint32_t n,
                                         float scale) {
    const uint32_t i = blockIdx.x;
    const uint32_t j = blockIdx.y * blockDim.x + threadIdx.x;
    if (j >= n) return;
    out[static_cast<uint64_t>(i) * n + j] =
        drift[static_cast<uint64_t>(columns[i]) * n + columns[j]] * scale;
}

// Weights of one linear in order, `out` [rows][n]; the stored rows start `stride` elements apart. `dead` is in
// order too: those columns become zero. Grid (rows, ceil(n/256)), block 256.
extern "C" __global__ void gather_f16(const uint16_t* weight, const uint32_t* columns, const uint8_t* dead,
                                      float* out, uint32_t n, uint32_t stride) {
    gather<uint16_t, widen_f16>(weight, columns, dead, out, n, stride);
}

extern "C" __global__ void gather_bf16(const uint16_t* weight, const uint32_t* columns, const uint8_t* dead,
                                       float* out, uint32_t n, uint32_t stride) {
    gather<uint16_t, widen_bf16>(weight, columns, dead, out, n, stride);
}

extern "C" __global__ void gather_f32(const float* weight, const uint32_t* columns, const uint8_t* dead, float* out,
                                      uint32_t n, uint32_t stride) {
    gather<float, widen_f32>(weight, columns, dead, out, n, stride);
}

// Codes back to stored columns, both [rows][n]. Grid (rows, ceil(n/256)), block 256.
extern "C" __global__ void scatter_codes(const uint8_t* codes, const uint32_t* columns, uint8_t* out, uint32_t n) {
    const uint32_t i = blockIdx.y * blockDim.x + threadIdx.x;
    const uint64_t row = static_cast<uint64_t>(blockIdx.x) * n;
    if (i < n) out[row + columns[i]] = codes[row + i];
}
