// Finds the index of a CTA's cluster, and the number of clusters, in a grid whose clusters all have cluster_size CTAs.
// Also provides a barrier for all threads of a cluster.
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

// Waits until all threads of the cluster have arrived. All lanes of a warp must call this together, because
// barrier.cluster is `.aligned`.
FASTATTN_DEVICE void wait_for_cluster(int cluster_size) {
    if (cluster_size == 1) return;
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
}

}  // namespace fastattn
