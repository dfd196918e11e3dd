// The random number generator of a launch: splitmix64, started from the launch's seed.
#pragma once

#include <cstdint>

namespace emulator {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
    // Draws a number from 1 to 2^most_log2 - 1: its highest bit is uniform, and so are the bits below it.
    int64_t length(int most_log2) {
        const int log2 = static_cast<int>(below(static_cast<uint32_t>(most_log2)));
        return (int64_t{1} << log2) + below(1u << log2);
    }

  private:
    uint64_t state_;
};

}  // namespace emulator
