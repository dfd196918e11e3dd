// fence.proxy: orders what threads write before what wgmma and TMA, the async proxy, read.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders accesses to the shared memory of all CTAs of the cluster.
__device__ __forceinline__ void fence_proxy_async_shared_cluster() {
    asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
}

// Orders accesses to global memory, too, and writes by the async proxy. A thread that has waited for its copies makes
// them visible to others by this fence and a release.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace fastattn::ptx
