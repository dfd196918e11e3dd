// Turns scales into factors within the range of 16-bit floats, by dividing them by a power of two. This divisor follows
// the largest scale so far, as an online softmax follows the maximum. Sums of products with factors are in units of the
// divisor.
#pragma once

#include "device/power_of_two.cuh"
#include "host/host_device.h"

namespace fastattn {

// kEnd is a power of two. Every factor is below it.
template <int kEnd>
struct FactorRange {
    float divisor = 0x1p-99f / kEnd;  // enough for scales below 2^-99

    FASTATTN_DEVICE float to_factor() const { return inverse_of_power(divisor); }
    FASTATTN_DEVICE bool holds(float largest) const { return largest < kEnd * divisor; }

    // Changes the divisor so that the scale `largest` becomes a factor from kEnd / 2 to kEnd; an infinite scale becomes
    // an infinite factor. Returns the number by which the sums so far must be multiplied.
    FASTATTN_DEVICE float make_room(float largest) {
        constexpr float kToDivisor = 2.0f / kEnd;
        const float before = divisor;
        divisor = fminf(__uint_as_float(__float_as_uint(largest) & kExponentBits), 0x1p127f) * kToDivisor;
        return change(before, divisor);
    }

    // Returns the number by which sums must be multiplied when the divisor changes.
    FASTATTN_DEVICE static float change(float before, float after) { return before * inverse_of_power(after); }
};

FASTATTN_DEVICE float largest_of(const float2& scales) {
    return fmaxf(fabsf(scales.x), fabsf(scales.y));
}

// Returns the largest of the values of a warp's lanes. No value may be negative: the function compares the values'
// bits, which have the order of the values only if these are not negative.
FASTATTN_DEVICE float largest_of_warp(float value) {
    return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
}

}  // namespace fastattn
