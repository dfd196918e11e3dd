// The range of 16-bit factors that scales become: they are divided by a power of two that follows the largest so far,
// as the maximum of an online softmax does, and sums of products with them are in its units.
#pragma once

#include "device/power_of_two.cuh"
#include "host/host_device.h"

namespace fastattn {

// kEnd: a power of two below which all factors are.
template <int kEnd>
struct FactorRange {
    float divisor = 0x1p-99f / kEnd;  // scales below 2^-99 need no larger one

    FASTATTN_DEVICE float to_factor() const { return inverse_of_power(divisor); }
    FASTATTN_DEVICE bool holds(float largest) const { return largest < kEnd * divisor; }

    // The largest becomes a factor from kEnd / 2 to kEnd. Returns by what the sums so far are multiplied.
    FASTATTN_DEVICE float make_room(float largest) {
        const float before = divisor;
        divisor = __uint_as_float(__float_as_uint(largest) & kExponentBits) * (2.0f / kEnd);
        return change(before, divisor);
    }

    // By what sums are multiplied when the divisor changes.
    FASTATTN_DEVICE static float change(float before, float after) { return before * inverse_of_power(after); }
};

FASTATTN_DEVICE float largest_of(const float2& scales) {
    return fmaxf(fabsf(scales.x), fabsf(scales.y));
}

// The largest number of a warp's lanes. None is negative, so that their bits are in the order of the floats.
FASTATTN_DEVICE float largest_of_warp(float value) {
    return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
}

}  // namespace fastattn
