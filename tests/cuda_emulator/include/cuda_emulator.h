// The CUDA C++ language for g++: force-included in front of every kernel file that is compiled for the CPU
// emulator. A CUDA thread ("lane") is a fiber; a block never leaves the OS thread it runs on.
#pragma once
#define QK_EMULATOR 1

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <tuple>
#include <type_traits>
#include <utility>

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 800
#endif

// A scan of the preprocessed text finds the kernels by this mark; the compiler sees nothing.
#ifdef EMU_SCAN
#define __global__ emu_kernel_follows
#else
#define __global__
#endif
#define __device__
#define __host__
#define __constant__
// One instance for each OS thread, hence for each block under way. Static shared memory keeps what the block
// before left in it.
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define warpSize 32

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emu {

// What a lane knows of itself; the scheduler's state follows these fields in memory.
struct ThreadView {
    uint3 index;
    unsigned lane;
};
struct Shadow;
struct BlockView {
    uint3 index;
    dim3 size, grid;
    void* dynamic_shared;
    Shadow* shadow;  // null but in the checked build
};
extern __thread ThreadView* self;
extern __thread BlockView* block;

// The lanes of `mask` that have not exited meet; the last to arrive runs `operation` over the pointers of all.
using WarpOperation = void (*)(void** arguments, unsigned lanes);
void meet(ThreadView* self, unsigned mask, WarpOperation operation, void* argument);
void warp_barrier(ThreadView* self, unsigned mask);
void block_barrier(ThreadView* self);
// Reports with kernel, block and thread, makes `code` the device's sticky error and ends the block.
[[noreturn]] void fault(int code, const char* what);

// ---- Registration: one EMU_REGISTER(name) follows each kernel file for each kernel in it.

struct Kernel {
    const char* name;
    const char* file;
    void (*call)(void* const* arguments);
    const size_t* sizes;
    const bool* pointers;
    int count;
};
void register_kernel(const Kernel& kernel);

template <auto FUNCTION>
struct Entry;
template <class... P, void (*FUNCTION)(P...)>
struct Entry<FUNCTION> {
    static constexpr size_t sizes[sizeof...(P) + 1] = {sizeof(P)..., 0};
    static constexpr bool pointers[sizeof...(P) + 1] = {std::is_pointer_v<P>..., false};
    static constexpr int count = sizeof...(P);
    template <size_t... I>
    static void unpack(void* const* arguments, std::index_sequence<I...>) {
        FUNCTION(*static_cast<std::remove_cv_t<P>*>(arguments[I])...);
    }
    static void call(void* const* arguments) { unpack(arguments, std::index_sequence_for<P...>{}); }
};
struct Registration {
    explicit Registration(const Kernel& kernel) { register_kernel(kernel); }
};

}  // namespace emu

#define EMU_REGISTER(name)                                                                                  \
    static emu::Registration emu_registration_##name{                                                      \
        {#name, EMU_FILE, &emu::Entry<&name>::call, emu::Entry<&name>::sizes, emu::Entry<&name>::pointers, \
         emu::Entry<&name>::count}};

#define threadIdx (emu::self->index)
#define blockIdx (emu::block->index)
#define blockDim (emu::block->size)
#define gridDim (emu::block->grid)

#undef assert
#define assert(condition) ((condition) ? (void)0 : emu::fault(710, "assertion failed: " #condition))
inline void __trap() { emu::fault(719, "__trap()"); }

// ---- Twins of the instructions in kernels/device.cuh.

inline void* emu_dyn_smem() { return emu::block->dynamic_shared; }
void emu_mma_f16(float* d, const uint32_t* a, const uint32_t* b);
void emu_mma_bf16(float* d, const uint32_t* a, const uint32_t* b);
void emu_mma_s8(int* d, const uint32_t* a, const uint32_t* b);
void emu_ldmatrix(uint32_t* r, const void* row, int count);
// Copies land only when waited for, so that a forgotten wait shows.
void emu_cp_async(void* smem, const void* global, int bytes, bool valid);
void emu_cp_async_commit();
void emu_cp_async_wait(int pending);

// ---- Barriers and warp collectives.

inline void __syncthreads() { emu::block_barrier(emu::self); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::warp_barrier(emu::self, mask); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace emu {

template <class T>
struct Shuffle {
    T value, result;
    int source;
};

template <class T>
T shuffle(ThreadView* self, unsigned mask, T value, int source) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "shuffles move at most 8 bytes");
    Shuffle<T> own{value, value, source};
    meet(
        self, mask,
        [](void** arguments, unsigned lanes) {
            for (int lane = 0; lane < 32; ++lane) {
                if (!(lanes >> lane & 1)) continue;
                auto* to = static_cast<Shuffle<T>*>(arguments[lane]);
                if (!(lanes >> to->source & 1)) fault(719, "a shuffle reads a lane outside the mask, or one that has exited");
                to->result = static_cast<Shuffle<T>*>(arguments[to->source])->value;
            }
        },
        &own);
    return own.result;
}

}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    auto* self = emu::self;
    return emu::shuffle(self, mask, value, (int(self->lane) & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    auto* self = emu::self;
    const int lane = int(self->lane), source = lane ^ flip;
    const bool inside = (source & ~(width - 1)) <= (lane & ~(width - 1)) && source < 32;
    return emu::shuffle(self, mask, value, inside ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    auto* self = emu::self;
    const int lane = int(self->lane);
    const bool inside = (lane & (width - 1)) + int(by) < width;
    return emu::shuffle(self, mask, value, inside ? lane + int(by) : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    auto* self = emu::self;
    const int lane = int(self->lane);
    const bool inside = (lane & (width - 1)) >= int(by);
    return emu::shuffle(self, mask, value, inside ? lane - int(by) : lane);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    struct Ballot {
        bool vote;
        unsigned votes;
    } own{predicate != 0, 0};
    emu::meet(
        emu::self, mask,
        [](void** arguments, unsigned lanes) {
            unsigned votes = 0;
            for (int lane = 0; lane < 32; ++lane)
                if (lanes >> lane & 1) votes |= unsigned(static_cast<Ballot*>(arguments[lane])->vote) << lane;
            for (int lane = 0; lane < 32; ++lane)
                if (lanes >> lane & 1) static_cast<Ballot*>(arguments[lane])->votes = votes;
        },
        &own);
    return own.votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// ---- Atomics: compare and exchange on the bits, so that floats need nothing special.

namespace emu {
template <class T, class F>
T atomic_update(T* address, F change) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    auto* place = reinterpret_cast<Bits*>(address);
    Bits before = __atomic_load_n(place, __ATOMIC_RELAXED), after;
    T value;
    do {
        memcpy(&value, &before, sizeof value);
        const T changed = change(value);
        memcpy(&after, &changed, sizeof after);
    } while (!__atomic_compare_exchange_n(place, &before, after, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return value;
}
template <class T>
struct Same {
    using type = T;
};
template <class T>
using same = typename Same<T>::type;  // not deduced: the pointer decides the type
}  // namespace emu

template <class T> T atomicAdd(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return T(old + v); }); }
template <class T> T atomicSub(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return T(old - v); }); }
template <class T> T atomicMax(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return old > v ? old : v; }); }
template <class T> T atomicMin(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return old < v ? old : v; }); }
template <class T> T atomicAnd(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return T(old & v); }); }
template <class T> T atomicOr(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return T(old | v); }); }
template <class T> T atomicXor(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T old) { return T(old ^ v); }); }
template <class T> T atomicExch(T* p, emu::same<T> v) { return emu::atomic_update(p, [=](T) { return v; }); }
template <class T> T atomicCAS(T* p, emu::same<T> expected, emu::same<T> v) {
    return emu::atomic_update(p, [=](T old) { return old == expected ? v : old; });
}

#include "cuda_intrinsics.h"
