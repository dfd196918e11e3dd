// bar, barrier, nanosleep. PTX ISA, "Parallel Synchronization and Communication Instructions".
#include "barrier.h"

#include "../cluster.h"
#include "../decoder.h"
#include "families.h"

namespace emulator {
namespace {

// r: result, id, count, predicate. option: 1 with a count, reduction, mask to xor with the predicate.
Next wait(Warp& warp, const Operation& o, uint32_t mask) {
    return warp.wait_at_barrier(o, mask);
}

Next arrive(Warp& warp, const Operation& o, uint32_t mask) {
    warp.arrive_at_barrier(o, mask);
    return Next::kContinue;
}

// bar.warp.sync: the warp has gathered the lanes of the member mask already.
Next synchronise_lanes(Warp& warp, const Operation&, uint32_t mask) {
    if (HappensBefore* const order = warp.cta.cluster.order.get(); order != nullptr) {
        order->synchronise(warp.acting(mask));
    }
    return Next::kContinue;
}

Next nothing(Warp&, const Operation&, uint32_t) {
    return Next::kContinue;
}

Next arrive_at_cluster(Warp& warp, const Operation& o, uint32_t mask) {
    Cluster& cluster = warp.cta.cluster;
    if (cluster.order) cluster.order->arrive_at_cluster(warp.acting(mask), o.order != Order::kRelaxed);
    cluster.arrive(warp, mask);
    return Next::kContinue;
}

Next wait_for_cluster(Warp& warp, const Operation&, uint32_t mask) {
    Cluster& cluster = warp.cta.cluster;
    if (cluster.wait(warp, mask)) {
        if (cluster.order) cluster.order->leave_cluster(warp.acting(mask));
        return Next::kContinue;
    }
    ++warp.cta.report.cluster_barrier_waits;
    return warp.wait_and_retry(Path::State::kCluster, mask);
}

}  // namespace

BarrierRequest barrier_request(const Operation& o, Warp& warp, uint32_t mask) {
    const int lane = __builtin_ctz(mask);
    BarrierRequest request{};
    request.id = warp.reg<uint32_t>(o.r[1])[lane];
    request.has_count = o.option[0] != 0;
    if (request.has_count) request.count = warp.reg<uint32_t>(o.r[2])[lane];
    request.reduction = o.option[1];
    if (o.option[1] >= 0) request.predicate = warp.predicate(o.r[3]) ^ static_cast<uint32_t>(o.option[2]);
    return request;
}

void finish_barrier(const Operation& o, std::byte* registers, uint32_t mask, uint32_t ones, uint32_t threads) {
    if (o.option[1] < 0) return;
    if (o.option[1] == 0) {
        auto* d = reinterpret_cast<uint32_t*>(registers + o.r[0]);
        each_lane(mask, [&](int lane) { d[lane] = ones; });
        return;
    }
    auto& word = *reinterpret_cast<uint32_t*>(registers + o.r[0]);
    const bool is_true = o.option[1] == 1 ? ones == threads : ones != 0;
    word = is_true ? word | mask : word & ~mask;
}

void decode_barrier(Decoder& d) {
    Operation& o = d.operation();
    o.type = Class::kBarrier;
    const bool is_bar = d.root() == "bar";
    if (is_bar && d.accept("warp")) {
        d.require_any({"sync"});
        d.require_operands(1, 1);
        o.member_mask = d.read(0, Type::kB32);
        o.has_member_mask = true;
        o.execute = synchronise_lanes;
        return;
    }
    if (!is_bar && d.accept("cluster")) return decode_cluster_barrier(d);
    d.accept("cta");
    const int kind = d.require_any({"sync", "arrive", "red"});
    const bool aligned = d.accept("aligned");
    if (is_bar && aligned) d.fail("unknown modifier .aligned");
    o.is_aligned = is_bar || aligned;
    o.option[1] = -1;
    size_t next = 0;
    if (kind == 2) {
        o.option[1] = d.require_any({"popc", "and", "or"});
        const Type type = d.require_type({Type::kU32, Type::kPred});
        if ((type == Type::kU32) != (o.option[1] == 0)) d.fail("unknown for this type");
        o.r[0] = type == Type::kU32 ? d.write(0, type) : d.write_predicate(d.operand(0));
        next = 1;
    }
    o.r[1] = d.read(next, Type::kU32);
    const size_t end = d.num_operands() - (kind == 2 ? 1 : 0);
    if (end > next + 2 || (kind == 1 && end != next + 2)) d.fail("a form with this number of operands is unknown");
    if (end == next + 2) {
        o.option[0] = 1;
        o.r[2] = d.read(next + 1, Type::kU32);
    }
    if (kind == 2) {
        bool negated = false;
        o.r[3] = d.read_predicate(d.operand(end), negated);
        o.option[2] = negated ? -1 : 0;
    }
    o.execute = kind == 1 ? arrive : wait;
}

void decode_cluster_barrier(Decoder& d) {
    Operation& o = d.operation();
    const int kind = d.require_any({"arrive", "wait"});
    if (kind == 0) {
        if (d.accept_any({"release", "relaxed"}) == 1) o.order = Order::kRelaxed;
    } else {
        d.accept("acquire");
    }
    o.is_aligned = d.accept("aligned");
    d.require_operands(0, 0);
    o.execute = kind == 0 ? arrive_at_cluster : wait_for_cluster;
}

void decode_nanosleep(Decoder& d) {
    d.require_type({Type::kU32});
    d.require_operands(1, 1);
    d.operation().type = Class::kControl;
    d.operation().execute = nothing;
}

}  // namespace emulator
