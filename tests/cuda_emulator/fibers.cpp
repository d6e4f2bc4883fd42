// Lanes as fibers: a lane runs until it waits in a warp collective or at a barrier, then switches straight to
// the next ready lane of its warp (or of another warp). The last lane to arrive carries out what the others
// wait for. A lane that exits hands its stack to the next one, so kernels without barriers use one hot stack.
#include "runtime.h"
#include "switch.h"

#include <csignal>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>

namespace emu {

__thread ThreadView* self;
__thread BlockView* block;

namespace {

constexpr int MAX_THREADS = 1024, MAX_WARPS = 32;
constexpr size_t PAGE = 4096, STACK = 25 * PAGE, STACK_STRIDE = STACK + PAGE;
constexpr size_t MAX_DYNAMIC = 99 * 1024, DYNAMIC_ALIGN = 128;

struct PendingCopy {
    void* to;
    const void* from;
    int bytes, group;
};

struct Warp;
struct Lane : ThreadView {
    Warp* warp;
    StackPointer stack_pointer;  // null before the first run
    int stack;
    unsigned mask;  // of the collective it waits in
    WarpOperation operation;
    std::vector<PendingCopy> copies;
    int group;  // committed groups of copies
};

struct Warp {
    Worker* worker;
    Lane* lanes;
    unsigned number;
    unsigned live, ready, arrived, at_barrier;
    // Of the first lane that arrived; `mixed` once another one came with something else.
    unsigned mask;
    WarpOperation operation;
    bool mixed;
    void* arguments[32];
};

thread_local Worker* working;

// What the lanes of a warp meet in for __syncwarp.
void order_memory(void**, unsigned) {}

}  // namespace

class Worker {
  public:
    explicit Worker(unsigned seed) : random(seed * 2654435761u + 1) {
        stacks = static_cast<char*>(mmap(nullptr, STACK_STRIDE * (MAX_THREADS + 1), PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        shared = static_cast<char*>(mmap(nullptr, shared_bytes() + 2 * PAGE, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (stacks == MAP_FAILED || shared == MAP_FAILED) abort();
        for (int i = 0; i <= MAX_THREADS; ++i) mprotect(stacks + STACK_STRIDE * i, PAGE, PROT_NONE);
        mprotect(shared, PAGE, PROT_NONE);
        mprotect(shared + PAGE + shared_bytes(), PAGE, PROT_NONE);
        lanes.resize(MAX_THREADS);
        free_stacks.reserve(MAX_THREADS);
        if (checked()) shadow = make_shadow(shared + PAGE, shared_bytes());
    }

    bool run(const Launch& launch, uint3 index);
    void meet(Lane* lane, unsigned mask, WarpOperation operation, void* argument);
    void barrier(Lane* lane);
    [[noreturn]] void lane_main();
    [[noreturn]] void abandon();
    [[noreturn]] void fail(int code, const std::string& what);
    std::string where() const;
    void note_memory_fault(Address address, bool write) { fault_address = address, fault_write = write; }
    [[noreturn]] void memory_fault();
    char* emergency_stack() const { return stacks + STACK_STRIDE * (MAX_THREADS + 1) - 64; }

    const Launch* launch = nullptr;
    Lane* running = nullptr;
    bool copies_used = false;

  private:
    static size_t shared_bytes() { return (MAX_DYNAMIC + PAGE - 1) / PAGE * PAGE; }
    void set_up(uint3 index);
    int pick(unsigned set);
    Lane* next(Warp* warp);
    void wait(Lane* lane);
    void resume(Lane* lane, StackPointer* save);
    void complete(Warp& warp, unsigned mask);
    void release_barrier();
    void leave(Lane* lane);
    [[noreturn]] void deadlock();

    void drop_copies();

    char* stacks;
    char* shared;
    Shadow* shadow = nullptr;
    std::vector<int> free_stacks;
    std::vector<Lane> lanes;
    Warp warps[MAX_WARPS];
    BlockView view;
    StackPointer scheduler = nullptr;
    ThreadView** self_slot = nullptr;
    int threads = 0, live = 0, waiting_at_barrier = 0;
    unsigned ready_warps = 0;
    uint32_t random;
    bool failed = false;
    Address fault_address = 0;
    bool fault_write = false;
};

// ---- Setting up and running a block.

void Worker::set_up(uint3 index) {
    threads = int(launch->block.x * launch->block.y * launch->block.z);
    live = threads;
    waiting_at_barrier = 0;
    failed = false;
    // Shared memory ends at an inaccessible page, up to its alignment; 0xff is NaN in every float format.
    char* dynamic = shared + PAGE + shared_bytes() - (launch->dynamic_bytes + DYNAMIC_ALIGN - 1) / DYNAMIC_ALIGN * DYNAMIC_ALIGN;
    memset(dynamic, 0xff, size_t(shared + PAGE + shared_bytes() - dynamic));
    view = {index, launch->block, launch->grid, dynamic, shadow};
    block = &view;
    if (shadow) shadow_begins(shadow);

    uint3 at{0, 0, 0};
    for (int i = 0; i < threads; ++i) {
        Lane& lane = lanes[i];
        lane.index = at;
        lane.lane = unsigned(i) & 31;
        lane.warp = &warps[i >> 5];
        lane.stack_pointer = nullptr;
        if (++at.x == launch->block.x) {
            at.x = 0;
            if (++at.y == launch->block.y) at.y = 0, ++at.z;
        }
    }
    const int warp_count = (threads + 31) / 32;
    for (int w = 0; w < warp_count; ++w) {
        const int count = threads - w * 32 < 32 ? threads - w * 32 : 32;
        Warp& warp = warps[w];
        warp.worker = this;
        warp.lanes = &lanes[w * 32];
        warp.number = unsigned(w);
        warp.live = warp.ready = count == 32 ? ~0u : (1u << count) - 1;
        warp.arrived = warp.at_barrier = 0;
    }
    ready_warps = warp_count == 32 ? ~0u : (1u << warp_count) - 1;
}

// Copies that the block did not wait for.
void Worker::drop_copies() {
    for (Lane& lane : lanes) {
        for (const PendingCopy& copy : lane.copies)
            if (shadow) shadow_copy_dropped(shadow, copy.to, size_t(copy.bytes));
        lane.copies.clear();
        lane.group = 0;
    }
    copies_used = false;
}

bool Worker::run(const Launch& what, uint3 index) {
    static const bool wipe = checked();
    if (wipe) wipe_static_shared();
    working = this;
    launch = &what;
    self_slot = &self;
    if (free_stacks.size() != MAX_THREADS) {  // at first, and after a block that was abandoned
        free_stacks.clear();
        for (int i = MAX_THREADS; i-- > 0;) free_stacks.push_back(i);
    }
    set_up(index);
    resume(next(&warps[pick(ready_warps)]), &scheduler);
    running = nullptr;
    if (copies_used) drop_copies();
    const char* end = static_cast<char*>(view.dynamic_shared) + launch->dynamic_bytes;
    for (const char* slack = end; !failed && slack < shared + PAGE + shared_bytes(); ++slack) {
        if (*slack == char(0xff)) continue;
        failed = true;
        report(format("write %zd bytes past the dynamic shared memory (%zu bytes): ", slack - end, launch->dynamic_bytes) + where());
        make_sticky(launch->device, ILLEGAL_ADDRESS);
    }
    working = nullptr;
    return !failed;
}

// One of the members of a set that is not empty, by the order of the launch.
inline int Worker::pick(unsigned set) {
    switch (launch->order) {
        case Order::Forward: return __builtin_ctz(set);
        case Order::Reverse: return 31 - __builtin_clz(set);
        default: break;
    }
    random ^= random << 13, random ^= random >> 17, random ^= random << 5;
    for (unsigned skip = random % unsigned(__builtin_popcount(set)); skip > 0; --skip) set &= set - 1;
    return __builtin_ctz(set);
}

// The lane that runs next: one of `warp` while it has any that is ready. Null if no lane of the block is.
inline Lane* Worker::next(Warp* warp) {
    if (!warp->ready) {
        ready_warps &= ~(1u << warp->number);
        if (!ready_warps) return nullptr;
        warp = &warps[pick(ready_warps)];
    }
    return &warp->lanes[pick(warp->ready)];
}

inline void Worker::resume(Lane* lane, StackPointer* save) {
    running = lane;
    *self_slot = lane;
    if (!lane->stack_pointer) {
        lane->stack = free_stacks.back();
        free_stacks.pop_back();
        // Tops at different offsets in their pages, or all stacks would compete for the same cache sets.
        char* top = stacks + STACK_STRIDE * size_t(lane->stack + 1) - size_t(lane->stack) * 320 % PAGE;
        lane->stack_pointer = fresh_stack(top, [] { working->lane_main(); });
    }
    switch_stack(save, lane->stack_pointer);
}

// The body of every fiber: runs one lane after the other while the next one has not begun.
void Worker::lane_main() {
    for (;;) {
        Lane* lane = running;
        const int stack = lane->stack;
        launch->kernel->call(launch->arguments);
        leave(lane);
        Lane* after = live ? next(lane->warp) : nullptr;
        if (live && !after) deadlock();
        if (after && !after->stack_pointer) {
            after->stack = stack;
            after->stack_pointer = lane->stack_pointer;  // any value but null; saved anew when it waits
            running = after;
            *self_slot = after;
            continue;
        }
        free_stacks.push_back(stack);
        StackPointer none;
        if (after) resume(after, &none);
        else switch_stack(&none, scheduler);
    }
}

void Worker::leave(Lane* lane) {
    Warp& warp = *lane->warp;
    const unsigned bit = 1u << lane->lane;
    warp.live &= ~bit;
    warp.ready &= ~bit;
    --live;
    // Lanes may have waited for this one alone.
    if (warp.arrived) {
        for (unsigned rest = warp.arrived; rest; rest &= rest - 1) {
            const unsigned mask = warp.lanes[__builtin_ctz(rest)].mask;
            if ((warp.arrived & mask & warp.live) == (mask & warp.live)) {
                complete(warp, mask);
                break;
            }
        }
    }
    if (waiting_at_barrier && waiting_at_barrier == live) release_barrier();
}

void Worker::wait(Lane* lane) {
    Warp* warp = lane->warp;
    warp->ready &= ~(1u << lane->lane);
    Lane* after = next(warp);
    if (!after) deadlock();
    resume(after, &lane->stack_pointer);
}

// ---- Warp collectives and barriers.

void Worker::complete(Warp& warp, unsigned mask) {
    const unsigned need = mask & warp.live;
    if (warp.mixed) {
        WarpOperation operation = nullptr;
        for (unsigned rest = need; rest; rest &= rest - 1) {
            const Lane& lane = warp.lanes[__builtin_ctz(rest)];
            if (lane.mask != mask || (operation && lane.operation != operation))
                fail(LAUNCH_FAILED, "lanes of one warp meet in different warp operations or with different masks");
            operation = lane.operation;
        }
        warp.operation = operation;
    }
    warp.operation(warp.arguments, need);
    // Lanes that a narrower mask leaves out are not ordered with the others.
    if (shadow && warp.operation == order_memory && need == warp.live) shadow_warp_barrier(shadow, warp.number);
    warp.arrived &= ~need;
    warp.ready |= need;
    ready_warps |= 1u << warp.number;
}

void Worker::meet(Lane* lane, unsigned mask, WarpOperation operation, void* argument) {
    Warp& warp = *lane->warp;
    const unsigned bit = 1u << lane->lane;
    if (!(mask & bit)) fail(LAUNCH_FAILED, "a lane calls a warp operation whose mask leaves it out");
    lane->mask = mask;
    lane->operation = operation;
    warp.arguments[lane->lane] = argument;
    if (!warp.arrived) {
        warp.mask = mask;
        warp.operation = operation;
        warp.mixed = false;
    } else if (warp.mask != mask || warp.operation != operation) {
        warp.mixed = true;
    }
    warp.arrived |= bit;
    const unsigned need = mask & warp.live;
    if ((warp.arrived & need) == need) complete(warp, mask);
    else wait(lane);
}

void Worker::release_barrier() {
    waiting_at_barrier = 0;
    if (shadow) shadow_block_barrier(shadow);
    for (int w = 0; w * 32 < threads; ++w) {
        if (!warps[w].at_barrier) continue;
        warps[w].ready |= warps[w].at_barrier;
        warps[w].at_barrier = 0;
        ready_warps |= 1u << w;
    }
}

void Worker::barrier(Lane* lane) {
    lane->warp->at_barrier |= 1u << lane->lane;
    if (++waiting_at_barrier == live) release_barrier();
    else wait(lane);
}

// ---- Failures: the block is given up with all its stacks.

void Worker::abandon() {
    failed = true;
    StackPointer none;
    switch_stack(&none, scheduler);
    __builtin_unreachable();
}

std::string Worker::where() const {
    std::string text = format("kernel %s block (%u,%u,%u)", launch->kernel->name, view.index.x, view.index.y, view.index.z);
    if (running) text += format(" thread (%u,%u,%u)", running->index.x, running->index.y, running->index.z);
    return text;
}

void Worker::fail(int code, const std::string& what) {
    report(what + ": " + where());
    make_sticky(launch->device, code);
    abandon();
}

void Worker::deadlock() {
    int in_warp = 0;
    for (int w = 0; w * 32 < threads; ++w) in_warp += __builtin_popcount(warps[w].arrived);
    const std::string what = format("deadlock: %d threads wait in a warp operation, %d at __syncthreads, %d have exited",
                                    in_warp, waiting_at_barrier, threads - live);
    running = nullptr;
    fail(LAUNCH_FAILED, what);
}

void Worker::memory_fault() {
    const char* top = stacks + STACK_STRIDE * MAX_THREADS;
    const auto* at = reinterpret_cast<const char*>(fault_address);
    if (at >= stacks && at < top) fail(LAUNCH_FAILED, "stack overflow");
    if (at >= shared && at < shared + shared_bytes() + 2 * PAGE)
        fail(ILLEGAL_ADDRESS, format("%s outside dynamic shared memory (%zu bytes) at offset %lld", fault_write ? "write" : "read",
                                     launch->dynamic_bytes, (long long)(at - static_cast<char*>(view.dynamic_shared))));
    fail(ILLEGAL_ADDRESS, format("illegal address: %s of ", fault_write ? "write" : "read") + describe_address(fault_address));
}

void meet(ThreadView* self, unsigned mask, WarpOperation operation, void* argument) {
    Lane* lane = static_cast<Lane*>(self);
    lane->warp->worker->meet(lane, mask, operation, argument);
}

void warp_barrier(ThreadView* self, unsigned mask) { meet(self, mask, order_memory, nullptr); }

void block_barrier(ThreadView* self) {
    Lane* lane = static_cast<Lane*>(self);
    lane->warp->worker->barrier(lane);
}

void fault(int code, const char* what) { working->fail(code, what); }
Worker* make_worker(unsigned seed) { return new Worker(seed); }
bool run_block(Worker* worker, const Launch& launch, uint3 index) { return worker->run(launch, index); }

// ---- Memory faults: the signal handler diverts the lane into memory_fault on a stack that surely has room.

namespace {

struct sigaction before;

void on_fault(int number, siginfo_t* info, void* context) {
    Worker* worker = working;
    if (!worker || !worker->running) {  // not a kernel: whoever was there before
        if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(number, info, context);
        if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(number);
        signal(number, SIG_DFL);
        return;
    }
    auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
    auto land = +[] { working->memory_fault(); };
#if defined(__x86_64__)
    worker->note_memory_fault(Address(info->si_addr), machine.gregs[REG_ERR] & 2);
    machine.gregs[REG_RIP] = greg_t(land);
    machine.gregs[REG_RSP] = greg_t(worker->emergency_stack()) - 8;
#else
    worker->note_memory_fault(Address(info->si_addr), false);
    machine.pc = (unsigned long)(land);
    machine.sp = (unsigned long)(worker->emergency_stack());
#endif
}

}  // namespace

void install_fault_handler() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
    sigaction(SIGBUS, &action, nullptr);
}

void ensure_signal_stack() {
    stack_t now;
    sigaltstack(nullptr, &now);
    if (!(now.ss_flags & SS_DISABLE)) return;
    constexpr size_t BYTES = 64 * 1024;
    stack_t fresh = {};
    fresh.ss_sp = malloc(BYTES);
    fresh.ss_size = BYTES;
    sigaltstack(&fresh, nullptr);
}

}  // namespace emu

// ---- Asynchronous copies: kept by the lane that started them until it waits for their group.

using emu::Lane;

void emu_cp_async(void* smem, const void* global, int bytes, bool valid) {
    if ((uintptr_t(smem) | (valid ? uintptr_t(global) : 0)) & uintptr_t(bytes - 1))
        emu::fault(emu::MISALIGNED_ADDRESS, "misaligned cp.async");
    Lane* lane = static_cast<Lane*>(emu::self);
    lane->warp->worker->copies_used = true;
    emu::shadow_copy_starts(smem, size_t(bytes), __builtin_return_address(0));
    lane->copies.push_back({smem, valid ? global : nullptr, bytes, lane->group});
}

void emu_cp_async_commit() {
    Lane* lane = static_cast<Lane*>(emu::self);
    lane->warp->worker->copies_used = true;
    ++lane->group;
}

void emu_cp_async_wait(int pending) {
    Lane* lane = static_cast<Lane*>(emu::self);
    size_t kept = 0;
    for (const emu::PendingCopy& copy : lane->copies) {
        if (copy.group >= lane->group - pending) {
            lane->copies[kept++] = copy;
            continue;
        }
        if (copy.from) memcpy(copy.to, copy.from, size_t(copy.bytes));
        else memset(copy.to, 0, size_t(copy.bytes));
        emu::shadow_copy_lands(copy.to, size_t(copy.bytes));
    }
    lane->copies.resize(kept);
}
