// Clusters: CTAs that run at the same time and reach each other's shared memory. PTX ISA, "Parallel Synchronization and
// Communication Instructions: barrier.cluster" and "Special Registers: %cluster_ctarank".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Arrives at the cluster's barrier, which all threads of the cluster that have not exited must reach.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Does the same, but publishes none of the thread's stores.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns the address, in the cluster's shared memory, at which CTA `rank` has what this CTA has at `shared`.
__device__ __forceinline__ uint32_t mapa(uint32_t shared, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}

// Stores a number in the shared memory of another CTA, and completes 4 bytes at an mbarrier of that CTA. mapa() returns
// both addresses. PTX ISA, "Data Movement and Conversion Instructions: st.async".
__device__ __forceinline__ void st_async_u32(uint32_t shared_there, uint32_t number, uint32_t barrier_there) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(shared_there),
                 "r"(number), "r"(barrier_there)
                 : "memory");
}

}  // namespace fastattn::ptx
