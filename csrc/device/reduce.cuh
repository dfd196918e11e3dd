// Sums over the lanes of a warp.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"

namespace fastattn {

// All lanes receive it.
FASTATTN_DEVICE float warp_reduce_sum(float value) {
#pragma unroll
    for (int other = kWarpSize / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffff, value, other);
    return value;
}

// Lane i receives the sum of lanes 0 … i.
FASTATTN_DEVICE int64_t warp_inclusive_sum(int64_t value, int lane) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int64_t before = __shfl_up_sync(0xffffffff, value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

}  // namespace fastattn
