// Operands of asynchronous copies, which have more of them than Operation::r has room for.
#pragma once

#include "../bulk_transfer.h"
#include "../decoder.h"

namespace emulator {

// Address operands come first in Operation::registers, two slots for each: its base, and a constant with its offset.
// Bit i of option[3]: base i has 32 bits.
void add_address(Decoder& d, size_t operand, Space& space, size_t parts = 1);
uint64_t address_of(Warp& warp, const Operation& o, int index, int lane);

// The destinations of a copy into shared memory and the mbarriers that it signals: `mask` names CTAs of the cluster, 0
// those that the addresses are in.
struct Targets {
    std::vector<SharedBox> boxes;
    std::vector<Signal> signals;
};
Targets find_targets(Warp& warp, Space space, uint64_t to, uint64_t mbarrier, uint32_t mask, int64_t bytes,
                     Swizzle swizzle, int alignment, int lane);

// Reduction by a copy. Of cp.reduce.async.bulk's types, .b32 and .b64 are kU32 and kU64.
bool has_reduction(ElementType type, int op);
void reduce(ElementType type, int op, std::byte* to, const std::byte* with, int64_t bytes);
Effect effect_of(ElementType type, int op);
int require_reduction(Decoder& d);  // a ReductionOp

void decode_bulk(Decoder& d, bool reduces);                     // cp{.reduce}.async.bulk
void decode_tensor(Decoder& d, bool reduces, bool prefetches);  // cp{.reduce}.async.bulk{.prefetch}.tensor

}  // namespace emulator
