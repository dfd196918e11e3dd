// Declares the C functions that replace CUDA's with default visibility; everything else in this library is hidden.
// Other files must not include CUDA's runtime header themselves, because its declarations would then be hidden.
#pragma once

#pragma GCC visibility push(default)

#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <vector_types.h>

// Called by nvcc's host code, but declared only in headers for nvcc (crt/host_runtime.h, crt/device_functions.h).
extern "C" {
void** __cudaRegisterFatBinary(void* wrapper);
void __cudaRegisterFatBinaryEnd(void** handle);
void __cudaUnregisterFatBinary(void** handle);
void __cudaRegisterFunction(void** handle, const char* host_function, char* device_function, const char* name,
                            int thread_limit, uint3* thread, uint3* block, dim3* block_size, dim3* grid_size,
                            int* warp_size);
void __cudaRegisterVar(void** handle, char* host_variable, char* device_address, const char* name, int is_extern,
                       size_t bytes, int is_constant, int is_global);
char __cudaInitModule(void** handle);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream);
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t stream);
}

#pragma GCC visibility pop
