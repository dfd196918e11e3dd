// A group of flash-decoding warps that take the same keys, each for 16 rows of the tile. The first warp of the group
// loads the keys and values, and all warps of the group multiply by them.
#pragma once

#include "device/fragment.cuh"
#include "device/ptx/named_barrier.cuh"

namespace fastattn {

template <int kCount>
struct RowWarps {
    // Returns the warp's group, which decides its keys.
    FASTATTN_DEVICE int group() const { return threadIdx.x / (kCount * kWarpSize); }

    // Returns the warp's index in its group, which decides its rows.
    FASTATTN_DEVICE int index() const { return threadIdx.x / kWarpSize % kCount; }

    // Returns whether this warp loads for its group, and writes the group's shared memory.
    FASTATTN_DEVICE bool is_first() const { return kCount == 1 || index() == 0; }

    FASTATTN_DEVICE void sync() const {
        if constexpr (kCount == 1) {
            __syncwarp();
        } else {
            ptx::bar_sync(kFirstBarrier + group(), kCount * kWarpSize);
        }
    }

    FASTATTN_DEVICE bool any(bool predicate) const {
        if constexpr (kCount == 1) {
            return __any_sync(0xffffffff, predicate) != 0;
        } else {
            return ptx::bar_red_or(kFirstBarrier + group(), kCount * kWarpSize, predicate);
        }
    }

  private:
    static constexpr int kFirstBarrier = 1;  // __syncthreads() uses 0
};

}  // namespace fastattn
