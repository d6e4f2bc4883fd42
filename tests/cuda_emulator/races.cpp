// Accesses to shared memory that no barrier orders, in the checked build: for each byte of a block's shared memory,
// who wrote it last and who read it since, and when. The compiler puts a call in front of every access
// (-fsanitize=thread; the hooks are those of its library, which is not linked); cp.async, ldmatrix and barriers come
// from fibers.cpp and tensor.cpp.
//
// What orders two accesses: __syncthreads for all threads of the block, __syncwarp for the lanes of one warp.
// Shuffles, votes and tensor-core operations do not order memory (CUDA C++ Programming Guide, "Warp Shuffle
// Functions"). An asynchronous copy writes at any time between its start and the wait for its group.
#include "runtime.h"

#include <algorithm>

#include <dlfcn.h>

namespace emu {

namespace {

// The time of a byte that an asynchronous copy is about to write: nothing is ordered with it.
constexpr uint32_t UNDER_WAY = ~0u;

enum class Access { Read, Write, Atomic };

unsigned thread_number() {
    const uint3 at = self->index;
    const dim3 size = block->size;
    return at.x + size.x * (at.y + size.y * at.z);
}

}  // namespace

// One access: when, and by which thread of the block. Time 0 is before every barrier.
struct Touch {
    uint32_t time;
    uint16_t thread;
    bool atomic;
};

// Of the reads, the last one, the last by another lane of that warp, and the last by another warp: whoever writes
// next finds one of another warp among them if there is one.
struct ByteHistory {
    Touch write, read, read_by_lane, read_by_warp;
};

struct Shadow {
    const char* dynamic_map;
    size_t dynamic_bytes;
    const char* static_start = nullptr;
    size_t static_bytes = 0;
    std::vector<ByteHistory> dynamic_history, static_history;
    // Times count barriers, over all blocks that this worker runs, so that nothing is cleared between blocks.
    uint32_t now = 0, block_time = 0, warp_times[32] = {};

    ByteHistory* history(const void* address, size_t bytes) {
        const auto* at = static_cast<const char*>(address);
        if (at >= dynamic_map && at + bytes <= dynamic_map + dynamic_bytes) return &dynamic_history[size_t(at - dynamic_map)];
        if (at >= static_start && at + bytes <= static_start + static_bytes) return &static_history[size_t(at - static_start)];
        return nullptr;
    }

    bool unordered(const Touch& before, unsigned thread) const {
        if (before.time == UNDER_WAY) return true;
        if (before.thread == thread || before.time < block_time) return false;
        return before.thread / 32 != thread / 32 || before.time >= warp_times[thread / 32];
    }

    [[noreturn]] void race(const Touch& before, const char* what, Access access, const void* address, const void* code) const {
        const auto* at = static_cast<const char*>(address);
        const bool dynamic = at >= dynamic_map && at < dynamic_map + dynamic_bytes;
        Dl_info place = {};
        dladdr(code, &place);
        const char* verb = access == Access::Read ? "read" : access == Access::Write ? "write" : "atomic update";
        if (before.atomic) what = "an atomic update";
        if (before.time == UNDER_WAY) what = "an asynchronous copy under way";
        const std::string where = dynamic ? format("byte %td of dynamic shared memory", at - static_cast<const char*>(block->dynamic_shared))
                                          : std::string("static shared memory");
        fault(LAUNCH_FAILED, format("race: no barrier orders %s by thread %u (warp %u) and this %s of %s, at libcuda.so+0x%zx",
                                    what, before.thread, before.thread / 32u, verb, where.c_str(),
                                    size_t(static_cast<const char*>(code) - static_cast<const char*>(place.dli_fbase)))
                                 .c_str());
    }

    void access(const void* address, size_t bytes, Access access, const void* code) {
        ByteHistory* byte = history(address, bytes);
        if (!byte) return;
        const unsigned thread = thread_number();
        const Touch touch{now, uint16_t(thread), access == Access::Atomic};
        for (size_t i = 0; i < bytes; ++i, ++byte) {
            const char* at = static_cast<const char*>(address) + i;
            if (unordered(byte->write, thread) && !(touch.atomic && byte->write.atomic))
                race(byte->write, "a write", access, at, code);
            if (access == Access::Read) {
                note_read(*byte, touch);
                continue;
            }
            for (const Touch* read : {&byte->read, &byte->read_by_lane, &byte->read_by_warp})
                if (unordered(*read, thread)) race(*read, "a read", access, at, code);
            byte->write = touch;
        }
    }

    static void note_read(ByteHistory& byte, const Touch& touch) {
        if (byte.read.thread / 32 != touch.thread / 32) byte.read_by_warp = byte.read;
        else if (byte.read.thread != touch.thread) byte.read_by_lane = byte.read;
        byte.read = touch;
    }

    void mark(const void* address, size_t bytes, const Touch& touch) {
        if (ByteHistory* byte = history(address, bytes))
            for (size_t i = 0; i < bytes; ++i) byte[i].write = touch;
    }
};

Shadow* make_shadow(const char* dynamic_map, size_t dynamic_bytes) {
    auto* shadow = new Shadow{dynamic_map, dynamic_bytes};
    shadow->dynamic_history.resize(dynamic_bytes);
    return shadow;
}

void shadow_begins(Shadow* shadow) {
    const StaticShared place = static_shared();
    shadow->static_start = place.start;
    shadow->static_bytes = place.bytes;
    if (shadow->static_history.size() < place.bytes) shadow->static_history.resize(place.bytes);
    if (shadow->now > UNDER_WAY / 2) {
        std::fill(shadow->dynamic_history.begin(), shadow->dynamic_history.end(), ByteHistory{});
        std::fill(shadow->static_history.begin(), shadow->static_history.end(), ByteHistory{});
        shadow->now = 0;
        memset(shadow->warp_times, 0, sizeof shadow->warp_times);
    }
    shadow->block_time = ++shadow->now;
}

void shadow_block_barrier(Shadow* shadow) { shadow->block_time = ++shadow->now; }
void shadow_warp_barrier(Shadow* shadow, unsigned warp) { shadow->warp_times[warp] = ++shadow->now; }

void shadow_read(const void* address, size_t bytes, const void* code) {
    if (block->shadow) block->shadow->access(address, bytes, Access::Read, code);
}
void shadow_copy_starts(const void* address, size_t bytes, const void* code) {
    if (!block->shadow) return;
    block->shadow->access(address, bytes, Access::Write, code);
    block->shadow->mark(address, bytes, {UNDER_WAY, uint16_t(thread_number()), false});
}
void shadow_copy_lands(const void* address, size_t bytes) {
    if (block->shadow) block->shadow->mark(address, bytes, {block->shadow->now, uint16_t(thread_number()), false});
}
void shadow_copy_dropped(Shadow* shadow, const void* address, size_t bytes) { shadow->mark(address, bytes, {}); }

}  // namespace emu

// ---- What the compiler calls. Kernel files also have initialisers, which run before there is a block.

namespace {

void note(const void* address, size_t bytes, emu::Access access, const void* code) {
    if (emu::block && emu::block->shadow) emu::block->shadow->access(address, bytes, access, code);
}

}  // namespace

#define EMU_HOOK extern "C" __attribute__((visibility("hidden")))
#define EMU_ACCESS(name, bytes, access) \
    EMU_HOOK void __tsan_##name(void* address) { note(address, bytes, emu::Access::access, __builtin_return_address(0)); }
EMU_ACCESS(read1, 1, Read) EMU_ACCESS(read2, 2, Read) EMU_ACCESS(read4, 4, Read) EMU_ACCESS(read8, 8, Read)
EMU_ACCESS(read16, 16, Read) EMU_ACCESS(unaligned_read2, 2, Read) EMU_ACCESS(unaligned_read4, 4, Read)
EMU_ACCESS(unaligned_read8, 8, Read) EMU_ACCESS(unaligned_read16, 16, Read)
EMU_ACCESS(write1, 1, Write) EMU_ACCESS(write2, 2, Write) EMU_ACCESS(write4, 4, Write) EMU_ACCESS(write8, 8, Write)
EMU_ACCESS(write16, 16, Write) EMU_ACCESS(unaligned_write2, 2, Write) EMU_ACCESS(unaligned_write4, 4, Write)
EMU_ACCESS(unaligned_write8, 8, Write) EMU_ACCESS(unaligned_write16, 16, Write)

EMU_HOOK void __tsan_init() {}
EMU_HOOK void __tsan_read_range(void* address, size_t bytes) { note(address, bytes, emu::Access::Read, __builtin_return_address(0)); }
EMU_HOOK void __tsan_write_range(void* address, size_t bytes) { note(address, bytes, emu::Access::Write, __builtin_return_address(0)); }
EMU_HOOK void __tsan_vptr_update(void**, void*) {}

EMU_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
// The two operations that the header's atomics are made of.
#define EMU_ATOMIC(bits, T)                                                                                   \
    EMU_HOOK T __tsan_atomic##bits##_load(const volatile T* address, int) {                                   \
        note(const_cast<const T*>(address), sizeof(T), emu::Access::Atomic, __builtin_return_address(0));     \
        return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                                    \
    }                                                                                                         \
    EMU_HOOK bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* address, T* expected, T after, int, int) { \
        note(const_cast<const T*>(address), sizeof(T), emu::Access::Atomic, __builtin_return_address(0));     \
        return __atomic_compare_exchange_n(address, expected, after, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED); \
    }
EMU_ATOMIC(16, uint16_t)
EMU_ATOMIC(32, uint32_t)
EMU_ATOMIC(64, uint64_t)
