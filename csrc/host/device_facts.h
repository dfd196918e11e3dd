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

}  // namespace fastattn
