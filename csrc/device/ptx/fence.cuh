// fence.proxy: orders writes of threads before reads of the async proxy, through which wgmma and TMA access memory.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders accesses to global memory instead, in both directions. A thread that has waited for its bulk copies makes them
// visible to other threads by this fence, followed by a release. Without .global, ptxas would add a fence for the whole
// GPU (MEMBAR.ALL.GPU) to that of the release.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace fastattn::ptx
