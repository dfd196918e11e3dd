// The facts about a GPU from which the host schedules work.
#pragma once

#include <cstdint>

namespace fastattn {

struct DeviceFacts {
    int32_t compute_capability;  // 10 * major + minor
    int32_t num_sms;
    int64_t l2_bytes;
    int32_t shared_bytes_per_cta;  // the most that a CTA can ask for
};

// Returns the facts of the current device. Any thread may call it. Facts of the first 16 devices are kept for the life
// of the process; those of others are queried at each call.
DeviceFacts device_facts();

// Binds a device's context to this thread if the thread has no context. A kernel launch does this by itself, but
// functions of the driver, which encode tensor maps, fail in a thread without a context: one of autograd's own threads,
// for example. A context that the thread has, such as a green context, stays. Any thread may call it, also while a
// graph is captured.
void bind_device(int32_t device);

// Returns a function of the CUDA driver by its name. Throws std::runtime_error if the driver lacks it.
void* driver_function(const char* name);

}  // namespace fastattn
