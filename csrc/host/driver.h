// Calls the CUDA driver directly, for what the runtime does not offer.
#pragma once

#include <cstdint>

namespace fastattn {

// Binds a device's context to this thread if the thread has no context. A kernel launch does this by itself, but
// functions of the driver, which encode tensor maps, fail in a thread without a context: one of autograd's own threads,
// for example. A context that the thread has, such as a green context, stays. Any thread may call it, also while a
// graph is captured.
void bind_device(int32_t device);

// Returns a function of the CUDA driver by its name. Throws std::runtime_error if the driver lacks it.
void* driver_function(const char* name);

}  // namespace fastattn
