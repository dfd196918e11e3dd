// Global memory: the ranges of the host's memory that a launch may touch, to the byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

// Windows of the generic address space. Addresses outside of them are the host's, which are all lower than the windows.
constexpr uint64_t kWindowBytes = uint64_t{1} << 32;
constexpr uint64_t kSharedWindow = uint64_t{0x1} << 56;
constexpr uint64_t kLocalWindow = uint64_t{0x2} << 56;
constexpr uint64_t kParamWindow = uint64_t{0x3} << 56;

// An address of shared memory below kCtaBytes is an offset in the CTA's own; the shared memory of the cluster's CTA
// `rank` begins at (rank + 1) * kCtaBytes. In a cluster, variables have such addresses, as on Hopper, where the bits
// from 24 on are the rank. So code that packs an address into fewer bits, as wgmma's descriptors do, has to remove
// them.
constexpr uint64_t kCtaBytes = uint64_t{1} << 24;

// The system reserves the first bytes of each CTA's shared memory; variables follow.
constexpr int64_t kReservedSharedBytes = 1 << 10;

// Returns true if [address, address + bytes) lies within [0, size), also where the sum would overflow.
inline bool is_inside(uint64_t address, uint64_t bytes, uint64_t size) {
    return address <= size && bytes <= size - address;
}

struct Allocation {
    uint64_t begin, end;
    std::string name;
    bool is_live = true;  // false: freed, and kept only for messages
};

class GlobalMemory {
  public:
    // Messages name each allocation; allocations that overlap form one region, which an access may cross.
    explicit GlobalMemory(std::vector<Allocation> allocations);

    struct Region {
        uint64_t begin = 0, end = 0;
    };
    // Returns the region that contains the access, or an empty one.
    Region find(uint64_t address, uint64_t bytes) const;
    // Returns a text such as "4 bytes at 0x7f…, reaching 12 bytes past the end of argument 3 (… bytes)".
    std::string describe(uint64_t address, uint64_t bytes) const;
    // Returns a text such as "byte 12 of argument 3".
    std::string name(uint64_t address) const;

  private:
    std::vector<Allocation> allocations_;
    std::vector<Region> regions_;  // sorted, disjoint
};

}  // namespace emulator
