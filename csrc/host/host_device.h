// Macros for functions of kernels, and for functions that both the host and kernels call.
#pragma once

#include <cstdint>

#define FASTATTN_DEVICE __device__ __forceinline__
#ifdef __CUDACC__
#define FASTATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTATTN_HOST_DEVICE inline
#endif

namespace fastattn {

template <typename Dividend, typename Divisor>
FASTATTN_HOST_DEVICE constexpr auto ceil_div(Dividend dividend, Divisor divisor) {
    return dividend / divisor + (dividend % divisor != 0);
}

}  // namespace fastattn
