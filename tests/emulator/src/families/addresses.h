// The addresses of a memory instruction's lanes.
#pragma once

#include "../decoder.h"
#include "../machine.h"

namespace emulator {

// Stores an address operand in an operation: the base in `slot`, the offset in `value`, the base's width in option[3].
inline void set_address(Operation& operation, Slot& slot, const Address& address) {
    slot = address.base;
    operation.value = address.offset;
    operation.option[3] = address.base_width;
}

inline void lane_addresses(Warp& warp, const Operation& operation, Slot base, uint32_t mask,
                           uint64_t (&addresses)[kWarpSize]) {
    if (operation.option[3] == 4) {
        const uint32_t* a = warp.reg<uint32_t>(base);
        each_lane(mask, [&](int lane) { addresses[lane] = static_cast<uint32_t>(a[lane] + operation.value); });
    } else {
        const uint64_t* a = warp.reg<uint64_t>(base);
        each_lane(mask, [&](int lane) { addresses[lane] = a[lane] + static_cast<uint64_t>(operation.value); });
    }
}

// Accepts the order (default: `without`) and the scope (default: .gpu) of an access. Only the race detector uses them,
// because the emulator's memory is sequentially consistent.
inline void accept_order_and_scope(Decoder& d, Order without) {
    constexpr Order kOrders[] = {Order::kWeak,    Order::kRelaxed, Order::kRelaxed,
                                 Order::kAcquire, Order::kRelease, Order::kAcquireRelease};
    d.accept("mmio");
    const int order = d.accept_any({"weak", "volatile", "relaxed", "acquire", "release", "acq_rel"});
    const int scope = d.accept_any({"cta", "cluster", "gpu", "sys"});
    d.operation().order = order < 0 ? without : kOrders[order];
    d.operation().scope = scope < 0 ? Scope::kGpu : static_cast<Scope>(std::min(scope, 2));
}

// Accepts cache hints, which have no effect. Returns true if the last operand is a cache policy.
inline bool accept_cache_hints(Decoder& d) {
    d.accept_any({"ca", "cg", "cs", "lu", "cv", "wb", "wt"});
    d.accept_any({"L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"});
    d.accept_any({"L2::evict_normal", "L2::evict_first", "L2::evict_last"});
    const bool has_policy = d.accept("L2::cache_hint");
    d.accept_any({"L2::64B", "L2::128B", "L2::256B"});
    return has_policy;
}

inline Class class_of(Space space) {
    return space == Space::kShared || space == Space::kCluster ? Class::kShared
           : space == Space::kLocal                            ? Class::kLocal
           : space == Space::kParam                            ? Class::kParam
                                                               : Class::kGlobal;
}

}  // namespace emulator
