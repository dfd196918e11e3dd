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
        throw std::runtime_error(std::string("fastattn: the device does not tell its multiprocessors: ") +
                                 cudaGetErrorString(error));
    }
    return count;
}

}  // namespace fastattn
