// Finds the index of a CTA's cluster, and the number of clusters, in a grid whose clusters all have cluster_size CTAs.
// Also provides barriers for all threads of a cluster.
#pragma once

#include <cstdint>

#include "device/ptx/cluster.cuh"
#include "device/ptx/mbarrier.cuh"
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

// Calls init() in one thread, which initialises the CTA's mbarriers. On return, the mbarriers of every CTA of the cluster
// may be used. Called by all threads. The fence publishes the mbarriers to the cluster, so that the arrival need not
// release anything: a release would be a fence for the whole GPU in machine code (MEMBAR.ALL.GPU).
template <typename Init>
FASTATTN_DEVICE void start_barriers(int cluster_size, Init&& init) {
    if (threadIdx.x == 0) {
        init();
        ptx::fence_mbarrier_init();
    }
    __syncthreads();  // waits until this CTA's barriers are initialised
    if (cluster_size == 1) return;
    ptx::barrier_cluster_arrive_relaxed();
    ptx::barrier_cluster_wait();
}

}  // namespace fastattn
