// How many multiprocessors the current device has.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastattn {

inline int32_t num_multiprocessors() {
    int device = 0, count = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) {
        cudaGetLastError();  // the error is reported here, not again by whoever calls the runtime next
        throw std::runtime_error(
            std::string("fastattn: the CUDA device does not say how many multiprocessors it has: ") +
            cudaGetErrorString(error));
    }
    return count;
}

}  // namespace fastattn
