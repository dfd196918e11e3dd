// Sums over the lanes of a warp.
#pragma once

#include "device/fragment.cuh"

namespace fastattn {

// All lanes receive it.
__device__ __forceinline__ float warp_reduce_sum(float value) {
#pragma unroll
    for (int other = kWarpSize / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffff, value, other);
    return value;
}

}  // namespace fastattn
