// Divides numbers from 0 to 2^31 - 1 by a fixed divisor with a multiplication and a shift.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

// With s = ceil(log2 d) and m = ceil(2^(31 + s) / d), which has 32 bits, n / d is (n * m) >> (31 + s) (Granlund and
// Montgomery, "Division by invariant integers using multiplication", 1994, theorem 4.2). The code multiplies 2n, so
// that one instruction gives the upper word of the product.
struct Divisor {
    uint32_t multiplier, shift;

    static constexpr Divisor of(int32_t divisor) {
        uint32_t shift = 0;
        while (int64_t{1} << shift < divisor) ++shift;
        const uint64_t power = uint64_t{1} << (31 + shift);
        return {static_cast<uint32_t>((power + divisor - 1) / divisor), shift};
    }

    FASTATTN_HOST_DEVICE constexpr int32_t quotient(int32_t dividend) const {
        const uint64_t product = uint64_t{2 * static_cast<uint32_t>(dividend)} * multiplier;
        return static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift);
    }
};

static_assert(Divisor::of(1).quotient(2147483647) == 2147483647);
static_assert(Divisor::of(48).quotient(47) == 0 && Divisor::of(48).quotient(48) == 1);
static_assert(Divisor::of(48).quotient(2147483615) == 44739241 && Divisor::of(48).quotient(2147483616) == 44739242);
static_assert(Divisor::of(1 << 30).quotient(2147483647) == 1);
static_assert(Divisor::of(2147483647).quotient(2147483646) == 0 && Divisor::of(2147483647).quotient(2147483647) == 1);

}  // namespace fastattn
