#include "host/driver.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fastattn {

void bind_device(int32_t device) {
    static auto* const current_context =
        reinterpret_cast<decltype(cuCtxGetCurrent)*>(driver_function("cuCtxGetCurrent"));
    CUcontext context = nullptr;
    if (current_context(&context) == CUDA_SUCCESS && context != nullptr) return;
    const cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, which the next call of the runtime would report again
    throw std::runtime_error("fastattn: cannot use CUDA device " + std::to_string(device) + ": " +
                             cudaGetErrorString(error));
}

void* driver_function(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    constexpr unsigned kCudaVersion = 12000;  // the first version that has all functions that are looked up
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, kCudaVersion, cudaEnableDefault, &status);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#endif
    if (error == cudaSuccess && status == cudaDriverEntryPointSuccess) return found;
    cudaGetLastError();  // clears the error, as above
    throw std::runtime_error(std::string("fastattn: the CUDA driver has no ") + name + "; it needs CUDA 12.0");
}

}  // namespace fastattn
