// Copies and fills. Ranges are checked when they are asked for and again when they run, since a stream may come
// to them after the memory was freed.
#include "runtime.h"

using namespace emu;

namespace {

// Host memory as the driver sees it: pinned memory is read and written when the stream comes to it; from
// ordinary memory the driver takes a copy at once. A capture would keep the pointer, and refuses it.
bool pinned(const void* host, size_t bytes) {
    const Allocation* allocation = holding(Address(host), bytes);
    return allocation && allocation->device == HOST;
}

void run_checked(int device, Address range, size_t bytes, const char* name, const std::function<void()>& body) {
    if (!usable(device, range, bytes, name)) return make_sticky(device, ILLEGAL_ADDRESS);
    Opened opened(holding(range, bytes));
    body();
}

int to_device(Address to, const void* from, size_t bytes, Stream* stream) {
    const char* name = "copy to the device";
    if (!stream) return INVALID_HANDLE;
    const int device = device_of(stream);
    if (int code = sticky(device)) return code;
    if (!usable(device, to, bytes, name)) return INVALID_VALUE;
    if (capturing(stream) && !pinned(from, bytes)) {
        spoil_capture(stream, "a copy from pageable host memory");
        return CAPTURE_UNSUPPORTED;
    }
    if (pinned(from, bytes) || !lazy())
        return submit(stream, [=] { run_checked(device, to, bytes, name, [=] { memcpy((void*)to, from, bytes); }); });
    auto* bytes_now = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes_now, bytes_now + bytes);
    return submit(stream, [=] { run_checked(device, to, bytes, name, [=] { memcpy((void*)to, staged->data(), bytes); }); });
}

int to_host(void* to, Address from, size_t bytes, Stream* stream, bool wait) {
    const char* name = "copy from the device";
    if (!stream) return INVALID_HANDLE;
    const int device = device_of(stream);
    if (int code = sticky(device)) return code;
    if (!usable(device, from, bytes, name)) return INVALID_VALUE;
    const int code = submit(stream, [=] { run_checked(device, from, bytes, name, [=] { memcpy(to, (const void*)from, bytes); }); });
    if (code || capturing(stream)) return code;
    // A copy into ordinary memory is done when the call returns.
    if (wait || !pinned(to, bytes)) drain(stream);
    return sticky(device);
}

int between(Address to, Address from, size_t bytes, Stream* stream, int to_device, int from_device, const char* name) {
    if (!stream) return INVALID_HANDLE;
    if (int code = sticky(device_of(stream))) return code;
    if (!usable(to_device, to, bytes, name) || !usable(from_device, from, bytes, name)) return INVALID_VALUE;
    return submit(stream, [=] {
        run_checked(to_device, to, bytes, name, [=] {
            run_checked(from_device, from, bytes, name, [=] { memmove((void*)to, (const void*)from, bytes); });
        });
    });
}

template <class T>
int fill(Address to, T value, size_t count, Stream* stream) {
    const char* name = "memset";
    if (!stream) return INVALID_HANDLE;
    const int device = device_of(stream);
    const size_t bytes = count * sizeof(T);
    if (int code = sticky(device)) return code;
    if (to % sizeof(T) || !usable(device, to, bytes, name)) return INVALID_VALUE;
    return submit(stream, [=] {
        run_checked(device, to, bytes, name, [=] {
            for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(to)[i] = value;
        });
    });
}

}  // namespace

EMU_API int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    Locked hold(driver_lock());
    return to_device(to, from, bytes, stream_of(stream));
}
EMU_API int cuMemcpyHtoD_v2(Address to, const void* from, size_t bytes) {
    Locked hold(driver_lock());
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    Stream* stream = stream_of(nullptr);
    const int code = to_device(to, from, bytes, stream);
    if (code == SUCCESS) drain(stream);
    return code;
}
EMU_API int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    Locked hold(driver_lock());
    return to_host(to, from, bytes, stream_of(stream), false);
}
EMU_API int cuMemcpyDtoH_v2(void* to, Address from, size_t bytes) {
    Locked hold(driver_lock());
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    return to_host(to, from, bytes, stream_of(nullptr), true);
}
EMU_API int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* handle) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    const int device = stream ? device_of(stream) : -1;
    return between(to, from, bytes, stream, device, device, "copy on the device");
}
EMU_API int cuMemcpyDtoD_v2(Address to, Address from, size_t bytes) { return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr); }
// Goes through the host where there is no peer access, so none is needed.
EMU_API int cuMemcpyPeerAsync(Address to, void* to_context, Address from, void* from_context, size_t bytes, void* handle) {
    Locked hold(driver_lock());
    const int to_device = context_device(to_context), from_device = context_device(from_context);
    if (to_device < 0 || from_device < 0) return INVALID_CONTEXT;
    return between(to, from, bytes, stream_of(handle), to_device, from_device, "copy between devices");
}
EMU_API int cuMemsetD8Async(Address to, unsigned char value, size_t count, void* stream) {
    Locked hold(driver_lock());
    return fill(to, value, count, stream_of(stream));
}
EMU_API int cuMemsetD32Async(Address to, unsigned value, size_t count, void* stream) {
    Locked hold(driver_lock());
    return fill(to, value, count, stream_of(stream));
}
EMU_API int cuMemsetD8_v2(Address to, unsigned char value, size_t count) { return cuMemsetD8Async(to, value, count, nullptr); }
EMU_API int cuMemsetD32_v2(Address to, unsigned value, size_t count) { return cuMemsetD32Async(to, value, count, nullptr); }
