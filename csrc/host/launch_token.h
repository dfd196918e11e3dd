// Numbers by which a launch knows what it has itself left in memory: see device/arrivals.cuh.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace fastattn {

inline constexpr int kLaunchCountBits = 24;

// Another one for each launch, from a random start, so that no memory holds it by accident. Its lowest three bytes
// are zero: there CTAs and tokens are counted.
inline uint64_t launch_token() {
    static std::atomic<uint64_t> next = [] {
        std::random_device random;
        return uint64_t{random()} << 32 | random();
    }();
    uint64_t token = 0;
    while (token == 0) token = next.fetch_add(1, std::memory_order_relaxed) << kLaunchCountBits;
    return token;
}

}  // namespace fastattn
