// Operands of asynchronous copies, and the reductions that some copies apply.
#pragma once

#include "../bulk_transfer.h"
#include "../decoder.h"

namespace emulator {

// Appends an address operand to Operation::registers. Address operands come first there, with two slots each: the base,
// and a constant with the offset. Bit i of option[3] says that base i has 32 bits.
void add_address(Decoder& d, size_t operand, Space& space, size_t parts = 1);
uint64_t address_of(Warp& warp, const Operation& o, int index, int lane);

// The destinations of a copy into shared memory, and the mbarrier that each of them signals. `mask` is the multicast's
// mask of CTAs of the cluster; 0: no multicast, the addresses determine the CTA.
struct Targets {
    std::vector<SharedBox> boxes;
    std::vector<Signal> signals;
};
Targets find_targets(Warp& warp, Space space, uint64_t to, uint64_t mbarrier, uint32_t mask, int64_t bytes,
                     Swizzle swizzle, int alignment, int lane);

// Reductions by a copy. The types .b32 and .b64 of cp.reduce.async.bulk count as kU32 and kU64.
bool has_reduction(ElementType type, int op);
void reduce(ElementType type, int op, std::byte* to, const std::byte* with, int64_t bytes);
Effect effect_of(ElementType type, int op);
int require_reduction(Decoder& d);  // returns a ReductionOp

void decode_bulk(Decoder& d, bool reduces);                     // cp{.reduce}.async.bulk
void decode_tensor(Decoder& d, bool reduces, bool prefetches);  // cp{.reduce}.async.bulk{.prefetch}.tensor

}  // namespace emulator
