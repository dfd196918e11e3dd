// A warp's arrival at a barrier of its CTA.
#pragma once

#include "../machine.h"

namespace emulator {

struct BarrierRequest {
    uint32_t id, count;
    bool has_count;
    int reduction;       // 0 popc, 1 and, 2 or; -1: none
    uint32_t predicate;  // bar.red's source, one bit per lane
};

BarrierRequest barrier_request(const Operation& operation, Warp& warp, uint32_t mask);

// Writes the result of bar.red for the lanes in the mask: of `threads` waiting threads, `ones` had a true predicate.
void finish_barrier(const Operation& operation, std::byte* registers, uint32_t mask, uint32_t ones, uint32_t threads);

}  // namespace emulator
