// Computes 2^x on the FMA pipe. FlashAttention-4 computes a fraction of its exponentials in this way, to relieve the
// MUFU. x = n + f with an integer n and |f| <= 1/2. A polynomial gives 2^f, and adding n to the exponent of 1.0 gives
// 2^n.
#pragma once

#include <cstdint>

#include "device/ptx/min_max.cuh"
#include "host/host_device.h"

namespace fastattn {

// The relative error is below 2^-18 for x from -126 to 127. Returns 0 for x <= -127, 2^127 for x > 127, and NaN for
// NaN.
FASTATTN_DEVICE float exp2_on_fma(float x) {
    constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: the low bits of x + kRounds are x's nearest integer
    const float bounded = ptx::max_nan_f32(ptx::min_nan_f32(x, 127.0f), -127.0f);
    const float shifted = __fadd_rn(bounded, kRounds), fraction = __fsub_rn(bounded, __fsub_rn(shifted, kRounds));
    float power = fmaf(9.582853169e-3f, fraction, 5.590642504e-2f);
    power = fmaf(power, fraction, 2.402409861e-1f);
    power = fmaf(power, fraction, 6.931241934e-1f);
    power = fmaf(power, fraction, 1.0f);
    return power * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
}

}  // namespace fastattn
