// fence, membar. PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
#include "fence.h"

#include <atomic>

#include "../cluster.h"
#include "addresses.h"
#include "families.h"

namespace emulator {
namespace {

Next fence(Warp& warp, const Operation& o, uint32_t mask) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    HappensBefore* const happens = warp.cta.cluster.order.get();
    if (happens == nullptr) return Next::kContinue;
    const Lanes who = warp.acting(mask);
    const auto order = static_cast<FenceOrder>(o.option[0]);
    const auto scope = static_cast<Scope>(std::min(o.option[1], static_cast<int32_t>(FenceScope::kGpu)));
    switch (static_cast<FenceKind>(o.option[2])) {
        case FenceKind::kMemory:
        case FenceKind::kMbarrierInit:
            happens->fence(who, scope, order != FenceOrder::kRelease, order != FenceOrder::kAcquire);
            break;
        case FenceKind::kProxyAsync:
            happens->fence_proxy(who, true, true, true);
            break;
        case FenceKind::kProxyAsyncGlobal:
            happens->fence_proxy(who, false, false, true);
            break;
        case FenceKind::kProxyAsyncShared:
            happens->fence_proxy(who, true, false, false);
            break;
        case FenceKind::kProxyAsyncCluster:
            happens->fence_proxy(who, true, true, false);
            break;
        case FenceKind::kProxyAlias:
        case FenceKind::kProxyAsyncToGeneric:
        case FenceKind::kProxyTensormap:
            break;
    }
    return Next::kContinue;
}

FenceOrder require_direction(Decoder& d) {
    return d.require_any({"acquire", "release"}) == 0 ? FenceOrder::kAcquire : FenceOrder::kRelease;
}

FenceScope require_scope(Decoder& d) {
    return static_cast<FenceScope>(d.require_any({"cta", "cluster", "gpu", "sys"}));
}

void keep(Decoder& d, FenceKind kind, FenceOrder order, FenceScope scope) {
    Operation& o = d.operation();
    o.type = Class::kBarrier;
    o.option[0] = static_cast<int>(order), o.option[1] = static_cast<int>(scope), o.option[2] = static_cast<int>(kind);
    o.execute = fence;
}

// .acquire has the tensor map's address as an operand, .release has no operands.
void decode_tensormap(Decoder& d) {
    const FenceOrder order = require_direction(d);
    keep(d, FenceKind::kProxyTensormap, order, require_scope(d));
    if (order == FenceOrder::kRelease) return d.require_operands(0, 0);
    d.require_operands(2, 2);
    Space space = Space::kGeneric;
    set_address(d.operation(), d.operation().r[0], d.address(0, space));
    if (d.immediate(1) != 128) d.fail("a tensor map has 128 bytes");
}

void decode_proxy(Decoder& d) {
    if (d.accept("tensormap::generic")) return decode_tensormap(d);
    d.require_operands(0, 0);
    if (d.accept("async::generic")) {
        const FenceOrder order = require_direction(d);
        d.require_any(
            {order == FenceOrder::kAcquire ? "sync_restrict::shared::cluster" : "sync_restrict::shared::cta"});
        d.require_any({"cluster"});
        return keep(d, FenceKind::kProxyAsyncToGeneric, order, FenceScope::kCluster);
    }
    FenceKind kind = FenceKind::kProxyAlias;
    if (d.require_any({"alias", "async"}) == 1) {
        const int space = d.accept_any({"global", "shared::cta", "shared::cluster"});
        constexpr FenceKind kKinds[] = {FenceKind::kProxyAsync, FenceKind::kProxyAsyncGlobal,
                                        FenceKind::kProxyAsyncShared, FenceKind::kProxyAsyncCluster};
        kind = kKinds[space + 1];
    }
    keep(d, kind, FenceOrder::kAcquireRelease, FenceScope::kSystem);
}

}  // namespace

void decode_fence(Decoder& d) {
    if (d.accept("proxy")) return decode_proxy(d);
    d.require_operands(0, 0);
    if (d.root() == "membar") {
        constexpr FenceScope kLevels[] = {FenceScope::kCta, FenceScope::kGpu, FenceScope::kSystem};
        return keep(d, FenceKind::kMemory, FenceOrder::kSequential, kLevels[d.require_any({"cta", "gl", "sys"})]);
    }
    if (d.accept("mbarrier_init")) {
        d.require_any({"release"});
        d.require_any({"cluster"});
        return keep(d, FenceKind::kMbarrierInit, FenceOrder::kRelease, FenceScope::kCluster);
    }
    const int order = d.accept_any({"sc", "acq_rel", "acquire", "release"});
    // PTX has these two forms only: acquire for the cluster's shared memory, release for the CTA's.
    if (order >= 2 && d.accept(order == 2 ? "sync_restrict::shared::cluster" : "sync_restrict::shared::cta")) {
        d.require_any({"cluster"});
        return keep(d, FenceKind::kMemory, static_cast<FenceOrder>(order), FenceScope::kCluster);
    }
    keep(d, FenceKind::kMemory, order < 0 ? FenceOrder::kAcquireRelease : static_cast<FenceOrder>(order),
         require_scope(d));
}

}  // namespace emulator
