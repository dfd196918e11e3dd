// mbarrier and cp.async.mbarrier. PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#include "../cluster.h"
#include "addresses.h"
#include "families.h"

namespace emulator {
namespace {

// r: result, address, then a count, bytes or a phase. option[0]: the address's state space; option[2]: the Scope of an
// arrival or a wait. Operation::scope is the cluster instead, because the access to the object itself is atomic there.

Scope scope_of(const Operation& o) {
    return static_cast<Scope>(o.option[2]);
}

// Reports the access to the mbarrier object itself. It is strong, except for init and inval.
void touch_object(Warp& warp, Cta& owner, uint64_t address, int lane) {
    warp.touch({nullptr, Space::kShared, &owner, address}, Mbarrier::kBytes, lane, true);
}

// Calls function(mbarrier, its CTA, lane) for each lane.
template <typename Function>
void each_mbarrier(Warp& warp, const Operation& o, uint32_t mask, Function&& function) {
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    each_lane(mask, [&](int lane) {
        Cta& owner = warp.shared_owner(static_cast<Space>(o.option[0]), addresses[lane], lane);
        Mbarrier& mbarrier = owner.mbarrier(addresses[lane], lane);
        touch_object(warp, owner, addresses[lane], lane);
        function(mbarrier, owner, lane);
    });
}

Next init(Warp& warp, const Operation& o, uint32_t mask) {
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    const uint32_t* count = warp.reg<uint32_t>(o.r[2]);
    each_lane(mask, [&](int lane) {
        Cta& owner = warp.shared_owner(static_cast<Space>(o.option[0]), addresses[lane], lane);
        owner.init_mbarrier(addresses[lane], count[lane], lane);
        touch_object(warp, owner, addresses[lane], lane);
    });
    return Next::kContinue;
}

Next invalidate(Warp& warp, const Operation& o, uint32_t mask) {
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    each_lane(mask, [&](int lane) {
        Cta& owner = warp.shared_owner(static_cast<Space>(o.option[0]), addresses[lane], lane);
        owner.invalidate_mbarrier(addresses[lane], lane);
        touch_object(warp, owner, addresses[lane], lane);
    });
    return Next::kContinue;
}

Next expect(Warp& warp, const Operation& o, uint32_t mask) {
    const uint32_t* bytes = warp.reg<uint32_t>(o.r[2]);
    each_mbarrier(warp, o, mask,
                  [&](Mbarrier& m, Cta& cta, int lane) { cta.expect_transactions(m, bytes[lane], lane); });
    return Next::kContinue;
}

Next complete(Warp& warp, const Operation& o, uint32_t mask) {
    const uint32_t* bytes = warp.reg<uint32_t>(o.r[2]);
    each_mbarrier(warp, o, mask,
                  [&](Mbarrier& m, Cta& cta, int lane) { cta.complete_transactions(m, bytes[lane], lane); });
    return Next::kContinue;
}

// Calls function(CTA, offset, lanes) for each mbarrier that the lanes address, with those lanes that address it.
template <typename Function>
void each_group(Warp& warp, const Operation& o, uint32_t mask, Function&& function) {
    if (!warp.cta.cluster.order) return;
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    while (mask != 0) {
        const int first = __builtin_ctz(mask);
        uint32_t same = 0;
        each_lane(mask, [&](int lane) { same |= uint32_t{addresses[lane] == addresses[first]} << lane; });
        mask &= ~same;
        uint64_t offset = addresses[first];
        Cta& owner = warp.shared_owner(static_cast<Space>(o.option[0]), offset, first);
        function(owner, static_cast<uint32_t>(offset), warp.acting(same));
    }
}

enum ArriveFlags { kExpects = 1, kDrops = 2, kNoComplete = 4, kHasState = 8 };

// option[1]: ArriveFlags.
Next arrive(Warp& warp, const Operation& o, uint32_t mask) {
    const int flags = o.option[1];
    const uint32_t* number = warp.reg<uint32_t>(o.r[2]);
    uint64_t* state = warp.reg<uint64_t>(o.r[0]);
    each_group(warp, o, mask, [&](Cta& owner, uint32_t offset, const Lanes& who) {
        owner.cluster.order->arrive_at_mbarrier(who, owner.rank, offset, o.order != Order::kRelaxed, scope_of(o));
    });
    each_mbarrier(warp, o, mask, [&](Mbarrier& m, Cta& cta, int lane) {
        const uint32_t count = (flags & kExpects) != 0 ? 1 : number[lane];
        if ((flags & kHasState) != 0) state[lane] = m.state();
        if ((flags & kNoComplete) != 0 && count >= m.pending && m.transactions == 0) {
            throw Fault("mbarrier", "an arrive.noComplete that completes the phase", lane);
        }
        if ((flags & kExpects) != 0) cta.expect_transactions(m, number[lane], lane);
        if ((flags & kDrops) != 0) {
            if (count > m.expected) throw Fault("mbarrier", "more arrivals are dropped than the phases expect", lane);
            m.expected -= count;
        }
        cta.arrive(m, count, lane);
    });
    return Next::kContinue;
}

enum WaitFlags { kIsParity = 1, kMayBlock = 2 };

// option[1]: WaitFlags.
Next wait(Warp& warp, const Operation& o, uint32_t mask) {
    const bool is_parity = (o.option[1] & kIsParity) != 0;
    uint32_t completed = 0;
    each_mbarrier(warp, o, mask, [&](Mbarrier& m, Cta& cta, int lane) {
        bool is_complete = false;
        if (is_parity) {
            const uint32_t parity = warp.reg<uint32_t>(o.r[2])[lane];
            if (parity > 1) throw Fault("mbarrier", "a phase's parity is 0 or 1", lane);
            is_complete = (m.phase & 1) != parity;
        } else {
            const uint32_t phase = static_cast<uint32_t>(warp.reg<uint64_t>(o.r[2])[lane] >> 32);
            const auto ahead = static_cast<uint32_t>(m.phase) - phase;
            if (ahead > 1) {
                throw Fault("mbarrier", "a wait for a phase that is neither the current one nor the one before", lane);
            }
            is_complete = ahead == 1;
        }
        completed |= is_complete ? 1u << lane : 0;
    });
    each_group(warp, o, completed, [&](Cta& owner, uint32_t offset, const Lanes& who) {
        owner.cluster.order->wait_for_mbarrier(who, owner.rank, offset, o.order != Order::kRelaxed, scope_of(o));
    });
    // try_wait may suspend the thread until the phase completes, or give up at any time; it does either at random.
    const bool gives_up = warp.has_timed_out() || (o.option[1] & kMayBlock) == 0;
    if (completed != mask && !gives_up && warp.cta.random.below(4) != 0) {
        ++warp.cta.report.mbarrier_waits;
        return warp.wait_and_retry(Path::State::kMbarrier, mask);
    }
    warp.set_predicate(o.r[0], mask, completed);
    return Next::kContinue;
}

Next pending_count(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* count = warp.reg<uint32_t>(o.r[0]);
    const uint64_t* state = warp.reg<uint64_t>(o.r[1]);
    each_lane(mask, [&](int lane) { count[lane] = static_cast<uint32_t>(state[lane]); });
    return Next::kContinue;
}

// Arrives when all cp.async that the lane has started before have landed. option[1]: 1 for .noinc.
Next arrive_after_copies(Warp& warp, const Operation& o, uint32_t mask) {
    if (o.option[1] == 0) {
        each_mbarrier(warp, o, mask, [&](Mbarrier& m, Cta&, int lane) {
            if (m.pending >= Mbarrier::kMostArrivals) throw Fault("mbarrier", "too many arrivals are pending", lane);
            ++m.pending;
        });
    }
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    std::vector<std::pair<Cta*, uint64_t>> places(kWarpSize);
    each_lane(mask, [&](int lane) {
        Cta& owner = warp.shared_owner(static_cast<Space>(o.option[0]), addresses[lane], lane);
        places[lane] = {&owner, addresses[lane]};
    });
    const uint64_t count = warp.num_copies_started();
    warp.cta.cluster.async.start(warp, o, __builtin_ctz(mask), AsyncEngine::Latest::kUnbound,
                                 [&warp, mask, count, places = std::move(places)] {
                                     warp.land_first_copies(mask, count);
                                     each_lane(mask, [&](int lane) {
                                         Cta& owner = *places[lane].first;
                                         Mbarrier& mbarrier = owner.mbarrier(places[lane].second, lane);
                                         warp.order_first_copies(lane, count, owner, mbarrier);
                                         owner.arrive(mbarrier, 1, lane);
                                     });
                                 });
    return Next::kContinue;
}

void set_mbarrier_address(Decoder& d, size_t operand) {
    Operation& o = d.operation();
    Space space = d.accept_space();
    if (space != Space::kGeneric && space != Space::kShared && space != Space::kCluster) {
        d.fail("an mbarrier object is in shared memory");
    }
    set_address(o, o.r[1], d.address(operand, space));
    o.scope = Scope::kCluster;
    o.option[0] = static_cast<int>(space);
}

// Returns the scope that the opcode states; PTX's default is .cta.
int accept_scope(Decoder& d) {
    return static_cast<int>(d.accept_any({"cta", "cluster"}) == 1 ? Scope::kCluster : Scope::kCta);
}

void decode_arrive(Decoder& d, bool drops) {
    Operation& o = d.operation();
    const bool expects = d.accept("expect_tx");
    const bool no_complete = !expects && d.accept("noComplete");
    o.order = d.accept_any({"release", "relaxed"}) == 1 ? Order::kRelaxed : Order::kRelease;
    o.option[2] = accept_scope(d);
    set_mbarrier_address(d, 1);
    d.require_type({Type::kB64});
    const bool needs_number = expects || no_complete;
    d.require_operands(needs_number ? 3 : 2, 3);
    const bool has_state = d.operand(0).kind != ptx::Operand::Kind::kSink;
    if (has_state && static_cast<Space>(o.option[0]) == Space::kCluster) {
        d.fail("an arrival at an mbarrier of another CTA gives no state");
    }
    o.r[2] = d.num_operands() == 3 ? d.read(2, Type::kU32) : d.constant(1, 4);
    if (has_state) o.r[0] = d.write(0, Type::kB64);
    o.option[1] =
        (expects ? kExpects : 0) | (drops ? kDrops : 0) | (no_complete ? kNoComplete : 0) | (has_state ? kHasState : 0);
    o.execute = arrive;
}

void decode_wait(Decoder& d, bool may_block) {
    Operation& o = d.operation();
    const bool is_parity = d.accept("parity");
    o.order = d.accept_any({"acquire", "relaxed"}) == 1 ? Order::kRelaxed : Order::kAcquire;
    o.option[2] = accept_scope(d);
    set_mbarrier_address(d, 1);
    d.require_type({Type::kB64});
    d.require_operands(3, may_block ? 4 : 3);
    o.r[2] = d.read(2, is_parity ? Type::kU32 : Type::kB64);
    o.r[0] = d.write_predicate(d.operand(0));
    if (d.num_operands() == 4) d.read(3, Type::kU32);  // the time limit, which has no effect
    o.option[1] = (is_parity ? kIsParity : 0) | (may_block ? kMayBlock : 0);
    o.execute = wait;
}

}  // namespace

void decode_mbarrier(Decoder& d) {
    Operation& o = d.operation();
    o.type = Class::kBarrier;
    const int form = d.accept_any({"arrive", "arrive_drop", "test_wait", "try_wait", "pending_count"});
    if (form == 0 || form == 1) return decode_arrive(d, form == 1);
    if (form == 2 || form == 3) return decode_wait(d, form == 3);
    if (form == 4) {
        d.require_type({Type::kB64});
        d.require_operands(2, 2);
        o.r[0] = d.write(0, Type::kU32);
        o.r[1] = d.read(1, Type::kB64);
        o.execute = pending_count;
        return;
    }
    const int kind = d.require_any({"init", "inval", "expect_tx", "complete_tx"});
    if (kind >= 2) {
        o.order = Order::kRelaxed;
        d.accept("relaxed");
        d.accept_any({"cta", "cluster"});
    }
    set_mbarrier_address(d, 0);
    d.require_type({Type::kB64});
    d.require_operands(kind == 1 ? 1 : 2, kind == 1 ? 1 : 2);
    if (kind != 1) o.r[2] = d.read(1, Type::kU32);
    o.execute = kind == 0 ? init : kind == 1 ? invalidate : kind == 2 ? expect : complete;
}

void decode_cp_async_mbarrier(Decoder& d) {
    Operation& o = d.operation();
    d.require_any({"arrive"});
    o.option[1] = d.accept("noinc");
    o.order = Order::kRelaxed;
    set_mbarrier_address(d, 0);
    d.require_type({Type::kB64});
    d.require_operands(1, 1);
    o.execute = arrive_after_copies;
}

}  // namespace emulator
