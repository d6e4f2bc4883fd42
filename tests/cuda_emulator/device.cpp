// Settings, reports, errors, devices and contexts.
#include "runtime.h"

#include <atomic>
#include <cstdarg>
#include <cstdlib>

namespace emu {

long setting(const char* name, long otherwise) {
    const char* text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

static bool setting_is(const char* name, const char* word) {
    const char* text = getenv(name);
    return text && !strcmp(text, word);
}

// ---- Reports.

static std::mutex report_lock;
static std::string& last_report() {
    static std::string* text = new std::string;
    return *text;
}

void report(const std::string& what) {
    std::lock_guard<std::mutex> hold(report_lock);
    last_report() = what;
    fprintf(stderr, "[cuda emulator] %s\n", what.c_str());
}

std::string format(const char* pattern, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

Order order() {
    if (setting_is("QUANTKIT_EMULATOR_ORDER", "reverse")) return Order::Reverse;
    if (setting_is("QUANTKIT_EMULATOR_ORDER", "random")) return Order::Random;
    return Order::Forward;
}

bool lazy() { return setting_is("QUANTKIT_EMULATOR_SCHEDULE", "lazy"); }
bool checked() { return setting_is("QUANTKIT_EMULATOR_CHECKED", "1"); }

const Truncation* truncation() {
    static const Truncation ampere{8, 24}, hopper{16, 25};
    static const Truncation* chosen = setting_is("QUANTKIT_EMULATOR_MMA", "ampere")   ? &ampere
                                      : setting_is("QUANTKIT_EMULATOR_MMA", "hopper") ? &hopper
                                                                                      : nullptr;
    return chosen;
}

std::recursive_mutex& driver_lock() {
    static auto* lock = new std::recursive_mutex;
    return *lock;
}

// ---- Devices: each has one (primary) context, whose address is its handle.

namespace {

struct Device {
    std::atomic<int> sticky{0};
    bool peers[MAX_DEVICES] = {};
};
Device devices[MAX_DEVICES];
thread_local int current = -1;
std::atomic<bool> initialised{false};

}  // namespace

int device_count() {
    static const long count = setting("QUANTKIT_EMULATOR_DEVICES", 1);
    return int(count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count);
}

int current_device() { return current; }
void set_current_device(int device) { current = device; }
int context_device(const void* context) {
    const auto* device = static_cast<const Device*>(context);
    return device >= devices && device < devices + device_count() ? int(device - devices) : -1;
}
bool peer_allowed(int from, int to) { return from == to || (from >= 0 && to >= 0 && devices[from].peers[to]); }
void make_sticky(int device, int code) {
    int none = 0;
    devices[device < 0 ? 0 : device].sticky.compare_exchange_strong(none, code);
}
int sticky(int device) { return device < 0 ? INVALID_CONTEXT : devices[device].sticky.load(); }

}  // namespace emu

using namespace emu;

// Copies the last report, or "", into `text`.
EMU_API void emu_last_report(char* text, size_t room) {
    std::lock_guard<std::mutex> hold(report_lock);
    snprintf(text, room, "%s", last_report().c_str());
}

EMU_API int cuInit(unsigned) {
    if (device_count() == 0) return NO_DEVICE;
    static std::once_flag once;
    std::call_once(once, install_fault_handler);
    initialised = true;
    return SUCCESS;
}
EMU_API int cuDriverGetVersion(int* version) {
    *version = int(setting("QUANTKIT_EMULATOR_DRIVER", 13000));
    return SUCCESS;
}
EMU_API int cuDeviceGetCount(int* count) {
    if (!initialised) return NOT_INITIALIZED;
    *count = device_count();
    return SUCCESS;
}
EMU_API int cuDeviceGet(int* device, int ordinal) {
    if (!initialised) return NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= device_count()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
EMU_API int cuDeviceGetName(char* name, int length, int) {
    snprintf(name, size_t(length), "CPU emulator of CUDA (no GPU)");
    return SUCCESS;
}
EMU_API int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    memset(uuid, 0, 16);
    uuid[0] = 0xce, uuid[15] = (unsigned char)device;
    return SUCCESS;
}
EMU_API int cuDeviceGetUuid(unsigned char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
EMU_API int cuDeviceTotalMem_v2(size_t* bytes, int) {
    *bytes = memory_limit();
    return SUCCESS;
}
EMU_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    switch (attribute) {
        case 1: case 2: case 3: *value = 1024; break;   // threads per block, block x, y
        case 4: *value = 64; break;                     // block z
        case 5: *value = 2147483647; break;             // grid x
        case 6: case 7: *value = 65535; break;          // grid y, z
        case 8: *value = 48 * 1024; break;              // shared memory per block
        case 10: *value = 32; break;                    // warp size
        case 12: case 82: *value = 65536; break;        // registers per block, per multiprocessor
        case 16: *value = int(setting("QUANTKIT_EMULATOR_MULTIPROCESSORS", 4)); break;
        case 31: case 40: case 41: *value = 1; break;   // concurrent kernels, copy engines, unified addressing
        case 33: *value = device; break;                // PCI bus
        case 38: *value = 4 << 20; break;               // second-level cache
        case 39: *value = 2048; break;                  // threads per multiprocessor
        case 75: *value = int(setting("QUANTKIT_EMULATOR_CAPABILITY", 80)) / 10; break;
        case 76: *value = int(setting("QUANTKIT_EMULATOR_CAPABILITY", 80)) % 10; break;
        case 81: *value = 100 * 1024; break;            // shared memory per multiprocessor
        case 97: *value = 99 * 1024; break;             // shared memory per block, at most
        case 106: *value = 32; break;                   // blocks per multiprocessor
        case 115: *value = int(setting("QUANTKIT_EMULATOR_POOLS", 1)); break;
        default: *value = 0;
    }
    return SUCCESS;
}

EMU_API int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (!initialised) return NOT_INITIALIZED;
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *context = &devices[device];
    return SUCCESS;
}
EMU_API int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
EMU_API int cuCtxSetCurrent(void* context) {
    current = context ? context_device(context) : -1;
    return context && current < 0 ? INVALID_CONTEXT : SUCCESS;
}
EMU_API int cuCtxGetCurrent(void** context) {
    *context = current < 0 ? nullptr : &devices[current];
    return SUCCESS;
}
EMU_API int cuCtxGetDevice(int* device) {
    *device = current;
    return current < 0 ? INVALID_CONTEXT : SUCCESS;
}
EMU_API int cuCtxSetFlags(unsigned) { return SUCCESS; }
EMU_API int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return SUCCESS;
}
EMU_API int cuCtxSynchronize() {
    Locked hold(driver_lock());
    if (current < 0) return INVALID_CONTEXT;
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    drain_device(current);
    pool_synchronised(current);
    return sticky(current);
}

EMU_API int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer && setting("QUANTKIT_EMULATOR_PEERS", 1);
    return SUCCESS;
}
EMU_API int cuCtxEnablePeerAccess(void* peer_context, unsigned) {
    Locked hold(driver_lock());
    const int peer = context_device(peer_context);
    if (current < 0 || peer < 0) return INVALID_CONTEXT;
    if (peer == current || !setting("QUANTKIT_EMULATOR_PEERS", 1)) return INVALID_DEVICE;
    if (devices[current].peers[peer]) return PEER_ACCESS_ALREADY_ENABLED;
    devices[current].peers[peer] = true;
    open_for(-1);  // what is open is decided anew at the next launch
    return SUCCESS;
}

static const struct {
    int code;
    const char *name, *text;
} CODES[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not initiated in this stream"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
};
EMU_API int cuGetErrorName(int code, const char** name) {
    for (const auto& row : CODES)
        if (row.code == code) return *name = row.name, SUCCESS;
    *name = "CUDA_ERROR_UNKNOWN";
    return INVALID_VALUE;
}
EMU_API int cuGetErrorString(int code, const char** text) {
    for (const auto& row : CODES)
        if (row.code == code) return *text = row.text, SUCCESS;
    *text = "unknown error";
    return INVALID_VALUE;
}
