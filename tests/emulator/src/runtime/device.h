// The GPUs that the emulated CUDA runtime says it has. Each one that was ever pretended keeps its number, so that what
// host code remembers of a device stays true.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "exports.h"

namespace emulator::runtime {

struct Device {
    int major = 8, minor = 0;  // compute capability
    int num_sms = 108;
    int64_t most_shared_bytes = 163 << 10;  // of a CTA, by opting in

    bool operator==(const Device& other) const {
        return std::tie(major, minor, num_sms, most_shared_bytes) ==
               std::tie(other.major, other.minor, other.num_sms, other.most_shared_bytes);
    }
};

constexpr int64_t kSharedBytesByDefault = 48 << 10;  // of a CTA that has not opted in
constexpr int kCudaVersion = CUDART_VERSION;         // of the runtime and of the driver

// From any thread. Without an index: the device that this thread has made current, or the process's first choice.
int device_index();
int device_count();
Device device();
std::optional<Device> device(int index);
bool make_current(int index);        // for this thread; false: there is no such device
bool has_context(int index);         // whether any thread has made the device current
void pretend(const Device& device);  // for every thread, whatever it made current before
// Replaces all devices; the first one becomes current.
void set_devices(std::vector<Device> devices);

// nullopt: the emulator has no answer.
std::optional<int> attribute_of(const Device& device, cudaDeviceAttr attribute);
// What the emulator has no answer for is 0.
cudaDeviceProp properties_of(const Device& device);

}  // namespace emulator::runtime
