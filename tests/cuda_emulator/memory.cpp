// Device and pinned memory. Every allocation lies between inaccessible pages; the slack that alignment leaves
// inside them holds a canary. Freed addresses stay inaccessible for a long time.
#include "runtime.h"

#include <algorithm>
#include <deque>
#include <map>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emu {

namespace {

constexpr size_t PAGE = 4096, ALIGN = 256, FREED_KEPT = 4096;
constexpr size_t FILLED_WHOLE = 16u << 20, FILLED_ENDS = 1u << 20, PARKED_MOST = 256u << 20;
// What the driver needs of a device's memory for a module or a graph.
constexpr size_t DRIVERS_OWN = 64u << 10;
constexpr char FRESH = char(0xff), CANARY = char(0xa5);

struct Freed {
    Address start;
    size_t bytes;
    char* map;
    size_t map_bytes;
    int device;
};

// The pool of a device keeps what is freed. For cuMemAlloc it counts as used: the driver does not promise to trim the pool.
struct Pool {
    size_t used = 0, kept = 0;
    unsigned long long threshold = 0;
    void keep_at_most(unsigned long long reserved) {
        kept = used + kept <= reserved ? kept : size_t(reserved > used ? reserved - used : 0);
    }
};

struct Tables {
    std::map<Address, Allocation> live;
    std::deque<Freed> freed;
    // Pages of freed allocations by size: a new one moves them in, which costs far less than fresh pages do.
    std::map<size_t, std::vector<char*>> parked;
    size_t parked_bytes = 0;
    size_t used[MAX_DEVICES] = {};
    Pool pools[MAX_DEVICES];
    long allocations = 0, failing_from = setting("QUANTKIT_EMULATOR_FAIL_ALLOC", 0);
    long failing_to = failing_from + setting("QUANTKIT_EMULATOR_FAIL_COUNT", 1);
    int opened_for = -1;
    bool several_devices = false;
    // Fault handlers look here too, from pool threads that do not hold the driver's lock.
    std::mutex lock;
};
Tables& tables() {
    static auto* tables = new Tables;
    return *tables;
}

void set_open(Allocation& allocation, bool open) {
    if (allocation.open == open) return;
    mprotect(allocation.map + PAGE, allocation.map_bytes - 2 * PAGE, open ? PROT_READ | PROT_WRITE : PROT_NONE);
    allocation.open = open;
}

// Makes the pages at `place` accessible, with whatever is in them.
bool open_pages(char* place, size_t bytes) {
    auto& all = tables();
    std::vector<char*>& parked = all.parked[bytes];
    if (parked.empty()) return mprotect(place, bytes, PROT_READ | PROT_WRITE) == 0;
    char* from = parked.back();
    parked.pop_back();
    all.parked_bytes -= bytes;
    return mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) != MAP_FAILED;
}

// Takes the pages away from addresses that stay reserved and inaccessible.
void close_pages(char* place, size_t bytes) {
    auto& all = tables();
#ifdef MREMAP_DONTUNMAP
    if (all.parked_bytes + bytes <= PARKED_MOST) {
        // Not through glibc, which forgets to pass the null address on.
        const long moved = syscall(SYS_mremap, place, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
        if (moved != -1) {
            all.parked[bytes].push_back(reinterpret_cast<char*>(moved));
            all.parked_bytes += bytes;
            mprotect(place, bytes, PROT_NONE);
            return;
        }
    }
#endif
    mmap(place, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

Allocation* holder(Address address) {
    auto& live = tables().live;
    auto after = live.upper_bound(address);
    if (after == live.begin()) return nullptr;
    Allocation& candidate = (--after)->second;
    return address <= candidate.start + candidate.bytes ? &candidate : nullptr;
}

}  // namespace

size_t memory_limit() { return size_t(setting("QUANTKIT_EMULATOR_MEMORY_MB", 4096)) << 20; }
size_t memory_used(int device) { return tables().used[device] + tables().pools[device].kept; }
bool driver_lacks_memory(int device) { return memory_used(device) + DRIVERS_OWN > memory_limit(); }

bool allocation_fails() {
    auto& all = tables();
    const long number = ++all.allocations;
    return all.failing_from > 0 && number >= all.failing_from && number < all.failing_to;
}

void pool_synchronised(int device) { tables().pools[device].keep_at_most(tables().pools[device].threshold); }

int allocate(int device, size_t bytes, Address* start, bool pooled) {
    auto& all = tables();
    if (bytes == 0) return INVALID_VALUE;
    const size_t reused = device >= 0 && pooled ? std::min(bytes, all.pools[device].kept) : 0;
    if (device >= 0 && (allocation_fails() || memory_used(device) - reused + bytes > memory_limit())) return OUT_OF_MEMORY;
    const size_t body = (bytes + PAGE - 1) / PAGE * PAGE, map_bytes = body + 2 * PAGE;
    void* place = mmap(nullptr, map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return OUT_OF_MEMORY;
    auto* map = static_cast<char*>(place);
    if (!open_pages(map + PAGE, body)) {
        munmap(map, map_bytes);
        return OUT_OF_MEMORY;
    }
    // As near to the page behind it as alignment allows.
    char* user = map + PAGE + (body - bytes) / ALIGN * ALIGN;
    memset(map + PAGE, CANARY, size_t(user - map) - PAGE);
    memset(user + bytes, CANARY, size_t(map + PAGE + body - user) - bytes);
    if (bytes <= FILLED_WHOLE) {
        memset(user, FRESH, bytes);
    } else {
        memset(user, FRESH, FILLED_ENDS);
        memset(user + bytes - FILLED_ENDS, FRESH, FILLED_ENDS);
    }
    std::lock_guard<std::mutex> hold(all.lock);
    Allocation& made = all.live[Address(user)] = {Address(user), bytes, map, map_bytes, device, true, pooled};
    if (device >= 0) {
        all.used[device] += bytes;
        all.pools[device].kept -= reused;
        if (pooled) all.pools[device].used += bytes;
        for (int other = 0; other < MAX_DEVICES; ++other) all.several_devices |= other != device && all.used[other] > 0;
        if (all.opened_for >= 0 && !peer_allowed(all.opened_for, device)) set_open(made, false);
    }
    *start = Address(user);
    return SUCCESS;
}

int release(Address start) {
    auto& all = tables();
    auto found = all.live.find(start);
    if (found == all.live.end()) {
        report(format("free of 0x%llx, which is not the start of an allocation", start));
        return INVALID_VALUE;
    }
    Allocation allocation = found->second;
    set_open(allocation, true);
    const bool whole = canaries_whole(allocation, "found when it was freed");
    close_pages(allocation.map + PAGE, allocation.map_bytes - 2 * PAGE);
    std::lock_guard<std::mutex> hold(all.lock);
    all.live.erase(found);
    if (allocation.device >= 0) all.used[allocation.device] -= allocation.bytes;
    if (allocation.pooled) {
        all.pools[allocation.device].used -= allocation.bytes;
        all.pools[allocation.device].kept += allocation.bytes;
    }
    all.freed.push_back({allocation.start, allocation.bytes, allocation.map, allocation.map_bytes, allocation.device});
    if (all.freed.size() > FREED_KEPT) {
        munmap(all.freed.front().map, all.freed.front().map_bytes);
        all.freed.pop_front();
    }
    if (!whole) make_sticky(allocation.device, ILLEGAL_ADDRESS);
    return whole ? SUCCESS : ILLEGAL_ADDRESS;
}

Allocation* holding(Address start, size_t bytes) {
    Allocation* allocation = holder(start);
    return allocation && start + bytes <= allocation->start + allocation->bytes ? allocation : nullptr;
}

bool usable(int device, Address start, size_t bytes, const char* operation) {
    if (bytes == 0) return true;
    const Allocation* allocation = holding(start, bytes);
    if (!allocation) {
        report(format("%s: %zu bytes from ", operation, bytes) + describe_address(start) + " do not lie in one allocation");
        return false;
    }
    if (allocation->device != HOST && !peer_allowed(device, allocation->device)) {
        report(format("%s: memory of device %d used by device %d without peer access", operation, allocation->device, device));
        return false;
    }
    return true;
}

void open_for(int device) {
    auto& all = tables();
    if (all.opened_for == device || !all.several_devices) return;
    all.opened_for = device;
    for (auto& [start, allocation] : all.live)
        set_open(allocation, device < 0 || allocation.device < 0 || peer_allowed(device, allocation.device));
}

Opened::Opened(Allocation* allocation) : allocation(allocation), close(allocation && !allocation->open) {
    if (close) set_open(*allocation, true);
}
Opened::~Opened() {
    if (close) set_open(*allocation, false);
}

bool canaries_whole(const Allocation& allocation, const char* when) {
    if (!allocation.open) return true;
    const char *user = reinterpret_cast<const char*>(allocation.start), *end = user + allocation.bytes;
    const char* last = allocation.map + allocation.map_bytes - PAGE;
    for (const char* at = end; at < last; ++at) {
        if (*at == CANARY) continue;
        report(format("write %zd bytes past the end of an allocation of %zu bytes, %s", at - end, allocation.bytes, when));
        return false;
    }
    for (const char* at = user; at-- > allocation.map + PAGE;) {
        if (*at == CANARY) continue;
        report(format("write %zd bytes before an allocation of %zu bytes, %s", user - at, allocation.bytes, when));
        return false;
    }
    return true;
}

std::string describe_address(Address address) {
    auto& all = tables();
    std::lock_guard<std::mutex> hold(all.lock);
    const std::string at = format("0x%llx", address);
    if (address < PAGE) return at + " (a null pointer)";
    for (auto freed = all.freed.rbegin(); freed != all.freed.rend(); ++freed)
        if (address >= Address(freed->map) && address < Address(freed->map) + freed->map_bytes)
            return at + format(", %lld bytes into freed memory of %zu bytes", (long long)(address - freed->start), freed->bytes);
    for (auto& [start, allocation] : all.live) {
        if (address < Address(allocation.map) || address >= Address(allocation.map) + allocation.map_bytes) continue;
        if (address >= start + allocation.bytes)
            return at + format(", %lld bytes past the end of an allocation of %zu bytes", (long long)(address - start - allocation.bytes), allocation.bytes);
        if (address < start)
            return at + format(", %lld bytes before an allocation of %zu bytes", (long long)(start - address), allocation.bytes);
        if (!allocation.open)
            return at + format(", which is memory of device %d, without peer access", allocation.device);
        return at + format(", %lld bytes into an allocation of %zu bytes", (long long)(address - start), allocation.bytes);
    }
    return at + ", which belongs to no allocation";
}

bool known_address(Address address) {
    auto& all = tables();
    std::lock_guard<std::mutex> hold(all.lock);
    if (address == 0 || holder(address)) return true;
    const auto inside = [=](const char* map, size_t bytes) { return address >= Address(map) && address < Address(map) + bytes; };
    for (auto& [start, allocation] : all.live)
        if (inside(allocation.map, allocation.map_bytes)) return true;
    for (const Freed& freed : all.freed)
        if (inside(freed.map, freed.map_bytes)) return true;
    return false;
}

}  // namespace emu

using namespace emu;

// ---- Entry points for allocation.

EMU_API int cuMemGetInfo_v2(size_t* free, size_t* total) {
    Locked hold(driver_lock());
    if (current_device() < 0) return INVALID_CONTEXT;
    *total = memory_limit();
    *free = *total > memory_used(current_device()) ? *total - memory_used(current_device()) : 0;
    return SUCCESS;
}
EMU_API int cuMemAlloc_v2(Address* start, size_t bytes) {
    Locked hold(driver_lock());
    if (int code = sticky(current_device())) return code;
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    return allocate(current_device(), bytes, start, false);
}
EMU_API int cuMemFree_v2(Address start) {
    Locked hold(driver_lock());
    if (start == 0) return SUCCESS;
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    // Waits for the device, as the driver does.
    if (const Allocation* allocation = holding(start, 0); allocation && allocation->device >= 0) drain_device(allocation->device);
    return release(start);
}
EMU_API int cuMemAllocAsync(Address* start, size_t bytes, void* handle) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (int code = sticky(device_of(stream))) return code;
    if (capturing(stream)) {
        report("cuMemAllocAsync on a stream that is being captured: the emulator has no allocation nodes");
        return NOT_SUPPORTED;
    }
    return allocate(device_of(stream), bytes, start, true);
}
EMU_API int cuMemFreeAsync(Address start, void* handle) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (capturing(stream)) {
        report("cuMemFreeAsync on a stream that is being captured: the emulator has no allocation nodes");
        return NOT_SUPPORTED;
    }
    return submit(stream, [start] { release(start); });
}
EMU_API int cuMemHostAlloc(void** place, size_t bytes, unsigned) {
    Locked hold(driver_lock());
    Address start = 0;
    const int code = allocate(HOST, bytes, &start, false);
    *place = reinterpret_cast<void*>(start);
    return code;
}
EMU_API int cuMemAllocHost_v2(void** place, size_t bytes) { return cuMemHostAlloc(place, bytes, 0); }
EMU_API int cuMemFreeHost(void* place) {
    Locked hold(driver_lock());
    // Queued copies may still use it: the driver waits for all devices.
    for (int device = 0; device < device_count(); ++device) drain_device(device);
    return release(Address(place));
}

// From now on the allocations of device memory with these numbers, from 1, fail; instantiating a graph is one too.
EMU_API void emu_fail_allocations(long first, long count) {
    Locked hold(driver_lock());
    auto& all = tables();
    all.allocations = 0, all.failing_from = first, all.failing_to = first + count;
}
// Allocations since then.
EMU_API long emu_allocations() {
    Locked hold(driver_lock());
    return tables().allocations;
}
// Bytes of device memory that are allocated; what the pool keeps is not.
EMU_API size_t emu_allocated(int device) {
    Locked hold(driver_lock());
    return tables().used[device];
}

// ---- The one memory pool of each device; its handle is its place.

EMU_API int cuDeviceGetDefaultMemPool(void** pool, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *pool = &tables().pools[device];
    return SUCCESS;
}
EMU_API int cuDeviceGetMemPool(void** pool, int device) { return cuDeviceGetDefaultMemPool(pool, device); }

enum PoolAttribute { RELEASE_THRESHOLD = 4, RESERVED_CURRENT = 5, USED_CURRENT = 7 };

EMU_API int cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
    Locked hold(driver_lock());
    if (attribute == RELEASE_THRESHOLD) memcpy(&static_cast<Pool*>(pool)->threshold, value, 8);
    return SUCCESS;
}
EMU_API int cuMemPoolGetAttribute(void* handle, int attribute, void* value) {
    Locked hold(driver_lock());
    const auto* pool = static_cast<const Pool*>(handle);
    const unsigned long long answer = attribute == RELEASE_THRESHOLD  ? pool->threshold
                                      : attribute == RESERVED_CURRENT ? pool->used + pool->kept
                                      : attribute == USED_CURRENT     ? pool->used
                                                                      : 0;
    memcpy(value, &answer, 8);
    return SUCCESS;
}
EMU_API int cuMemPoolTrimTo(void* pool, size_t reserved) {
    Locked hold(driver_lock());
    static_cast<Pool*>(pool)->keep_at_most(reserved);
    return SUCCESS;
}
EMU_API int cuMemPoolSetAccess(void*, const void*, size_t) { return SUCCESS; }
