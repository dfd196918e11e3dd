// Global memory: what a launch may touch of the host's memory, to the byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

// Generic addresses outside of these windows are addresses of the host, which has none so high.
constexpr uint64_t kWindowBytes = uint64_t{1} << 32;
constexpr uint64_t kSharedWindow = uint64_t{0x1} << 56;
constexpr uint64_t kLocalWindow = uint64_t{0x2} << 56;
constexpr uint64_t kParamWindow = uint64_t{0x3} << 56;

// Addresses of shared memory: those below kCtaBytes are offsets in the CTA's own; those of the cluster's CTA `rank` begin
// at (rank + 1) * kCtaBytes.
constexpr uint64_t kCtaBytes = uint64_t{1} << 24;

// The system keeps these of each CTA; variables come behind them.
constexpr int64_t kReservedSharedBytes = 1 << 10;

// Also for addresses of which the sum would overflow, as those just below 0 do.
inline bool is_inside(uint64_t address, uint64_t bytes, uint64_t size) {
    return address <= size && bytes <= size - address;
}

struct Allocation {
    uint64_t begin, end;
    std::string name;
    bool is_live = true;  // false: it was freed, and is known for messages only
};

class GlobalMemory {
  public:
    // Ranges that overlap or touch stay apart in messages but form one region that an access may cross.
    explicit GlobalMemory(std::vector<Allocation> allocations);

    struct Region {
        uint64_t begin = 0, end = 0;
    };
    // The region that holds the access, or an empty one.
    Region find(uint64_t address, uint64_t bytes) const;
    // "12 bytes past the end of argument 3 (…)"
    std::string describe(uint64_t address, uint64_t bytes) const;
    // "byte 12 of argument 3 (…)"
    std::string name(uint64_t address) const;

  private:
    std::vector<Allocation> allocations_;
    std::vector<Region> regions_;  // sorted, disjoint
};

}  // namespace emulator
