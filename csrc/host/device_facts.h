// Facts of a GPU by which the host schedules work, asked once for each device.
#pragma once

#include <cstdint>

namespace fastattn {

struct DeviceFacts {
    int32_t compute_capability;  // times ten
    int32_t num_sms;
    int64_t l2_bytes;
    int32_t shared_bytes_per_cta;  // the most that a CTA can ask for
};

// Returns the facts of the current device. Facts of the first devices are kept for the life of the process; those of
// others are asked each time. Any thread may call it.
DeviceFacts device_facts();

}  // namespace fastattn
