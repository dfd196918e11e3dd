// mbarrier objects. PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include <cstdint>
#include <unordered_map>

namespace emulator {

// Its bytes in shared memory are opaque: the state is here, and every other access to them is an error.
struct Mbarrier {
    static constexpr int kBytes = 8;
    static constexpr uint32_t kMostArrivals = (1u << 20) - 1;

    uint32_t expected;         // arrivals of each phase to come
    uint32_t pending;          // arrivals that the current phase waits for
    int64_t transactions = 0;  // bytes that it waits for besides
    uint64_t phase = 0;        // phases that have completed
    uint32_t offset = 0;       // in the CTA's shared memory

    // What arrive returns: opaque to programs, but for mbarrier.pending_count.
    uint64_t state() const { return phase << 32 | pending; }
};

// The mbarrier objects of a CTA, by their offset in its shared memory.
using Mbarriers = std::unordered_map<uint32_t, Mbarrier>;

}  // namespace emulator
