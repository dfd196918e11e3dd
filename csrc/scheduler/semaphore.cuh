// Orders the additions of several CTAs to the same sums, so that the bits of the sums repeat from run to run. A
// semaphore is a number in global memory, zero before the launch, that counts the CTAs that have added. CTAs claim
// their work in the order of addition, so that each CTA waits only for CTAs that already run. With deterministic
// gradients, the sm_80 kernels (for small and large tiles of keys) add dQ in this way. On Hopper,
// attention/backward_panels_sm90.cuh adds dQ in this way, and dK and dV of split tiles.
#pragma once

#include <cstdint>

#include "device/ptx/bulk_copy.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/ld_acquire.cuh"
#include "device/ptx/red.cuh"
#include "host/host_device.h"

namespace fastattn {

// A semaphore for threads that add by their own instructions: all threads of a CTA, or some that include thread 0.
// barrier() must make these threads wait for each other. With a null address, CTAs add in any order.
struct Semaphore {
    int32_t* address;

    // Waits until at least num_before CTAs have added. More may have added, because packed sequences that overlap share
    // tiles.
    template <typename Barrier>
    FASTATTN_DEVICE void wait(int32_t num_before, Barrier&& barrier) const {
        if (address == nullptr) return;
        if (threadIdx.x == 0) {
            while (ptx::ld_acquire_s32(address) < num_before) {
            }
        }
        barrier();
    }

    template <typename Barrier>
    FASTATTN_DEVICE void release(Barrier&& barrier) const {
        if (address == nullptr) return;
        barrier();  // waits until every thread has added
        if (threadIdx.x == 0) ptx::red_release_add_s32(address, 1);
    }
};

// Waits until num_before others have added. Called by one thread, which then adds with bulk copies.
FASTATTN_DEVICE void semaphore_wait(const int32_t* semaphore, int32_t num_before) {
    while (ptx::ld_acquire_s32(semaphore) < num_before) {
    }
    ptx::fence_proxy_async_global();
}

// Waits until everything that this thread has added is in memory, and lets the next CTA add.
FASTATTN_DEVICE void semaphore_release(int32_t* semaphore) {
    ptx::cp_async_bulk_wait_group();
    ptx::fence_proxy_async_global();
    ptx::red_release_add_s32(semaphore, 1);
}

}  // namespace fastattn
