// Represents a set of keys of a tile by one bit for each key. The lowest bit is the tile's first key.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

template <int kKeys>
inline constexpr uint32_t kAllKeys = 0xffffffffu >> (32 - kKeys);

// Returns the keys [begin, end). Both bounds count from the tile's first key, and may be outside of the tile.
template <int kKeys>
FASTATTN_DEVICE uint32_t keys_between(int32_t begin, int32_t end) {
    const auto from = [](int32_t key) {  // returns the keys >= key. Unlike <<, the funnel shift can shift by 32
        return __funnelshift_lc(0, kAllKeys<kKeys>, min(max(key, 0), kKeys));
    };
    return from(begin) & ~from(end) & kAllKeys<kKeys>;
}

}  // namespace fastattn
