// Products with 2-bit GPTQ integers. One file a width, since a driver translates a file as a whole.
#include "gemm_quant.cuh"
#include "gemv_quant.cuh"

// Activations in two bf16 planes, which have the range of f32, or rounded to f16.
// Grid (ceil(rows / 128), ceil(n / 128)), block 256, dynamic shared memory 65536 bytes. Blocks along x share codes.
extern "C" __global__ void __launch_bounds__(256) gemm_q2_bf16_x2(QUANT_ARGUMENTS) {
    quant_big<Bf16, 2, 2>(QUANT_PASSED);
}

// Grid (ceil(rows / 16), ceil(n / 64)), block 256, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(256) gemm_q2_bf16_x2_small(QUANT_ARGUMENTS) {
    quant_small<Bf16, 2, 2>(QUANT_PASSED);
}

// As gemm_q2_bf16_x2: grid (ceil(rows / 128), ceil(n / 128)), block 256; dynamic shared memory 32768 bytes.
extern "C" __global__ void __launch_bounds__(256) gemm_q2_f16_x1(QUANT_ARGUMENTS) {
    quant_big<F16, 2, 1>(QUANT_PASSED);
}

// As gemm_q2_bf16_x2_small: grid (ceil(rows / 16), ceil(n / 64)), block 256.
extern "C" __global__ void __launch_bounds__(256) gemm_q2_f16_x1_small(QUANT_ARGUMENTS) {
    quant_small<F16, 2, 1>(QUANT_PASSED);
}

// Few rows. Grid ceil(n / 32) * ceil(rows / 4), block 512, no dynamic shared memory.
extern "C" __global__ void __launch_bounds__(512) gemv_q2(GEMV_QUANT_ARGUMENTS) {
    gemv_quant<2>(q, scales, zeros, x, gather, bias, out, rows, n, cols, units, units_per_group);
}
