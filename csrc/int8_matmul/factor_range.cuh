// The range of 16-bit factors that scales become. Scales are divided by a power of two, which follows the largest so
// far as the maximum of an online softmax does. Sums of products with factors are in units of this divisor.
#pragma once

#include "device/power_of_two.cuh"
#include "host/host_device.h"

namespace fastattn {

// kEnd: a power of two that all factors are below.
template <int kEnd>
struct FactorRange {
    float divisor = 0x1p-99f / kEnd;  // scales below 2^-99 need no larger one

    FASTATTN_DEVICE float to_factor() const { return inverse_of_power(divisor); }
    FASTATTN_DEVICE bool holds(float largest) const { return largest < kEnd * divisor; }

    // Makes `largest` a factor from kEnd / 2 to kEnd. Returns the factor by which the sums so far must be multiplied.
    FASTATTN_DEVICE float make_room(float largest) {
        const float before = divisor;
        divisor = __uint_as_float(__float_as_uint(largest) & kExponentBits) * (2.0f / kEnd);
        return change(before, divisor);
    }

    // Returns the factor by which sums must be multiplied when the divisor changes.
    FASTATTN_DEVICE static float change(float before, float after) { return before * inverse_of_power(after); }
};

FASTATTN_DEVICE float largest_of(const float2& scales) {
    return fmaxf(fabsf(scales.x), fabsf(scales.y));
}

// Returns the largest number of a warp's lanes. None may be negative: only then do their bits have the floats' order.
FASTATTN_DEVICE float largest_of_warp(float value) {
    return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
}

}  // namespace fastattn
