// What every kernel file includes: fixed-width types, the 16- and 8-bit float headers, reductions, and the
// instructions that CUDA C++ has no name for. The only file with inline assembly. Each such function has a
// twin for the CPU emulator (QK_EMULATOR), whose header declares the emu_ functions.
#pragma once

#ifdef QK_EMULATOR
#include <cmath>
#include <cstdint>
#else
// NVRTC brings neither <cstdint> nor <cmath>.
#define INFINITY __int_as_float(0x7f800000)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#endif

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define QK_INLINE __device__ __forceinline__

// The block's dynamic shared memory as `T* name`; at most once in a kernel.
#ifdef QK_EMULATOR
#define QK_DYN_SMEM(T, name) T* name = static_cast<T*>(emu_dyn_smem())
#else
#define QK_DYN_SMEM(T, name)                                    \
    extern __shared__ __align__(128) unsigned char qk_dyn_smem[]; \
    T* name = reinterpret_cast<T*>(qk_dyn_smem)
#endif

// ---- Reductions. All lanes of the warp, or all threads of a one-dimensional block of whole warps, call them
// together, and all get the result. The order of additions depends on the block size alone.

QK_INLINE float qk_warp_sum(float v) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

// As fmaxf does, it passes over NaN.
QK_INLINE float qk_warp_max(float v) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

// `scratch` is 32 floats of shared memory, free again for the next reduction without a barrier between.
QK_INLINE float qk_block_sum(float v, float* scratch) {
    v = qk_warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = scratch[0];
    for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) sum += scratch[warp];
    return sum;
}

QK_INLINE float qk_block_max(float v, float* scratch) {
    v = qk_warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    float best = scratch[0];
    for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) best = fmaxf(best, scratch[warp]);
    return best;
}

#ifdef QK_EMULATOR

QK_INLINE void qk_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emu_mma_f16(d, a, b); }
QK_INLINE void qk_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emu_mma_bf16(d, a, b); }
QK_INLINE void qk_mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { emu_mma_s8(d, a, b); }
QK_INLINE int qk_dp4a(int a, int b, int sum) { return __dp4a(a, b, sum); }
QK_INLINE void qk_ldmatrix_x4(uint32_t (&r)[4], const void* row) { emu_ldmatrix(r, row, 4); }
QK_INLINE void qk_ldmatrix_x2(uint32_t (&r)[2], const void* row) { emu_ldmatrix(r, row, 2); }
QK_INLINE void qk_cp_async16(void* smem, const void* global) { emu_cp_async(smem, global, 16, true); }
QK_INLINE void qk_cp_async16_zfill(void* smem, const void* global, bool valid) {
    emu_cp_async(smem, global, 16, valid);
}
QK_INLINE void qk_cp_async_commit() { emu_cp_async_commit(); }
template <int PENDING>
QK_INLINE void qk_cp_async_wait() {
    emu_cp_async_wait(PENDING);
}

#else

// ---- Tensor cores: d += a * b by one warp, a row-major, b column-major, in the register layouts of the PTX
// manual ("Matrix Fragments for mma.m16n8k16", "... m16n8k32").

// 16x8 += 16x16 * 16x8, f16 in, f32 sums.
QK_INLINE void qk_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with bf16 in.
QK_INLINE void qk_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 16x8 += 16x32 * 32x8, signed bytes in, 32-bit sums (which wrap).
QK_INLINE void qk_mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sum + four signed bytes * four signed bytes, for each thread by itself; NVRTC does not know its name.
QK_INLINE int qk_dp4a(int a, int b, int sum) {
    int out;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
}

// Four 8x8 matrices of 16-bit values: lane 8i+j gives the address of row j of matrix i (shared memory, 16
// bytes, aligned to 16); r[i] gets values 2(lane%4) and 2(lane%4)+1 of row lane/4 of matrix i.
QK_INLINE void qk_ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Two matrices: lanes 0 to 15 give the addresses.
QK_INLINE void qk_ldmatrix_x2(uint32_t (&r)[2], const void* row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

// ---- Copies of 16 aligned bytes from global to shared memory that run on their own: seen by the thread that
// started them after commit and wait, by the block after a barrier on top.

QK_INLINE void qk_cp_async16(void* smem, const void* global) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

// Zeros instead where !valid; `global` is not read then.
QK_INLINE void qk_cp_async16_zfill(void* smem, const void* global, bool valid) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
    const uint32_t bytes = valid ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}

QK_INLINE void qk_cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most the newest PENDING groups are under way.
template <int PENDING>
QK_INLINE void qk_cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
