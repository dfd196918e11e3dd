#include "device.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "memory.h"

namespace emulator::runtime {
namespace {

std::mutex mutex;
std::vector<Device> devices{Device{}};
std::set<int> with_context;
int first_choice = 0;
uint64_t num_choices = 1;  // changes of first_choice; each one invalidates what threads chose before

struct Chosen {
    uint64_t num_choices = 0;
    int index = 0;
};
thread_local Chosen chosen;
thread_local bool is_bound = false;

int locked_index() {
    return chosen.num_choices == num_choices ? chosen.index : first_choice;
}

// Limits of compute capability 8.0 to 9.0 (CUDA C++ programming guide, technical specifications).
constexpr int kMostThreads = 1024, kWarpThreads = 32, kRegisters = 65536, kConstantBytes = 65536;
constexpr int kSmThreads = 2048, kSmCtas = 32;
constexpr int kBusWidth = 5120, kBusId = 13;
constexpr int64_t kMemoryBytes = int64_t{80} << 30;
constexpr int kMostBlock[3] = {1024, 1024, 64}, kMostGrid[3] = {0x7fffffff, 65535, 65535};

int cache_bytes(const Device& device) {
    return device.major < 9 ? 40 << 20 : 50 << 20;  // A100, H100
}

// Clock rates of A100 and H100 (SXM), in kHz.
int clock_rate(const Device& device) {
    return device.major < 9 ? 1'410'000 : 1'980'000;
}
int memory_clock_rate(const Device& device) {
    return device.major < 9 ? 1'215'000 : 2'619'000;
}

}  // namespace

int device_index() {
    const std::lock_guard lock(mutex);
    return locked_index();
}

int device_count() {
    const std::lock_guard lock(mutex);
    return static_cast<int>(devices.size());
}

Device device() {
    const std::lock_guard lock(mutex);
    return devices[locked_index()];
}

std::optional<Device> device(int index) {
    const std::lock_guard lock(mutex);
    if (index < 0 || index >= static_cast<int>(devices.size())) return std::nullopt;
    return devices[index];
}

bool make_current(int index) {
    const std::lock_guard lock(mutex);
    if (index < 0 || index >= static_cast<int>(devices.size())) return false;
    chosen = {num_choices, index};
    with_context.insert(index);
    is_bound = true;
    return true;
}

void bind_context() {
    is_bound = true;
}

bool lacks_context() {
    const std::lock_guard lock(mutex);
    return !is_bound && !with_context.empty();
}

bool has_context(int index) {
    const std::lock_guard lock(mutex);
    return with_context.count(index) != 0;
}

void pretend(const Device& device) {
    const std::lock_guard lock(mutex);
    const auto found = std::find(devices.begin(), devices.end(), device);
    first_choice = static_cast<int>(found - devices.begin());
    ++num_choices;
    if (found == devices.end()) devices.push_back(device);
}

void set_devices(std::vector<Device> replacement) {
    const std::lock_guard lock(mutex);
    devices = std::move(replacement);
    with_context.clear();
    first_choice = 0;
    ++num_choices;
}

std::optional<int> attribute_of(const Device& device, cudaDeviceAttr attribute) {
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            return kMostThreads;
        case cudaDevAttrMaxBlockDimX:
            return kMostBlock[0];
        case cudaDevAttrMaxBlockDimY:
            return kMostBlock[1];
        case cudaDevAttrMaxBlockDimZ:
            return kMostBlock[2];
        case cudaDevAttrMaxGridDimX:
            return kMostGrid[0];
        case cudaDevAttrMaxGridDimY:
            return kMostGrid[1];
        case cudaDevAttrMaxGridDimZ:
            return kMostGrid[2];
        case cudaDevAttrMaxSharedMemoryPerBlock:
            return kSharedBytesByDefault;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            return static_cast<int>(device.most_shared_bytes);
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            return static_cast<int>(device.most_shared_bytes) + kReservedSharedBytes;
        case cudaDevAttrReservedSharedMemoryPerBlock:
            return kReservedSharedBytes;
        case cudaDevAttrTotalConstantMemory:
            return kConstantBytes;
        case cudaDevAttrWarpSize:
            return kWarpThreads;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor:
            return kRegisters;
        case cudaDevAttrMultiProcessorCount:
            return device.num_sms;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            return kSmThreads;
        case cudaDevAttrMaxBlocksPerMultiprocessor:
            return kSmCtas;
        case cudaDevAttrL2CacheSize:
            return cache_bytes(device);
        case cudaDevAttrComputeCapabilityMajor:
            return device.major;
        case cudaDevAttrComputeCapabilityMinor:
            return device.minor;
        case cudaDevAttrClockRate:
            return clock_rate(device);
        case cudaDevAttrMemoryClockRate:
            return memory_clock_rate(device);
        case cudaDevAttrGlobalMemoryBusWidth:
            return kBusWidth;
        case cudaDevAttrPciBusId:
            return kBusId;
        case cudaDevAttrPciDeviceId:
        case cudaDevAttrPciDomainId:
            return 0;
        case cudaDevAttrClusterLaunch:
            return device.major >= 9 ? 1 : 0;
        case cudaDevAttrCooperativeLaunch:
        case cudaDevAttrUnifiedAddressing:
            return 1;
        case cudaDevAttrManagedMemory:
        case cudaDevAttrMemoryPoolsSupported:
        case cudaDevAttrIntegrated:
            return 0;
        default:
            return std::nullopt;
    }
}

cudaDeviceProp properties_of(const Device& device) {
    const auto number = [&](cudaDeviceAttr attribute) { return attribute_of(device, attribute).value(); };
    cudaDeviceProp properties;
    std::memset(&properties, 0, sizeof(properties));
    std::snprintf(properties.name, sizeof(properties.name), "emulated sm_%d%d", device.major, device.minor);
    properties.sharedMemPerBlock = kSharedBytesByDefault;
    properties.sharedMemPerBlockOptin = device.most_shared_bytes;
    properties.sharedMemPerMultiprocessor = number(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    properties.reservedSharedMemPerBlock = kReservedSharedBytes;
    properties.regsPerBlock = properties.regsPerMultiprocessor = kRegisters;
    properties.warpSize = kWarpThreads;
    properties.maxThreadsPerBlock = kMostThreads;
    properties.maxThreadsPerMultiProcessor = kSmThreads;
    properties.maxBlocksPerMultiProcessor = kSmCtas;
    std::memcpy(properties.maxThreadsDim, kMostBlock, sizeof(kMostBlock));
    std::memcpy(properties.maxGridSize, kMostGrid, sizeof(kMostGrid));
    properties.totalGlobalMem = kMemoryBytes;
    properties.memoryBusWidth = kBusWidth;
    properties.pciBusID = kBusId;
    properties.totalConstMem = kConstantBytes;
    properties.major = device.major;
    properties.minor = device.minor;
    properties.multiProcessorCount = device.num_sms;
    properties.l2CacheSize = cache_bytes(device);
    properties.cooperativeLaunch = properties.unifiedAddressing = 1;
    properties.clusterLaunch = number(cudaDevAttrClusterLaunch);
    return properties;
}

}  // namespace emulator::runtime
