#include "host/launch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fastattn {
namespace {

constexpr size_t kSharedBytesByDefault = 48 << 10;  // a kernel that needs more has to ask for it
constexpr int64_t kMostCtas = 0x7fffffff;

bool allows_dependent_launches() {
    static const bool allows = [] {
        const char* given = std::getenv("FASTATTN_DEPENDENT_LAUNCH");
        const std::string_view text = given == nullptr ? "" : given;
        constexpr int kCudaVersion = 12030;  // with earlier drivers, a CUDA graph has no edges for such launches
        int version = 0;
        return text != "0" && text != "false" && text != "no" && cudaDriverGetVersion(&version) == cudaSuccess &&
               version >= kCudaVersion;
    }();
    return allows;
}

}  // namespace

void LaunchedKernel::start(const void* function, const Launch& launch, void* params, Stream stream) {
    if (launch.num_ctas == 0) return;
    if (launch.num_ctas > kMostCtas) throw_error(launch, "a grid has at most 2147483647 CTAs");
    int index = 0;
    check(launch, cudaGetDevice(&index));
    OnDevice forgotten;
    OnDevice& device = index < kRememberedDevices ? devices_[index] : forgotten;
    if (launch.shared_bytes > kSharedBytesByDefault) allow_shared_memory(function, launch, device);
    void* arguments[] = {params};
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.attrs = attributes;
    if (launch.cluster_size > 1) {
        cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = launch.cluster_size;
        cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    }
    if (launch.is_dependent && allows_dependent_launches() && can_wait(function, launch, device)) {
        cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
        dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        dependent.val.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDim = dim3(static_cast<unsigned>(launch.num_ctas));
    config.blockDim = dim3(launch.threads);
    config.dynamicSmemBytes = launch.shared_bytes;
    config.stream = stream;
    check(launch, cudaLaunchKernelExC(&config, function, arguments));
}

// Raises the kernel's limit of shared memory, once for each device, because a kernel needs the same at every launch.
// Threads that launch at the same time may both raise it, which does no harm.
void LaunchedKernel::allow_shared_memory(const void* function, const Launch& launch, OnDevice& device) const {
    const std::atomic_ref allowed(device.allowed_shared_bytes);
    if (allowed.load(std::memory_order_relaxed) >= launch.shared_bytes) return;
    check(launch, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(launch.shared_bytes)));
    // Gives shared memory as much of L1 as possible, so that several CTAs fit on an SM. These kernels' copies bypass
    // L1.
    check(launch, cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                       cudaSharedmemCarveoutMaxShared));
    allowed.store(launch.shared_bytes, std::memory_order_relaxed);
}

// Returns whether the kernel's code for the current device was compiled for sm_90 or later, so that it contains
// griddepcontrol.wait.
bool LaunchedKernel::can_wait(const void* function, const Launch& launch, OnDevice& device) const {
    const std::atomic_ref version(device.ptx_version);
    if (version.load(std::memory_order_relaxed) == 0) {
        cudaFuncAttributes attributes{};
        check(launch, cudaFuncGetAttributes(&attributes, function));
        version.store(attributes.ptxVersion, std::memory_order_relaxed);
    }
    return version.load(std::memory_order_relaxed) >= 90;
}

void LaunchedKernel::check(const Launch& launch, cudaError_t error) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // clears the error, which the next call of the runtime would report again
    std::string reason = cudaGetErrorString(error);
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
        10 * major + minor < compute_capability_) {
        reason = "it needs compute capability " + std::to_string(compute_capability_ / 10) + "." +
                 std::to_string(compute_capability_ % 10) + " or later, device " + std::to_string(device) + " has " +
                 std::to_string(major) + "." + std::to_string(minor);
    }
    throw_error(launch, reason.c_str());
}

void LaunchedKernel::throw_error(const Launch& launch, const char* reason) const {
    throw std::runtime_error("fastattn: " + std::string(name_) + " could not be launched: " + reason + " (grid " +
                             std::to_string(launch.num_ctas) + ", block " + std::to_string(launch.threads) + ", " +
                             std::to_string(launch.shared_bytes) + " bytes of shared memory)");
}

void LaunchedKernel::check_work_tiles(int64_t count, const char* tiles) const {
    if (count <= kMostCtas) return;
    throw std::runtime_error("fastattn: " + std::string(name_) + " takes at most " + std::to_string(kMostCtas) + " " +
                             tiles + " of all heads and sequences, got " + std::to_string(count));
}

}  // namespace fastattn
