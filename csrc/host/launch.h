// Starting a kernel, with errors that say which one, with what, and where.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/params.h"

namespace fastattn {

struct Launch {
    const char* kernel;          // its name, for errors
    int32_t compute_capability;  // the lowest that it runs on, times ten
    int64_t num_ctas;            // grid, in x
    int32_t threads;             // of a CTA
    size_t shared_bytes;         // dynamic shared memory of a CTA
};

[[noreturn]] inline void throw_launch_error(const Launch& launch, const std::string& reason) {
    throw std::runtime_error(std::string("fastattn: ") + launch.kernel + " could not be launched: " + reason +
                             " (grid " + std::to_string(launch.num_ctas) + ", block " + std::to_string(launch.threads) +
                             ", " + std::to_string(launch.shared_bytes) + " bytes of shared memory)");
}

inline void check_launch(const Launch& launch, cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // the error is reported here, not again by whoever calls the runtime next
    std::string reason = cudaGetErrorString(error);
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
        10 * major + minor < launch.compute_capability) {
        reason = "it needs compute capability " + std::to_string(launch.compute_capability / 10) + "." +
                 std::to_string(launch.compute_capability % 10) + " or later, device " + std::to_string(device) +
                 " has " + std::to_string(major) + "." + std::to_string(minor);
    }
    throw_launch_error(launch, reason);
}

// Starts kernel(params) on the stream. Nothing is synchronised: errors of the run itself surface later.
template <typename Params>
void launch_kernel(void (*kernel)(Params), const Launch& launch, const Params& params, Stream stream) {
    constexpr int64_t kMaxCtas = 0x7fffffff;
    constexpr size_t kSharedBytesByDefault = 48 << 10;  // a kernel that needs more has to ask for it
    if (launch.num_ctas == 0) return;
    if (launch.num_ctas > kMaxCtas) throw_launch_error(launch, "a grid has at most 2147483647 CTAs");
    const void* function = reinterpret_cast<const void*>(kernel);
    if (launch.shared_bytes > kSharedBytesByDefault) {
        check_launch(launch, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(launch.shared_bytes)));
    }
    Params copy = params;
    void* arguments[] = {&copy};
    check_launch(launch, cudaLaunchKernel(function, dim3(static_cast<unsigned>(launch.num_ctas)), dim3(launch.threads),
                                          arguments, launch.shared_bytes, stream));
}

}  // namespace fastattn
