// Launches kernels. Errors name the kernel, its grid and its shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "host/params.h"

namespace fastattn {

struct Launch {
    int64_t num_ctas;          // grid, in x
    int32_t threads;           // of a CTA
    size_t shared_bytes;       // dynamic shared memory of a CTA
    int32_t cluster_size = 1;  // CTAs that run together and see each other's shared memory; divides num_ctas
};

// One kernel with its template arguments, for the life of the process: what errors call it, and on which devices it may
// already have its shared memory.
class LaunchedKernel {
  public:
    LaunchedKernel(std::string name, int32_t compute_capability)
        : name_(std::move(name)), compute_capability_(compute_capability) {}

    const std::string& name() const { return name_; }

    // Starts function(params) on the stream. Nothing is synchronised: errors of the run itself surface later. Any
    // thread may call it.
    template <typename Params>
    void launch(void (*function)(Params), const Launch& launch, const Params& params, Stream stream) {
        constexpr int64_t kMaxCtas = 0x7fffffff;
        if (launch.num_ctas == 0) return;
        if (launch.num_ctas > kMaxCtas) throw_error(launch, "a grid has at most 2147483647 CTAs");
        const void* address = reinterpret_cast<const void*>(function);
        if (launch.shared_bytes > kSharedBytesByDefault) allow_shared_memory(address, launch);
        Params copy = params;
        void* arguments[] = {&copy};
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = launch.cluster_size;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(launch.num_ctas));
        config.blockDim = dim3(launch.threads);
        config.dynamicSmemBytes = launch.shared_bytes;
        config.stream = stream;
        config.attrs = &cluster;
        config.numAttrs = launch.cluster_size > 1 ? 1 : 0;
        check(launch, cudaLaunchKernelExC(&config, address, arguments));
    }

  private:
    static constexpr size_t kSharedBytesByDefault = 48 << 10;  // a kernel that needs more has to ask for it
    static constexpr int kRememberedDevices = 16;              // on others the kernel asks at every launch

    // Asks once per device: what a kernel needs above kSharedBytesByDefault is the same at every launch. Threads that
    // come at the same time may both ask.
    void allow_shared_memory(const void* address, const Launch& launch) {
        int device = 0;
        check(launch, cudaGetDevice(&device));
        std::atomic<size_t>* allowed = device < kRememberedDevices ? &allowed_shared_bytes_[device] : nullptr;
        if (allowed != nullptr && allowed->load(std::memory_order_relaxed) >= launch.shared_bytes) return;
        check(launch, cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(launch.shared_bytes)));
        if (allowed != nullptr) allowed->store(launch.shared_bytes, std::memory_order_relaxed);
    }

    [[noreturn]] void throw_error(const Launch& launch, const std::string& reason) const {
        throw std::runtime_error("fastattn: " + name_ + " could not be launched: " + reason + " (grid " +
                                 std::to_string(launch.num_ctas) + ", block " + std::to_string(launch.threads) + ", " +
                                 std::to_string(launch.shared_bytes) + " bytes of shared memory)");
    }

    void check(const Launch& launch, cudaError_t error) const {
        if (error == cudaSuccess) return;
        cudaGetLastError();  // the error is reported here, not again at the next call of the runtime
        std::string reason = cudaGetErrorString(error);
        int device = 0, major = 0, minor = 0;
        if (cudaGetDevice(&device) == cudaSuccess &&
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
            cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
            10 * major + minor < compute_capability_) {
            reason = "it needs compute capability " + std::to_string(compute_capability_ / 10) + "." +
                     std::to_string(compute_capability_ % 10) + " or later, device " + std::to_string(device) +
                     " has " + std::to_string(major) + "." + std::to_string(minor);
        }
        throw_error(launch, reason);
    }

    const std::string name_;
    const int32_t compute_capability_;
    std::array<std::atomic<size_t>, kRememberedDevices> allowed_shared_bytes_{};
};

}  // namespace fastattn
