// Streams, events, capture and graphs. An asynchronous operation is a closure: eager streams run it at once,
// lazy ones when something forces them, capturing ones keep it for the graph.
#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <set>
#include <thread>

namespace emu {

namespace {

struct Graph {
    int device;
    std::vector<Operation> operations;
};

enum CaptureMode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
struct Capture {
    Graph graph;
    CaptureMode mode;
    std::thread::id thread;
    bool spoiled = false;
};

}  // namespace

struct Stream {
    int device;
    bool blocking;  // ordered with the legacy default stream
    bool is_default;
    std::deque<Operation> queue;
    std::unique_ptr<Capture> capture;
};

namespace {

using Clock = std::chrono::steady_clock;
// Shared with the operations that name it, so that a queue survives the destruction of its events.
struct Event {
    bool timed;
    Stream* stream = nullptr;
    bool captured = false;
    long recorded = 0, reached = 0;
    Clock::time_point time;
};
using EventRef = std::shared_ptr<Event>;

struct Tables {
    Stream defaults[MAX_DEVICES];
    std::set<Stream*> streams;
    std::set<EventRef*> events;
    std::set<Graph*> graphs;
    Tables() {
        for (int device = 0; device < MAX_DEVICES; ++device) {
            defaults[device].device = device;
            defaults[device].blocking = defaults[device].is_default = true;
            streams.insert(&defaults[device]);
        }
    }
};
Tables& tables() {
    static auto* tables = new Tables;
    return *tables;
}

void run_first(Stream* stream) {
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    if (!sticky(stream->device)) operation();
}

// Runs the event's stream until the event has been reached as often as `count`.
void reach(Event& event, long count) {
    while (event.reached < count && event.stream && tables().streams.count(event.stream) && !event.stream->queue.empty())
        run_first(event.stream);
}

EventRef* event_of(void* handle) {
    auto* event = static_cast<EventRef*>(handle);
    return tables().events.count(event) ? event : nullptr;
}

}  // namespace

Stream* stream_of(void* handle) {
    if (handle == nullptr || handle == (void*)1 || handle == (void*)2)
        return current_device() < 0 ? nullptr : &tables().defaults[current_device()];
    auto* stream = static_cast<Stream*>(handle);
    return tables().streams.count(stream) ? stream : nullptr;
}
int device_of(const Stream* stream) { return stream->device; }
bool capturing(const Stream* stream) { return stream->capture != nullptr; }

void drain(Stream* stream) {
    while (!stream->queue.empty()) run_first(stream);
}

void drain_device(int device) {
    // From the newest on, so that nothing but events and synchronisation orders streams.
    for (auto stream = tables().streams.rbegin(); stream != tables().streams.rend(); ++stream)
        if ((*stream)->device == device) drain(*stream);
}

int submit(Stream* stream, Operation operation) {
    if (int code = sticky(stream->device)) return code;
    if (stream->capture) {
        stream->capture->graph.operations.push_back(std::move(operation));
        return SUCCESS;
    }
    if (stream->is_default) {
        for (Stream* other : tables().streams)
            if (other->blocking && other->capture && other->device == stream->device) {
                other->capture->spoiled = true;
                return CAPTURE_IMPLICIT;
            }
    }
    if (!lazy()) {
        operation();
        return sticky(stream->device);
    }
    // The legacy default stream and blocking streams wait for each other.
    if (stream->blocking) {
        for (Stream* other : tables().streams)
            if (other != stream && other->device == stream->device && other->blocking && other->is_default != stream->is_default) drain(other);
    }
    stream->queue.push_back(std::move(operation));
    return SUCCESS;
}

bool capture_forbids() {
    bool forbidden = false;
    for (Stream* stream : tables().streams) {
        Capture* capture = stream->capture.get();
        if (!capture || capture->mode == RELAXED) continue;
        if (capture->mode == THREAD_LOCAL && capture->thread != std::this_thread::get_id()) continue;
        if (!capture->spoiled) report("a call that is not allowed while a stream is captured (begin the capture in relaxed mode to allow it)");
        capture->spoiled = forbidden = true;
    }
    return forbidden;
}

bool refused_in_capture(const char* what) {
    for (Stream* stream : tables().streams) {
        Capture* capture = stream->capture.get();
        if (!capture || stream->device != current_device() || capture->thread != std::this_thread::get_id()) continue;
        spoil_capture(stream, what);
        return true;
    }
    return false;
}

void spoil_capture(Stream* stream, const char* what) {
    report(format("%s during stream capture: CUDA does not document this as allowed", what));
    stream->capture->spoiled = true;
}

}  // namespace emu

using namespace emu;

// ---- Streams.

EMU_API int cuStreamCreate(void** handle, unsigned flags) {
    Locked hold(driver_lock());
    if (current_device() < 0) return INVALID_CONTEXT;
    auto* stream = new Stream{current_device(), !(flags & 1), false, {}, nullptr};
    tables().streams.insert(stream);
    *handle = stream;
    return SUCCESS;
}
EMU_API int cuStreamCreateWithPriority(void** handle, unsigned flags, int) { return cuStreamCreate(handle, flags); }
EMU_API int cuStreamDestroy_v2(void* handle) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream || stream->is_default) return INVALID_HANDLE;
    drain(stream);
    tables().streams.erase(stream);
    delete stream;
    return SUCCESS;
}
EMU_API int cuStreamSynchronize(void* handle) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) {
        stream->capture->spoiled = true;
        return CAPTURE_UNSUPPORTED;
    }
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    drain(stream);
    pool_synchronised(stream->device);
    return sticky(stream->device);
}
EMU_API int cuStreamQuery(void* handle) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->queue.empty()) return sticky(stream->device);
    run_first(stream);  // so that asking again and again comes to an end
    return NOT_READY;
}
EMU_API int cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    return submit(stream, [=] { function(data); });
}

// ---- Events.

EMU_API int cuEventCreate(void** handle, unsigned flags) {
    Locked hold(driver_lock());
    auto* event = new EventRef(new Event);
    (*event)->timed = !(flags & 2);
    tables().events.insert(event);
    *handle = event;
    return SUCCESS;
}
EMU_API int cuEventDestroy_v2(void* handle) {
    Locked hold(driver_lock());
    EventRef* event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    tables().events.erase(event);
    delete event;
    return SUCCESS;
}
EMU_API int cuEventRecord(void* handle, void* stream_handle) {
    Locked hold(driver_lock());
    EventRef* event = event_of(handle);
    Stream* stream = stream_of(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    EventRef shared = *event;
    shared->stream = stream;
    shared->captured = stream->capture != nullptr;
    if (shared->captured) {
        return submit(stream, [shared] { shared->time = Clock::now(); });
    }
    const long count = ++shared->recorded;
    return submit(stream, [shared, count] { shared->reached = count, shared->time = Clock::now(); });
}
EMU_API int cuEventRecordWithFlags(void* event, void* stream, unsigned) { return cuEventRecord(event, stream); }
EMU_API int cuStreamWaitEvent(void* stream_handle, void* handle, unsigned) {
    Locked hold(driver_lock());
    EventRef* event = event_of(handle);
    Stream* stream = stream_of(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    EventRef shared = *event;
    if (stream->capture) {
        if (shared->captured && shared->stream == stream) return SUCCESS;
        if (shared->recorded == 0 && !shared->captured) return SUCCESS;
        report("a captured stream waits for an event that was not recorded in its capture");
        stream->capture->spoiled = true;
        return CAPTURE_ISOLATION;
    }
    if (shared->captured) {
        report("a stream waits for an event recorded in another stream's capture: the emulator does not join captures");
        return NOT_SUPPORTED;
    }
    const long count = shared->recorded;
    return submit(stream, [shared, count] { reach(*shared, count); });
}
EMU_API int cuEventSynchronize(void* handle) {
    Locked hold(driver_lock());
    EventRef* event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    EventRef shared = *event;
    reach(*shared, shared->recorded);
    if (shared->stream) pool_synchronised(shared->stream->device);
    return shared->stream ? sticky(shared->stream->device) : SUCCESS;
}
EMU_API int cuEventQuery(void* handle) {
    Locked hold(driver_lock());
    EventRef* event = event_of(handle);
    if (!event) return INVALID_HANDLE;
    if (capture_forbids()) return CAPTURE_UNSUPPORTED;
    Event& found = **event;
    if (found.reached >= found.recorded) return found.stream ? sticky(found.stream->device) : SUCCESS;
    if (found.stream && !found.stream->queue.empty()) run_first(found.stream);
    return NOT_READY;
}
EMU_API int cuEventElapsedTime_v2(float* milliseconds, void* begin, void* end) {
    Locked hold(driver_lock());
    EventRef *first = event_of(begin), *second = event_of(end);
    if (!first || !second || !(*first)->timed || !(*second)->timed || !(*first)->recorded || !(*second)->recorded) return INVALID_HANDLE;
    if ((*first)->reached < (*first)->recorded || (*second)->reached < (*second)->recorded) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>((*second)->time - (*first)->time).count();
    return SUCCESS;
}
EMU_API int cuEventElapsedTime(float* milliseconds, void* begin, void* end) { return cuEventElapsedTime_v2(milliseconds, begin, end); }

// ---- Capture and graphs.

EMU_API int cuStreamBeginCapture_v2(void* handle, int mode) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (mode < GLOBAL || mode > RELAXED) return INVALID_VALUE;
    if (stream->is_default) {
        report("the default stream cannot be captured");
        return CAPTURE_UNSUPPORTED;
    }
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    stream->capture.reset(new Capture{{stream->device, {}}, CaptureMode(mode), std::this_thread::get_id()});
    return SUCCESS;
}
EMU_API int cuStreamEndCapture(void* handle, void** graph) {
    Locked hold(driver_lock());
    *graph = nullptr;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    if (!stream->capture) return CAPTURE_UNMATCHED;
    const std::unique_ptr<Capture> capture = std::move(stream->capture);
    if (capture->spoiled) return CAPTURE_INVALIDATED;
    auto* made = new Graph(std::move(capture->graph));
    tables().graphs.insert(made);
    *graph = made;
    return SUCCESS;
}
EMU_API int cuStreamIsCapturing(void* handle, int* status) {
    Locked hold(driver_lock());
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    *status = !stream->capture ? 0 : stream->capture->spoiled ? 2 : 1;
    return SUCCESS;
}
EMU_API int cuGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long) {
    Locked hold(driver_lock());
    auto* graph = static_cast<Graph*>(handle);
    if (!tables().graphs.count(graph)) return INVALID_HANDLE;
    if (allocation_fails() || driver_lacks_memory(graph->device)) return OUT_OF_MEMORY;
    auto* made = new Graph(*graph);
    tables().graphs.insert(made);
    *executable = made;
    return SUCCESS;
}
EMU_API int cuGraphUpload(void*, void*) { return SUCCESS; }
EMU_API int cuGraphLaunch(void* handle, void* stream_handle) {
    Locked hold(driver_lock());
    auto* graph = static_cast<Graph*>(handle);
    Stream* stream = stream_of(stream_handle);
    if (!stream || !tables().graphs.count(graph) || graph->device != stream->device) return INVALID_HANDLE;
    for (const Operation& operation : graph->operations)
        if (int code = submit(stream, operation)) return code;
    return SUCCESS;
}
EMU_API int cuGraphDestroy(void* handle) {
    Locked hold(driver_lock());
    auto* graph = static_cast<Graph*>(handle);
    if (!tables().graphs.erase(graph)) return INVALID_HANDLE;
    delete graph;
    return SUCCESS;
}
EMU_API int cuGraphExecDestroy(void* handle) { return cuGraphDestroy(handle); }
EMU_API int cuGraphGetNodes(void* handle, void**, size_t* count) {
    Locked hold(driver_lock());
    auto* graph = static_cast<Graph*>(handle);
    if (!tables().graphs.count(graph)) return INVALID_HANDLE;
    *count = graph->operations.size();
    return SUCCESS;
}
