// Streams, events, captures and graphs. Submitted work has completed when the call returns. If the stream is being
// captured, the work becomes a node of a graph instead, and runs whenever the graph is launched.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exports.h"

namespace emulator {
struct PastAccesses;
}

namespace emulator::runtime {

using Work = std::function<cudaError_t()>;

// The node that a cudaGraphNode_t points to.
struct Node {
    std::string what;
    int device;  // the current device at the time of the capture
    Work work;
    std::vector<Node*> dependencies;
};

// The object that a cudaUserObject_t points to: a resource of the host, which is destroyed with the last reference.
struct UserObject {
    void* object;
    cudaHostFn_t destroy;
    unsigned references;
};

// The graph that a cudaGraph_t points to: its nodes in topological order, and the user objects that it keeps alive.
struct Graph {
    std::vector<std::shared_ptr<Node>> nodes;
    std::vector<std::shared_ptr<UserObject>> objects;
};

// Runs `work`, or captures it as a node. `needs_own_device`: a kernel, whose stream must belong to the current device.
cudaError_t submit(cudaStream_t stream, const std::string& what, Work work, bool needs_own_device = false);

// Keeps and takes the accesses of a stream's last kernel, for a next kernel that may begin before that one has ended.
// Other work of the stream, or a wait by the host, drops them, because it orders the two kernels.
void keep_accesses(cudaStream_t stream, std::shared_ptr<PastAccesses> accesses);
std::shared_ptr<PastAccesses> take_accesses(cudaStream_t stream);

// Called before what CUDA forbids during a capture (allocation, waiting for the device). Invalidates the captures that
// it breaks and returns an error, or cudaSuccess if there is none.
cudaError_t check_allowed_now(const std::string& what);

}  // namespace emulator::runtime
