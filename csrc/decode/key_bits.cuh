// Represents a set of a tile's keys by one bit for each key, the lowest for the first.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

template <int kKeys>
inline constexpr uint32_t kAllKeys = 0xffffffffu >> (32 - kKeys);

// Returns the keys [begin, end); both bounds may lie outside of the tile.
template <int kKeys>
FASTATTN_DEVICE uint32_t keys_between(int32_t begin, int32_t end) {
    const auto from = [](int32_t key) {  // returns the keys >= key; can shift by 32, unlike <<
        return __funnelshift_lc(0, kAllKeys<kKeys>, min(max(key, 0), kKeys));
    };
    return from(begin) & ~from(end) & kAllKeys<kKeys>;
}

}  // namespace fastattn
