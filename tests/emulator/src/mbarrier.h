// mbarrier objects. PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include <cstdint>
#include <unordered_map>

namespace emulator {

// The state of an mbarrier object. Its bytes in shared memory hold nothing, and ordinary accesses to them are an error.
struct Mbarrier {
    static constexpr int kBytes = 8;
    static constexpr uint32_t kMostArrivals = (1u << 20) - 1;

    uint32_t expected;         // arrivals that each later phase needs
    uint32_t pending;          // arrivals that the current phase still waits for
    int64_t transactions = 0;  // bytes (tx-count) that the current phase still waits for
    uint64_t phase = 0;        // phases that have completed
    uint32_t offset = 0;       // in the CTA's shared memory

    // Returns the state that mbarrier.arrive yields, which programs pass to test_wait, try_wait and pending_count.
    uint64_t state() const { return phase << 32 | pending; }
};

// The mbarrier objects of a CTA, by their offset in its shared memory.
using Mbarriers = std::unordered_map<uint32_t, Mbarrier>;

}  // namespace emulator
