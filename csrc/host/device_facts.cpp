#include "host/device_facts.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

namespace fastattn {
namespace {

DeviceFacts look_up_device_facts(int device) {
    const auto attribute = [&](cudaDeviceAttr which) {
        int value = 0;
        const cudaError_t error = cudaDeviceGetAttribute(&value, which, device);
        if (error == cudaSuccess) return value;
        cudaGetLastError();  // clears the error, which the next call of the runtime would report again
        throw std::runtime_error("fastattn: cannot read attribute " + std::to_string(which) + " of CUDA device " +
                                 std::to_string(device) + ": " + cudaGetErrorString(error));
    };
    return {10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor),
            attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrL2CacheSize),
            attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
}

}  // namespace

DeviceFacts device_facts() {
    constexpr int kRememberedDevices = 16;
    static std::array<std::atomic<const DeviceFacts*>, kRememberedDevices> known{};
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) {
        cudaGetLastError();  // clears the error, as above
        throw std::runtime_error(std::string("fastattn: there is no current CUDA device: ") +
                                 cudaGetErrorString(error));
    }
    if (device >= kRememberedDevices) return look_up_device_facts(device);
    const DeviceFacts* facts = known[device].load(std::memory_order_acquire);
    if (facts != nullptr) return *facts;
    const auto* asked = new DeviceFacts(look_up_device_facts(device));
    if (known[device].compare_exchange_strong(facts, asked, std::memory_order_acq_rel)) return *asked;
    delete asked;  // another thread was first
    return *facts;
}

}  // namespace fastattn
