// Which cluster of the grid a CTA is in, where all clusters have cluster_size CTAs, and a barrier for its threads.
#pragma once

#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "host/host_device.h"

namespace fastattn {

FASTATTN_DEVICE uint32_t cluster_in_grid(int cluster_size) {
    return blockIdx.x / cluster_size;
}

FASTATTN_DEVICE uint32_t clusters_in_grid(int cluster_size) {
    return gridDim.x / cluster_size;
}

// Waits until all threads of the cluster are here. The lanes of a warp call it together: the barrier takes whole warps.
FASTATTN_DEVICE void wait_for_cluster(int cluster_size) {
    if (cluster_size == 1) return;
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

}  // namespace fastattn
