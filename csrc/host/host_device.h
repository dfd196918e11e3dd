// Functions of kernels, and those that the host and kernels both call.
#pragma once

#include <cstdint>

#define FASTATTN_DEVICE __device__ __forceinline__
#ifdef __CUDACC__
#define FASTATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTATTN_HOST_DEVICE inline
#endif

namespace fastattn {

FASTATTN_HOST_DEVICE constexpr int32_t ceil_div(int32_t dividend, int32_t divisor) {
    return dividend / divisor + (dividend % divisor != 0);
}

}  // namespace fastattn
