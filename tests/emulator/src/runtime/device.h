// The GPU that the emulated CUDA runtime says it has: device 0, the only one.
#pragma once

#include <cstdint>
#include <optional>

#include "exports.h"

namespace emulator::runtime {

struct Device {
    int major = 8, minor = 0;  // compute capability
    int num_sms = 108;
    int64_t most_shared_bytes = 163 << 10;  // of a CTA, by opting in
};

constexpr int64_t kSharedBytesByDefault = 48 << 10;  // of a CTA that has not opted in
constexpr int kCudaVersion = CUDART_VERSION;         // of the runtime and of the driver

// Process-wide, from any thread.
Device device();
void pretend(const Device& device);

// nullopt: the emulator has no answer.
std::optional<int> attribute_of(const Device& device, cudaDeviceAttr attribute);
// What the emulator has no answer for is 0.
cudaDeviceProp properties_of(const Device& device);

}  // namespace emulator::runtime
