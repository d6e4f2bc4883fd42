// Kernels for the emulator's own tests: correct ones that use every collective, and one for each mistake that
// the emulator has to report.
#include "device.cuh"

extern "C" __global__ void emu_add(const float* a, const float* b, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
extern "C" __global__ void emu_scale(float* x, float by, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}

// Each block's sum, over a grid of any shape.
extern "C" __global__ void __launch_bounds__(1024) emu_block_sums(const float* x, float* sums) {
    __shared__ float scratch[32];
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const float sum = qk_block_sum(x[block * blockDim.x + threadIdx.x], scratch);
    if (threadIdx.x == 0) sums[block] = sum;
}

// One warp; 12 results a lane, in the order of the test.
extern "C" __global__ void emu_collectives(const int* x, int* out) {
    const int lane = threadIdx.x, v = x[lane];
    const unsigned all = 0xffffffffu;
    int* row = out + lane * 12;
    row[0] = __shfl_sync(all, v, 5);
    row[1] = __shfl_up_sync(all, v, 3);
    row[2] = __shfl_down_sync(all, v, 3);
    row[3] = __shfl_xor_sync(all, v, 9);
    row[4] = __shfl_down_sync(all, v, 2, 8);
    row[5] = (int)(__shfl_sync(all, (unsigned long long)v << 33, 7) >> 33);
    row[6] = (int)__ballot_sync(all, v & 1);
    row[7] = __any_sync(all, v == 100);
    row[8] = __all_sync(all, v < 1000);
    // The halves of the warp go different ways.
    const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (lane < 16) row[9] = __shfl_xor_sync(half, v, 1);
    else row[9] = __shfl_up_sync(half, v, 1, 16);
    __syncwarp();
    row[10] = atomicAdd(&out[32 * 12], v);
    row[11] = __dp4a(v, 0x01020304, 1);
}
// Lanes leave one after the other while the rest go on meeting.
extern "C" __global__ void emu_leaving(int* out) {
    unsigned seen = 0;
    for (int i = 0; i < (int)threadIdx.x + 1; ++i) seen = __ballot_sync(0xffffffffu << i, 1);
    out[threadIdx.x] = (int)seen;
}

// D (16x8) = A B + C, A 16x16 row-major, B stored as its transpose 8x16; fragments through ldmatrix.
template <bool HALF>
__device__ void one_mma(const uint16_t* a, const uint16_t* b, float* d) {
    __shared__ __align__(16) uint16_t rows[24][16];
    for (int i = threadIdx.x; i < 256; i += 32) rows[i / 16][i % 16] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) rows[16 + i / 16][i % 16] = b[i];
    __syncwarp();
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    uint32_t fa[4], fb[2];
    float fd[4] = {d[g * 8 + 2 * t], d[g * 8 + 2 * t + 1], d[(g + 8) * 8 + 2 * t], d[(g + 8) * 8 + 2 * t + 1]};
    qk_ldmatrix_x4(fa, &rows[lane % 16][lane / 16 * 8]);
    qk_ldmatrix_x2(fb, &rows[16 + lane % 8][lane / 8 % 2 * 8]);
    if (HALF) qk_mma_f16(fd, fa, fb);
    else qk_mma_bf16(fd, fa, fb);
    d[g * 8 + 2 * t] = fd[0], d[g * 8 + 2 * t + 1] = fd[1];
    d[(g + 8) * 8 + 2 * t] = fd[2], d[(g + 8) * 8 + 2 * t + 1] = fd[3];
}
extern "C" __global__ void emu_mma_half(const uint16_t* a, const uint16_t* b, float* d) { one_mma<true>(a, b, d); }
extern "C" __global__ void emu_mma_bfloat(const uint16_t* a, const uint16_t* b, float* d) { one_mma<false>(a, b, d); }
// A 16x32 row-major, B stored as its transpose 8x32.
extern "C" __global__ void emu_mma_bytes(const uint8_t* a, const uint8_t* b, int* d) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    uint32_t fa[4], fb[2];
    for (int r = 0; r < 4; ++r) fa[r] = *reinterpret_cast<const uint32_t*>(a + (g + 8 * (r & 1)) * 32 + 4 * t + 16 * (r >> 1));
    for (int r = 0; r < 2; ++r) fb[r] = *reinterpret_cast<const uint32_t*>(b + g * 32 + 4 * t + 16 * r);
    int fd[4] = {0, 0, 0, 0};
    qk_mma_s8(fd, fa, fb);
    d[g * 8 + 2 * t] = fd[0], d[g * 8 + 2 * t + 1] = fd[1];
    d[(g + 8) * 8 + 2 * t] = fd[2], d[(g + 8) * 8 + 2 * t + 1] = fd[3];
}

// Two stages of asynchronous copies, the second past the end of x: zeros. `wait` groups may be pending when
// shared memory is read: 0 is right for the second stage.
extern "C" __global__ void emu_copy_stages(const float* x, float* out, int wait_all) {
    QK_DYN_SMEM(float, stage);
    qk_cp_async16(stage + threadIdx.x * 4, x + threadIdx.x * 4);
    qk_cp_async_commit();
    qk_cp_async16_zfill(stage + 128 + threadIdx.x * 4, nullptr, false);
    qk_cp_async_commit();
    if (wait_all) qk_cp_async_wait<0>();
    else qk_cp_async_wait<1>();
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) out[i] = stage[i];
}

// Each float as half, bfloat16, e4m3 and e5m2: the codes, and what they decode to.
extern "C" __global__ void emu_formats(const float* x, uint32_t* codes, float* back, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const __half h = __float2half_rn(x[i]);
    const __nv_bfloat16 b = __float2bfloat16_rn(x[i]);
    const __nv_fp8_e4m3 e4m3(x[i]);
    const __nv_fp8_e5m2 e5m2(x[i]);
    codes[4 * i] = __half_as_ushort(h), codes[4 * i + 1] = __bfloat16_as_ushort(b);
    codes[4 * i + 2] = e4m3.__x, codes[4 * i + 3] = e5m2.__x;
    back[4 * i] = __half2float(h), back[4 * i + 1] = __bfloat162float(b);
    back[4 * i + 2] = float(e4m3), back[4 * i + 3] = float(e5m2);
}

// Bit and integer intrinsics of pairs of words; 8 results a pair.
extern "C" __global__ void emu_words(const uint32_t* x, uint32_t* out) {
    const uint32_t a = x[2 * threadIdx.x], b = x[2 * threadIdx.x + 1];
    uint32_t* row = out + 8 * threadIdx.x;
    row[0] = __byte_perm(a, b, 0x6c1b), row[1] = __funnelshift_r(a, b, 13), row[2] = __brev(a);
    row[3] = __popc(a) + 100 * __clz((int)b) + 10000 * __ffs((int)a), row[4] = (uint32_t)__dp4a((int)a, (int)b, 5);
    row[5] = (uint32_t)__float2int_rn(__uint_as_float(a)), row[6] = __umulhi(a, b), row[7] = __funnelshift_l(a, b, 5);
}

// ---- Speed.

extern "C" __global__ void emu_nothing() {}
extern "C" __global__ void emu_many_shuffles(float* out, int rounds) {
    float v = (float)threadIdx.x;
    for (int i = 0; i < rounds; ++i) v = __shfl_xor_sync(0xffffffffu, v, 1 + i % 16);
    out[blockIdx.x * blockDim.x + threadIdx.x] = v;
}
extern "C" __global__ void emu_many_barriers(float* out, int rounds) {
    for (int i = 0; i < rounds; ++i) __syncthreads();
    out[threadIdx.x] = (float)rounds;
}
extern "C" __global__ void emu_many_mma(float* out, int rounds) {
    uint32_t a[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u}, b[2] = {0x3c003c00u, 0x3c003c00u};
    float d[4][4] = {};
    for (int i = 0; i < rounds; ++i) qk_mma_f16(d[i % 4], a, b);
    out[blockIdx.x * blockDim.x + threadIdx.x] = d[0][0] + d[1][0] + d[2][0] + d[3][0];
}

// ---- Mistakes.

// Sums into static shared memory that nobody has cleared.
extern "C" __global__ void emu_uncleared(float* out) {
    __shared__ float sum[32];
    sum[threadIdx.x] += 1.0f;
    out[threadIdx.x] = sum[threadIdx.x];
}

extern "C" __global__ void emu_racy_reverse(const float* x, float* out) {
    __shared__ float all[256];
    all[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];  // no barrier before
}

// Races for shared memory; 64 threads and 1 KB of dynamic shared memory each. Most give right results in every order of
// lanes, so only the record of accesses shows them.
extern "C" __global__ void emu_race_write_write(float* out) {
    __shared__ float flag;
    flag = 1.0f;  // by all threads, the same value
    __syncthreads();
    out[threadIdx.x] = flag;
}
extern "C" __global__ void emu_race_read_write(float* out) {
    __shared__ float all[64];
    all[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = all[63 - threadIdx.x];
    all[threadIdx.x] = 1.0f;  // another warp may not have read it yet
}
extern "C" __global__ void emu_race_bytes(float* out) {
    QK_DYN_SMEM(unsigned char, all);
    all[threadIdx.x] = 1;  // neighbours in one word: no race
    __syncthreads();
    all[threadIdx.x] += all[(threadIdx.x + 33) % 64];  // a race
    out[threadIdx.x] = all[threadIdx.x];
}
extern "C" __global__ void emu_race_in_warp(float* out) {
    QK_DYN_SMEM(float, all);
    all[threadIdx.x] = (float)threadIdx.x;
    __syncwarp();
    float sum = all[threadIdx.x ^ 1];
    sum = __shfl_xor_sync(0xffffffffu, sum, 1);  // orders no memory
    all[threadIdx.x] = sum;
    out[threadIdx.x] = sum;
}
extern "C" __global__ void emu_race_across_warps(float* out) {
    QK_DYN_SMEM(float, all);
    all[threadIdx.x] = 1.0f;
    __syncwarp();  // orders one warp only
    out[threadIdx.x] = all[threadIdx.x ^ 32];
}
extern "C" __global__ void emu_race_atomic(float* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);  // atomics among themselves: no race
    out[threadIdx.x] = (float)count;
}
extern "C" __global__ void emu_race_copy_not_awaited(const float* x, float* out) {
    QK_DYN_SMEM(float, stage);
    qk_cp_async16(stage + threadIdx.x * 4, x + threadIdx.x * 4);
    qk_cp_async_commit();
    __syncthreads();  // does not wait for copies
    out[threadIdx.x] = stage[threadIdx.x];
    qk_cp_async_wait<0>();
}
extern "C" __global__ void emu_race_copy_without_barrier(const float* x, float* out) {
    QK_DYN_SMEM(float, stage);
    qk_cp_async16(stage + threadIdx.x * 4, x + threadIdx.x * 4);
    qk_cp_async_commit();
    qk_cp_async_wait<0>();  // for the own copies only
    out[threadIdx.x] = stage[(threadIdx.x * 4 + 128) % 256];
}
// A ring that is refilled while other warps may still read the slot.
extern "C" __global__ void emu_race_ring(const float* x, float* out) {
    QK_DYN_SMEM(float, stage);
    float sum = 0.0f;
    for (int round = 0; round < 4; ++round) {
        qk_cp_async16(stage + threadIdx.x * 4, x + threadIdx.x * 4);
        qk_cp_async_commit();
        qk_cp_async_wait<0>();
        __syncthreads();
        sum += stage[(threadIdx.x * 4 + 128) % 256];
    }
    out[threadIdx.x] = sum;
}
extern "C" __global__ void emu_race_ldmatrix(float* out) {
    QK_DYN_SMEM(uint16_t, rows);
    for (int i = threadIdx.x; i < 512; i += 64) rows[i] = 0x3c00;
    uint32_t a[4];
    qk_ldmatrix_x4(a, rows + threadIdx.x % 32 * 8);  // rows that both warps wrote
    out[threadIdx.x] = (float)a[0];
}
extern "C" __global__ void emu_write_at(float* out, long long index) { out[index] = 1.0f; }
extern "C" __global__ void emu_read_at(const float* x, long long index, float* out) { out[0] = x[index]; }
extern "C" __global__ void emu_write_shared_at(float* out, long long index) {
    QK_DYN_SMEM(float, all);
    all[index] = 1.0f;
    out[0] = all[0];
}
extern "C" __global__ void emu_divergent_barrier(float* out) {
    if (threadIdx.x < 16) __syncthreads();
    else out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
}
extern "C" __global__ void emu_different_collectives(float* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffffffu, 1.0f, 0);
    else out[threadIdx.x] = (float)__ballot_sync(0xffffffffu, 1);
}
extern "C" __global__ void emu_shuffle_outside(float* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);
}
extern "C" __global__ void emu_outside_mask(float* out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }
extern "C" __global__ void emu_misaligned_copy(const float* x, float* out) {
    QK_DYN_SMEM(float, stage);
    qk_cp_async16(stage, x + 1);
    qk_cp_async_commit();
    qk_cp_async_wait<0>();
    out[0] = stage[0];
}
extern "C" __global__ void emu_shared_overrun(float* out, int index) {
    __shared__ float all[32];
    all[threadIdx.x] = 1.0f;
    __syncthreads();
    if (threadIdx.x == 3) out[0] = all[index];
}
extern "C" __global__ void emu_misaligned_vector(const float* x, float* out) {
    const float4 v = *reinterpret_cast<const float4*>(x + 1);
    out[0] = v.x + v.w;
}
extern "C" __global__ void emu_assertion(int value) { assert(value == 3); }
extern "C" __global__ void emu_endless_stack(float* out, int depth) {
    volatile float frame[4096];
    frame[depth & 4095] = (float)depth;
    for (int i = 0; i < 64; ++i) frame[i * 64] = frame[depth & 4095];
    volatile char* top = (volatile char*)frame;
    for (long long i = 0; i < 1 << 20; i += 4096) top[-i] = 0;  // a frame larger than the stack
    out[0] = frame[0];
}
