// fence.proxy: order between what threads write and what wgmma and TMA, the async proxy, read.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace fastattn::ptx
