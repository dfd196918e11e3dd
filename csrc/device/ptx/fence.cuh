// fence.proxy: orders writes of threads before reads of the async proxy, through which wgmma and TMA access memory.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Also orders accesses to global memory, and writes of the async proxy. A thread that has waited for its bulk copies
// makes them visible to other threads by this fence, followed by a release.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

}  // namespace fastattn::ptx
