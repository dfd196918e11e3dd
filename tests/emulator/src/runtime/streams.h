// Streams, events, captures and graphs. Work is over when the call that submits it returns, unless its stream is being
// captured: then it becomes a node of a graph, and runs whenever the graph is launched.
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

// What a cudaGraphNode_t points to.
struct Node {
    std::string what;
    int device;  // that was current when the node was captured
    Work work;
    std::vector<Node*> dependencies;
};

// What a cudaUserObject_t points to: something of the host's, which goes when nobody refers to it.
struct UserObject {
    void* object;
    cudaHostFn_t destroy;
    unsigned references;
};

// What a cudaGraph_t points to: its nodes, each after those that it depends on, and what it refers to.
struct Graph {
    std::vector<std::shared_ptr<Node>> nodes;
    std::vector<std::shared_ptr<UserObject>> objects;
};

// Runs `work`, or makes it a node. `needs_own_device`: the stream must belong to the current device, as a kernel's must.
cudaError_t submit(cudaStream_t stream, const std::string& what, Work work, bool needs_own_device = false);

// What the last kernel of a stream has touched, for one that may begin before that has ended. Other work of the stream,
// and a host that waits, are in order with both: nothing is kept then.
void keep_accesses(cudaStream_t stream, std::shared_ptr<PastAccesses> accesses);
std::shared_ptr<PastAccesses> take_accesses(cudaStream_t stream);

// What CUDA forbids while a stream is captured (allocation, waiting for the device) ends the captures that it would break.
// cudaSuccess: there is none.
cudaError_t check_allowed_now(const std::string& what);

}  // namespace emulator::runtime
