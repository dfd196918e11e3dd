#include "streams.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "device.h"
#include "errors.h"

namespace emulator::runtime {
namespace {

using Clock = std::chrono::steady_clock;

struct Capture {
    unsigned long long id;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    cudaStream_t origin;
    std::unique_ptr<Graph> graph = std::make_unique<Graph>();
    bool is_valid = true;
};

// A stream's or event's position in a capture: the nodes that the next one depends on. `capture` is nullptr outside.
struct Position {
    std::shared_ptr<Capture> capture;
    std::vector<Node*> last;

    void add(const std::vector<Node*>& others) {
        for (Node* node : others) {
            if (std::find(last.begin(), last.end(), node) == last.end()) last.push_back(node);
        }
    }
};

struct Stream {
    int device, priority;
    unsigned flags;
    Position position;
};

struct Event {
    int device;
    unsigned flags;
    Position position;
    Clock::time_point recorded{};
    bool is_recorded = false;
};

// The object that a cudaGraphExec_t points to: a copy of the graph with its own references.
using GraphExec = Graph;

void destroy(const UserObject* object) {
    object->destroy(object->object);
    delete object;
}

std::recursive_mutex mutex;  // protects all that follows
std::map<cudaStream_t, std::unique_ptr<Stream>> streams;
std::map<cudaEvent_t, std::unique_ptr<Event>> events;
std::map<cudaGraph_t, std::unique_ptr<Graph>> graphs;
std::map<cudaGraphExec_t, std::unique_ptr<GraphExec>> executables;
std::map<cudaUserObject_t, std::shared_ptr<UserObject>> objects;  // those that host code refers to
std::set<std::shared_ptr<Capture>> captures;
std::map<std::pair<int, cudaStream_t>, std::shared_ptr<PastAccesses>> accesses;  // by device and stream
unsigned long long num_captures = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool is_default(cudaStream_t stream) {
    return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

template <typename Handle, typename Object>
Object* find(const std::map<Handle, std::unique_ptr<Object>>& objects, Handle handle) {
    const auto found = objects.find(handle);
    return found == objects.end() ? nullptr : found->second.get();
}

template <typename Handle, typename Object>
Handle add(std::map<Handle, std::unique_ptr<Object>>& objects, std::unique_ptr<Object> object) {
    const auto handle = reinterpret_cast<Handle>(object.get());
    objects[handle] = std::move(object);
    return handle;
}

cudaError_t fail_handle(const char* what) {
    return fail(cudaErrorInvalidResourceHandle, std::string("invalid resource handle: there is no such ") + what);
}

// Finds a stream's state: nullptr for a default stream, which is never captured.
cudaError_t find_stream(cudaStream_t handle, Stream*& stream) {
    stream = is_default(handle) ? nullptr : find(streams, handle);
    return stream == nullptr && !is_default(handle) ? fail_handle("stream") : cudaSuccess;
}

cudaError_t fail_captured(const std::string& what) {
    return fail(cudaErrorStreamCaptureUnsupported, what + " is not allowed while a stream is being captured");
}

bool forbids(const Capture& capture) {
    const bool is_own = capture.thread == std::this_thread::get_id();
    switch (thread_mode) {
        case cudaStreamCaptureModeGlobal:
            return is_own ? capture.mode != cudaStreamCaptureModeRelaxed : capture.mode == cudaStreamCaptureModeGlobal;
        case cudaStreamCaptureModeThreadLocal:
            return is_own && capture.mode != cudaStreamCaptureModeRelaxed;
        default:
            return false;
    }
}

// Returns true if all nodes of the graph are among these nodes and their dependencies.
bool is_joined(const Graph& graph, const std::vector<Node*>& last) {
    std::set<const Node*> reached;
    std::vector<const Node*> left(last.begin(), last.end());
    while (!left.empty()) {
        const Node* node = left.back();
        left.pop_back();
        if (reached.insert(node).second) left.insert(left.end(), node->dependencies.begin(), node->dependencies.end());
    }
    return reached.size() == graph.nodes.size();
}

// Ends a capture: removes it from the positions of all streams and events.
void forget(const std::shared_ptr<Capture>& capture) {
    captures.erase(capture);
    for (auto& [handle, stream] : streams) {
        if (stream->position.capture == capture) stream->position = {};
    }
    for (auto& [handle, event] : events) {
        if (event->position.capture == capture) event->position = {};
    }
}

}  // namespace

cudaError_t submit(cudaStream_t handle, const std::string& what, Work work, bool needs_own_device) {
    bind_context();
    if (!needs_own_device) {  // not a kernel: it orders the kernels before and after it
        work = [handle, work = std::move(work)] {
            take_accesses(handle);
            return work();
        };
    }
    {
        const std::lock_guard lock(mutex);
        Stream* stream;
        if (const cudaError_t error = find_stream(handle, stream); error != cudaSuccess) return error;
        if (stream != nullptr && needs_own_device && stream->device != device_index()) {
            return fail(cudaErrorInvalidResourceHandle, "invalid resource handle: " + what + " on a stream of device " +
                                                            std::to_string(stream->device) + " while device " +
                                                            std::to_string(device_index()) + " is current");
        }
        if (stream != nullptr && stream->position.capture != nullptr) {
            Position& position = stream->position;
            if (!position.capture->is_valid) return fail(cudaErrorStreamCaptureInvalidated);
            auto node = std::make_shared<Node>(Node{what, device_index(), std::move(work), position.last});
            position.last = {node.get()};
            position.capture->graph->nodes.push_back(std::move(node));
            return cudaSuccess;
        }
    }
    return work();
}

void keep_accesses(cudaStream_t stream, std::shared_ptr<PastAccesses> kept) {
    const std::lock_guard lock(mutex);
    accesses[{device_index(), stream}] = std::move(kept);
}

std::shared_ptr<PastAccesses> take_accesses(cudaStream_t stream) {
    const std::lock_guard lock(mutex);
    return std::exchange(accesses[{device_index(), stream}], nullptr);
}

cudaError_t check_allowed_now(const std::string& what) {
    const std::lock_guard lock(mutex);
    accesses.clear();
    bool is_forbidden = false;
    for (const auto& capture : captures) {
        if (!forbids(*capture)) continue;
        capture->is_valid = false;
        is_forbidden = true;
    }
    return is_forbidden ? fail_captured(what) : cudaSuccess;
}

}  // namespace emulator::runtime

using namespace emulator::runtime;

// --- Streams ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    bind_context();
    const std::lock_guard lock(mutex);
    *stream = add(streams, std::make_unique<Stream>(Stream{device_index(), priority, flags, {}}));
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const std::lock_guard lock(mutex);
    accesses.clear();  // a new stream may get the same handle
    return streams.erase(stream) == 0 ? fail_handle("stream") : cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    const std::lock_guard lock(mutex);
    Stream* stream;
    if (const cudaError_t error = find_stream(handle, stream); error != cudaSuccess) return error;
    *priority = stream == nullptr ? 0 : stream->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    const std::lock_guard lock(mutex);
    Stream* stream;
    if (const cudaError_t error = find_stream(handle, stream); error != cudaSuccess) return error;
    if (stream == nullptr) return check_allowed_now("synchronising with the default stream");
    if (stream->position.capture == nullptr) {
        accesses.clear();
        return cudaSuccess;
    }
    stream->position.capture->is_valid = false;
    return fail_captured("synchronising with a captured stream");
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return cudaStreamSynchronize(handle);
}

cudaError_t cudaDeviceSynchronize() {
    return check_allowed_now("synchronising with the device");
}

// --- Events ---

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    const std::lock_guard lock(mutex);
    *event = add(events, std::make_unique<Event>(Event{device_index(), flags, {}}));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const std::lock_guard lock(mutex);
    return events.erase(event) == 0 ? fail_handle("event") : cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event_handle, cudaStream_t stream_handle) {
    const std::lock_guard lock(mutex);
    Event* const event = find(events, event_handle);
    if (event == nullptr) return fail_handle("event");
    Stream* stream;
    if (const cudaError_t error = find_stream(stream_handle, stream); error != cudaSuccess) return error;
    const int device = stream == nullptr ? device_index() : stream->device;
    if (device != event->device) {
        return fail(cudaErrorInvalidResourceHandle, "invalid resource handle: an event of device " +
                                                        std::to_string(event->device) + " on a stream of device " +
                                                        std::to_string(device));
    }
    event->position = stream == nullptr ? Position{} : stream->position;
    event->recorded = Clock::now();
    event->is_recorded = true;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
    const std::lock_guard lock(mutex);
    const Event* const event = find(events, event_handle);
    if (event == nullptr) return fail_handle("event");
    Stream* stream;
    if (const cudaError_t error = find_stream(stream_handle, stream); error != cudaSuccess) return error;
    const auto& capture = event->position.capture;
    if (stream == nullptr) {
        if (capture == nullptr) return cudaSuccess;
        capture->is_valid = false;
        return fail(cudaErrorStreamCaptureImplicit, "the default stream waits for an event of a capture");
    }
    Position& position = stream->position;
    if (capture == nullptr) {
        if (position.capture == nullptr || !event->is_recorded) return cudaSuccess;
        position.capture->is_valid = false;
        return fail(cudaErrorStreamCaptureIsolation,
                    "a captured stream waits for an event from outside of the capture");
    }
    if (position.capture != nullptr && position.capture != capture) {
        position.capture->is_valid = capture->is_valid = false;
        return fail(cudaErrorStreamCaptureMerge, "two captures would become one");
    }
    position.capture = capture;
    position.add(event->position.last);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const std::lock_guard lock(mutex);
    const Event* const event = find(events, handle);
    if (event == nullptr) return fail_handle("event");
    if (event->position.capture == nullptr) return check_allowed_now("waiting for an event");
    event->position.capture->is_valid = false;
    return fail(cudaErrorCapturedEvent, "waiting for an event of a capture is not allowed");
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    return cudaEventSynchronize(handle);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
    const std::lock_guard lock(mutex);
    const Event *const from = find(events, first), *const to = find(events, second);
    if (from == nullptr || to == nullptr || !from->is_recorded || !to->is_recorded)
        return fail_handle("recorded event");
    if (((from->flags | to->flags) & cudaEventDisableTiming) != 0) {
        return fail(cudaErrorInvalidResourceHandle, "invalid resource handle: the event was made without timing");
    }
    *milliseconds = std::chrono::duration<float, std::milli>(to->recorded - from->recorded).count();
    return cudaSuccess;
}

// --- Captures ---

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    const std::lock_guard lock(mutex);
    Stream* stream;
    if (const cudaError_t error = find_stream(handle, stream); error != cudaSuccess) return error;
    if (stream == nullptr) return fail(cudaErrorStreamCaptureUnsupported, "the default stream cannot be captured");
    if (stream->position.capture != nullptr) return fail(cudaErrorIllegalState, "the stream is being captured already");
    stream->position.capture =
        std::make_shared<Capture>(Capture{++num_captures, mode, std::this_thread::get_id(), handle});
    captures.insert(stream->position.capture);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    const std::lock_guard lock(mutex);
    *graph = nullptr;
    Stream* stream;
    if (const cudaError_t error = find_stream(handle, stream); error != cudaSuccess) return error;
    if (stream == nullptr || stream->position.capture == nullptr) {
        return fail(cudaErrorIllegalState, "the stream is not being captured");
    }
    const std::shared_ptr<Capture> capture = stream->position.capture;
    if (capture->origin != handle) {
        capture->is_valid = false;
        return fail(cudaErrorStreamCaptureUnmatched, "the capture began on another stream");
    }
    const bool joined = is_joined(*capture->graph, stream->position.last);
    forget(capture);
    if (!capture->is_valid) return fail(cudaErrorStreamCaptureInvalidated);
    if (!joined) {
        return fail(cudaErrorStreamCaptureUnjoined,
                    "work of another stream was captured that this one does not wait for");
    }
    *graph = add(graphs, std::move(capture->graph));
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* num_dependencies) {
    const std::lock_guard lock(mutex);
    Stream* stream;
    if (const cudaError_t error = find_stream(handle, stream); error != cudaSuccess) return error;
    Capture* const capture = stream == nullptr ? nullptr : stream->position.capture.get();
    *status = capture == nullptr  ? cudaStreamCaptureStatusNone
              : capture->is_valid ? cudaStreamCaptureStatusActive
                                  : cudaStreamCaptureStatusInvalidated;
    if (edges != nullptr) *edges = nullptr;
    if (capture == nullptr) return cudaSuccess;
    if (id != nullptr) *id = capture->id;
    if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(capture->graph.get());
    auto& last = stream->position.last;
    if (dependencies != nullptr) *dependencies = reinterpret_cast<const cudaGraphNode_t*>(last.data());
    if (num_dependencies != nullptr) *num_dependencies = last.size();
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

// --- Graphs ---

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t handle, unsigned long long) {
    const std::lock_guard lock(mutex);
    const Graph* const graph = find(graphs, handle);
    if (graph == nullptr) return fail_handle("graph");
    *executable = add(executables, std::make_unique<GraphExec>(*graph));
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    std::vector<std::shared_ptr<Node>> nodes;
    {
        const std::lock_guard lock(mutex);
        const GraphExec* const executable = find(executables, handle);
        if (executable == nullptr) return fail_handle("executable graph");
        nodes = executable->nodes;
    }
    return submit(stream, "a graph", [nodes] {
        const int before = device_index();
        cudaError_t error = cudaSuccess;
        {
            const std::lock_guard lock(mutex);
            accesses.clear();
        }
        for (const auto& node : nodes) {
            make_current(node->device);
            error = node->work();
            if (error != cudaSuccess) break;
        }
        make_current(before);
        return error;
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    const std::lock_guard lock(mutex);
    return graphs.erase(graph) == 0 ? fail_handle("graph") : cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    const std::lock_guard lock(mutex);
    return executables.erase(executable) == 0 ? fail_handle("executable graph") : cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes, size_t* num_nodes) {
    const std::lock_guard lock(mutex);
    const Graph* const graph = find(graphs, handle);
    if (graph == nullptr) return fail_handle("graph");
    for (size_t i = 0; nodes != nullptr && i < std::min(*num_nodes, graph->nodes.size()); ++i) {
        nodes[i] = reinterpret_cast<cudaGraphNode_t>(graph->nodes[i].get());
    }
    *num_nodes = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t* dependencies, cudaGraphEdgeData*,
                                         size_t* num_dependencies) {
    const std::lock_guard lock(mutex);
    const auto& found = reinterpret_cast<const Node*>(handle)->dependencies;
    for (size_t i = 0; dependencies != nullptr && i < std::min(*num_dependencies, found.size()); ++i) {
        dependencies[i] = reinterpret_cast<cudaGraphNode_t>(found[i]);
    }
    *num_dependencies = found.size();
    return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* object, cudaHostFn_t destroy_object,
                                 unsigned references, unsigned) {
    const std::lock_guard lock(mutex);
    std::shared_ptr<UserObject> made(new UserObject{object, destroy_object, references}, destroy);
    *handle = reinterpret_cast<cudaUserObject_t>(made.get());
    objects[*handle] = std::move(made);
    return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
    std::shared_ptr<UserObject> last;  // declared before the lock, so that it is destroyed after the lock is released
    const std::lock_guard lock(mutex);
    const auto found = objects.find(handle);
    if (found == objects.end() || found->second->references < count) return fail_handle("object of the host's");
    found->second->references -= count;
    if (found->second->references == 0) {
        last = std::move(found->second);
        objects.erase(found);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph_handle, cudaUserObject_t handle, unsigned count,
                                      unsigned flags) {
    const std::lock_guard lock(mutex);
    const auto found = objects.find(handle);
    if (found == objects.end()) return fail_handle("object of the host's");
    Graph* graph = find(graphs, graph_handle);
    for (const auto& capture : captures) {
        if (reinterpret_cast<cudaGraph_t>(capture->graph.get()) == graph_handle) graph = capture->graph.get();
    }
    if (graph == nullptr) return fail_handle("graph");
    graph->objects.push_back(found->second);
    return (flags & cudaGraphUserObjectMove) != 0 ? cudaUserObjectRelease(handle, count) : cudaSuccess;
}

// torch 2.12 links to these functions, for graphs with conditional nodes.
namespace {

cudaError_t no_conditions() {
    return fail(cudaErrorNotSupported, "the emulator has no graphs that are made node by node");
}

}  // namespace

cudaError_t cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                             cudaGraphNodeParams*) {
    return no_conditions();
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) {
    return no_conditions();
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                          size_t, cudaStreamCaptureMode) {
    return no_conditions();
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
    return no_conditions();
}

// --- Host functions ---

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return submit(stream, "a function of the host", [=] {
        function(data);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned) {
    return submit(stream, "a callback", [=] {
        callback(stream, cudaSuccess, data);
        return cudaSuccess;
    });
}
