// Two to the power of x on the FMA pipe, as FlashAttention-4 computes a fraction of its exponentials to relieve MUFU:
// x = n + f with |f| <= 1/2, a polynomial gives 2^f, and n is added to the exponent of 1.
#pragma once

#include <cstdint>

#include "device/ptx/min_max.cuh"
#include "host/host_device.h"

namespace fastattn {

// Has a relative error below 2^-18 where x is between -126 and 127. Returns 0 for x of at most -127, and 2^127 for x
// above 127.
FASTATTN_DEVICE float exp2_on_fma(float x) {
    constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: a sum with it has the nearest integer in its low bits
    const float bounded = ptx::max_nan_f32(ptx::min_nan_f32(x, 127.0f), -127.0f);
    const float shifted = __fadd_rn(bounded, kRounds), fraction = __fsub_rn(bounded, __fsub_rn(shifted, kRounds));
    float power = fmaf(9.582853169e-3f, fraction, 5.590642504e-2f);
    power = fmaf(power, fraction, 2.402409861e-1f);
    power = fmaf(power, fraction, 6.931241934e-1f);
    power = fmaf(power, fraction, 1.0f);
    return power * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
}

}  // namespace fastattn
