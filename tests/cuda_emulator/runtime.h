// What the emulator's own files share: fibers, memory, streams, reports. Kernels see only include/.
#pragma once
#include <cuda_emulator.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace emu {

// ---- CUresult values the emulator returns.
enum Code : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    FILE_NOT_FOUND = 301,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
};

using Address = unsigned long long;
constexpr int MAX_DEVICES = 16;

// ---- device.cpp: settings, devices, reports, sticky errors.

long setting(const char* name, long otherwise);
enum class Order { Forward, Reverse, Random };
Order order();
bool lazy();
bool checked();
// How many products tensor cores add at once, and the bits kept after the first; null where sums are rounded to nearest.
struct Truncation {
    int products, bits;
};
const Truncation* truncation();
int device_count();
// The device of the calling thread's current context, or -1.
int current_device();
void set_current_device(int device);
int context_device(const void* context);
bool peer_allowed(int from, int to);
// Prints "[cuda emulator] what" and keeps it for emu_last_report.
void report(const std::string& what);
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
// The first error of a device stays.
void make_sticky(int device, int code);
int sticky(int device);
// One lock for everything the driver's entry points change; operations of streams run under it.
std::recursive_mutex& driver_lock();
using Locked = std::lock_guard<std::recursive_mutex>;

// ---- memory.cpp: device and pinned memory between inaccessible pages.

constexpr int HOST = -1;
struct Allocation {
    Address start;
    size_t bytes;
    char* map;
    size_t map_bytes;
    int device;  // HOST for pinned memory
    bool open;   // accessible now
    bool pooled; // from the device's pool
};
int allocate(int device, size_t bytes, Address* start, bool pooled);
// Counts an allocation of device memory; whether it is one that a test wants to fail.
bool allocation_fails();
// The pool gives back what it keeps beyond its threshold, as at every synchronisation.
void pool_synchronised(int device);
int release(Address start);
// The live allocation that holds all of the range, or null.
Allocation* holding(Address start, size_t bytes);
// Whether an operation on `device` may touch the range; reports if not.
bool usable(int device, Address start, size_t bytes, const char* operation);
// Opens the memory a kernel on `device` may touch and closes the rest (only where several devices own some).
void open_for(int device);
// Opens one allocation for a copy.
struct Opened {
    explicit Opened(Allocation* allocation);
    ~Opened();
    Allocation* allocation;
    bool close;
};
// Reports writes into the slack around an allocation; true if there were none.
bool canaries_whole(const Allocation& allocation, const char* when);
std::string describe_address(Address address);
// Whether the address is null, or in or beside device or pinned memory, live or freed.
bool known_address(Address address);
size_t memory_used(int device);
// Whether the driver has too little memory of the device for things of its own: modules and graphs.
bool driver_lacks_memory(int device);
size_t memory_limit();

// ---- streams.cpp

using Operation = std::function<void()>;
struct Stream;
Stream* stream_of(void* handle);  // null if the handle is none
int device_of(const Stream* stream);
bool capturing(const Stream* stream);
// Records the operation (capture), queues it (lazy) or runs it (eager).
int submit(Stream* stream, Operation operation);
void drain(Stream* stream);
void drain_device(int device);
// Whether a capture under way forbids calls that may wait for the device; such a call spoils that capture.
bool capture_forbids();
// Whether the calling thread is recording on its device: `what` is reported as out of place there, and spoils the capture.
bool refused_in_capture(const char* what);
// Reports `what` as out of place on a stream that is being captured, and spoils the capture.
void spoil_capture(Stream* stream, const char* what);

// ---- modules.cpp

const std::vector<Kernel>& kernels();

// ---- fibers.cpp, pool.cpp: running kernels.

struct Launch {
    const Kernel* kernel;
    void* const* arguments;
    dim3 grid, block;
    size_t dynamic_bytes;
    int device;
    Order order;
};
class Worker;
// Workers belong to the pool; a worker runs one block at a time on the calling OS thread.
Worker* make_worker(unsigned seed);
bool run_block(Worker* worker, const Launch& launch, uint3 index);
void run_kernel(const Launch& launch);
// Calls job(0) ... job(count - 1) on the pool's threads and the caller.
void run_parallel(long count, const std::function<void(long)>& job);
void install_fault_handler();
// A signal stack for this OS thread, if it has none.
void ensure_signal_stack();
// This OS thread's static shared memory (static_shared.cpp), and with it what the scheduler keeps for each thread.
struct StaticShared {
    char* start;
    size_t bytes;
};
StaticShared static_shared();
// Fills it with 0xff.
void wipe_static_shared();

// ---- races.cpp: accesses to shared memory that no barrier orders. A worker of the checked build has a shadow, which
// the view of its block names; the functions without one do nothing where there is none.

Shadow* make_shadow(const char* dynamic_map, size_t dynamic_bytes);
void shadow_begins(Shadow* shadow);  // another block
void shadow_block_barrier(Shadow* shadow);
void shadow_warp_barrier(Shadow* shadow, unsigned warp);
// By the running lane; `code` is an address in the code that did it.
void shadow_read(const void* address, size_t bytes, const void* code);
void shadow_copy_starts(const void* address, size_t bytes, const void* code);
void shadow_copy_lands(const void* address, size_t bytes);
// The block has ended before the copy was waited for.
void shadow_copy_dropped(Shadow* shadow, const void* address, size_t bytes);

}  // namespace emu
