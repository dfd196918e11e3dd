// Numbers by which a launch knows what it has itself left in memory. device/arrivals.cuh and device/launch_counter.cuh
// say why no other launch takes it for its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace fastattn {

// Of a token these lowest bits are zero: there CTAs and tokens of text are counted.
inline constexpr int kLaunchCountBits = 24;
inline constexpr uint64_t kLaunchCountMask = (uint64_t{1} << kLaunchCountBits) - 1;

// Another one for each launch of this process, never zero, from a random start: so memory that another program or kernel
// left behind holds one by an accident of 1 in 2^40. After 2^40 launches tokens come again, which is harmless: a launch
// that is over leaves its token nowhere.
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
