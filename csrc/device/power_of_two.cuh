// Powers of two as factors, which round nothing.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

inline constexpr uint32_t kExponentBits = 0x7f800000, kExponentStep = 0x00800000;  // of fp32; a step doubles

// The inverse of a power of two, where both are normal numbers.
FASTATTN_DEVICE float inverse_of_power(float power) {
    return __uint_as_float(0x7f000000 - __float_as_uint(power));
}

}  // namespace fastattn
