// The GPUs of the emulated CUDA runtime. A device keeps its number once `pretend` has added it, because host code
// caches facts by device number.
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
    int64_t most_shared_bytes = 163 << 10;  // of a CTA that opts in

    bool operator==(const Device& other) const {
        return std::tie(major, minor, num_sms, most_shared_bytes) ==
               std::tie(other.major, other.minor, other.num_sms, other.most_shared_bytes);
    }
};

constexpr int64_t kSharedBytesByDefault = 48 << 10;  // of a CTA that does not opt in
constexpr int kCudaVersion = CUDART_VERSION;         // of the runtime and of the driver

// The current device is the one that this thread last chose by make_current, else the process's. Thread-safe.
int device_index();
int device_count();
Device device();
std::optional<Device> device(int index);
bool make_current(int index);  // for this thread; false: there is no such device
bool has_context(int index);   // true: some thread has made the device current
// Notes that this thread has used the runtime in a way that binds the current device's context to it.
void bind_context();
// Returns whether functions of the driver fail in this thread, because other threads use contexts and it has none.
// Always false while no thread has made a device current, as in tests that give CPU tensors to kernels.
bool lacks_context();
void pretend(const Device& device);  // makes a device current for all threads, and adds it if it is new
// Replaces all devices; the first one becomes current.
void set_devices(std::vector<Device> devices);

// Returns nullopt for an attribute that the emulator does not know.
std::optional<int> attribute_of(const Device& device, cudaDeviceAttr attribute);
// Properties that the emulator does not know are 0.
cudaDeviceProp properties_of(const Device& device);

}  // namespace emulator::runtime
