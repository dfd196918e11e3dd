// Powers of two as factors: a product with one is exact.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

inline constexpr uint32_t kExponentBits = 0x7f800000, kExponentStep = 0x00800000;  // of fp32; adding a step doubles

// Returns the inverse of a power of two. Both must be normal numbers.
FASTATTN_DEVICE float inverse_of_power(float power) {
    return __uint_as_float(0x7f000000 - __float_as_uint(power));
}

}  // namespace fastattn
