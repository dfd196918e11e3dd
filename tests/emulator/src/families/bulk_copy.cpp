// cp.async.bulk, cp.reduce.async.bulk and bulk groups. PTX ISA, "Data Movement and Conversion Instructions: Bulk copy".
#include "../cluster.h"
#include "bulk.h"
#include "families.h"
#include "reduction.h"

namespace emulator {
namespace {

constexpr int kAlignment = 16;

// registers: addresses of destination, source and mbarrier; then the number of bytes and the multicast's CTA mask.
// option[0]: the destination's state space; option[1]: 1 with a CTA mask; option[2]: a reduction, see reduction_of.
constexpr int kSizeOfFill = 6, kMaskOfFill = 7, kSizeOfDrain = 4, kSizeOfPrefetch = 2;

constexpr int kNoReduction = -1;

struct Reduction {
    ElementType type;
    int op;
};
int encode_reduction(Reduction reduction) {
    return static_cast<int>(reduction.type) << 8 | reduction.op;
}
Reduction reduction_of(const Operation& o) {
    return {static_cast<ElementType>(o.option[2] >> 8), o.option[2] & 255};
}

int64_t size_of(Warp& warp, const Operation& o, int slot, int lane) {
    const uint32_t size = warp.reg<uint32_t>(o.registers[slot])[lane];
    if (size % kAlignment != 0) {
        throw Fault("misaligned", "a bulk copy of " + std::to_string(size) + " bytes, which is no multiple of 16",
                    lane);
    }
    return size;
}

std::byte* global_range(Warp& warp, const Operation& o, int index, int64_t bytes, int lane, bool is_write) {
    const uint64_t address = address_of(warp, o, index, lane);
    if (address % kAlignment != 0) {
        throw Fault("misaligned", "a bulk copy at a global address that is no multiple of 16", lane);
    }
    return bytes == 0 ? nullptr : warp.global(address, bytes, lane, is_write);
}

Next fill(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        const int64_t bytes = size_of(warp, o, kSizeOfFill, lane);
        uint32_t ctas = 0;
        if (o.option[1] != 0) {
            ctas = warp.reg<uint16_t>(o.registers[kMaskOfFill])[lane];
            if (ctas == 0) throw Fault("cluster", "a multicast to no CTA", lane);
        }
        const Targets targets =
            find_targets(warp, static_cast<Space>(o.option[0]), address_of(warp, o, 0, lane),
                         address_of(warp, o, 2, lane), ctas, bytes, Swizzle::kNone, kAlignment, lane);
        const std::byte* from = global_range(warp, o, 1, bytes, lane, false);
        count_global(warp, o, address_of(warp, o, 1, lane), bytes);
        const Reach source{{{address_of(warp, o, 1, lane), static_cast<uint64_t>(bytes)}}, {}};
        start_fill(warp, o, lane, targets.boxes, targets.signals, source,
                   [from, bytes] { return Bytes(from, from + bytes); });
    });
    return Next::kContinue;
}

// Copies from the CTA's shared memory to that of another CTA.
Next send(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        const int64_t bytes = size_of(warp, o, kSizeOfFill, lane);
        const Targets targets = find_targets(warp, Space::kCluster, address_of(warp, o, 0, lane),
                                             address_of(warp, o, 2, lane), 0, bytes, Swizzle::kNone, kAlignment, lane);
        const SharedBox source =
            shared_box(warp, Space::kShared, address_of(warp, o, 1, lane), bytes, Swizzle::kNone, kAlignment, lane);
        if (targets.boxes[0].owner == &warp.cta) {
            throw Fault("cluster", "a bulk copy from shared memory to that of the same CTA", lane);
        }
        if (o.option[2] == kNoReduction) {
            start_fill(warp, o, lane, targets.boxes, targets.signals, {{}, {source}},
                       [source] { return read_box(source); });
        } else {
            start_update(warp, o, lane, targets.boxes[0], targets.signals[0], {{}, {source}},
                         [&o, source](std::byte* to) {
                             const Bytes with = read_box(source);
                             const Reduction r = reduction_of(o);
                             reduce(r.type, r.op, to, with.data(), static_cast<int64_t>(with.size()));
                         });
        }
    });
    return Next::kContinue;
}

Next drain(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        const int64_t bytes = size_of(warp, o, kSizeOfDrain, lane);
        std::byte* to = global_range(warp, o, 0, bytes, lane, true);
        count_global(warp, o, address_of(warp, o, 0, lane), bytes);
        const SharedBox source =
            shared_box(warp, Space::kShared, address_of(warp, o, 1, lane), bytes, Swizzle::kNone, kAlignment, lane);
        const Reach destination{{{address_of(warp, o, 0, lane), static_cast<uint64_t>(bytes)}}, {}};
        const Effect effect =
            o.option[2] == kNoReduction ? Effect::kStore : effect_of(reduction_of(o).type, reduction_of(o).op);
        start_drain(warp, o, lane, source, destination, effect, [&o, to](const Bytes& data) {
            if (o.option[2] == kNoReduction) {
                std::memcpy(to, data.data(), data.size());
            } else {
                const Reduction r = reduction_of(o);
                reduce(r.type, r.op, to, data.data(), static_cast<int64_t>(data.size()));
            }
        });
    });
    return Next::kContinue;
}

Next prefetch(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) { global_range(warp, o, 0, size_of(warp, o, kSizeOfPrefetch, lane), lane, false); });
    return Next::kContinue;
}

Next commit_group(Warp& warp, const Operation&, uint32_t mask) {
    each_lane(mask, [&](int lane) { warp.bulk_groups.commit(lane); });
    return Next::kContinue;
}

// value: the most groups that may stay in flight. option[0]: 1 with .read.
Next wait_group(Warp& warp, const Operation& o, uint32_t mask) {
    Cluster& cluster = warp.cta.cluster;
    each_lane(mask, [&](int lane) {
        const auto waited = [&](AsyncId id) {
            if (cluster.order) cluster.order->complete(id, warp.acting(1u << lane));
        };
        warp.bulk_groups.wait(cluster.async, lane, static_cast<uint32_t>(o.value), o.option[0] != 0, waited);
    });
    return Next::kContinue;
}

ElementType require_element_type(Decoder& d) {
    using E = ElementType;
    switch (d.require_type()) {
        case Type::kB32:
        case Type::kU32:
            return E::kU32;
        case Type::kB64:
        case Type::kU64:
            return E::kU64;
        case Type::kS32:
            return E::kS32;
        case Type::kS64:
            return E::kS64;
        case Type::kF16:
            return E::kF16;
        case Type::kBF16:
            return E::kBF16;
        case Type::kF32:
            return E::kF32;
        case Type::kF64:
            return E::kF64;
        default:
            d.fail("unknown for this type");
    }
}

void decode_reduction(Decoder& d, bool is_global) {
    const int op = require_reduction(d);
    const bool without_flush = d.accept("noftz");
    const ElementType type = require_element_type(d);
    const bool is_half = type == ElementType::kF16 || type == ElementType::kBF16;
    const bool is_bits = op == kAnd || op == kOr || op == kXor;
    const bool is_unsigned = type == ElementType::kU32 || type == ElementType::kU64;
    bool is_known = has_reduction(type, op) && (!is_bits || is_unsigned) && without_flush == (is_half && op == kAdd);
    if (!is_global) {
        is_known = is_known && (type == ElementType::kU32 || type == ElementType::kS32 ||
                                (type == ElementType::kU64 && op == kAdd));
    }
    if (!is_known) d.fail("unknown operation for this type");
    d.operation().option[2] = encode_reduction({type, op});
}

void decode_control(Decoder& d, bool waits) {
    Operation& o = d.operation();
    d.require_operands(waits ? 1 : 0, waits ? 1 : 0);
    if (waits) {
        o.option[0] = d.accept("read");
        o.value = d.immediate(0);
    }
    o.execute = waits ? wait_group : commit_group;
}

void decode_prefetch_bulk(Decoder& d) {
    Operation& o = d.operation();
    d.require_any({"L2"});
    Space space = d.accept_space();
    const bool has_policy = d.accept("L2::cache_hint");
    if (space != Space::kGlobal) d.fail("unknown state space");
    d.require_operands(2 + has_policy, 2 + has_policy);
    add_address(d, 0, space);
    o.registers.push_back(d.read(1, Type::kU32));
    if (has_policy) d.read(2, Type::kB64);
    o.execute = prefetch;
}

}  // namespace

void decode_bulk(Decoder& d, bool reduces) {
    Operation& o = d.operation();
    d.require_target(90);
    if (!reduces) {
        const int control = d.accept_any({"commit_group", "wait_group"});
        if (control >= 0) return decode_control(d, control == 1);
    }
    const bool prefetches = !reduces && d.accept("prefetch");
    if (d.accept("tensor")) return decode_tensor(d, reduces, prefetches);
    if (prefetches) return decode_prefetch_bulk(d);
    Space to = d.accept_space(), from = d.accept_space();
    const bool is_drain = to == Space::kGlobal && from == Space::kShared;
    const bool is_fill = !reduces && (to == Space::kShared || to == Space::kCluster) && from == Space::kGlobal;
    const bool is_send = to == Space::kCluster && from == Space::kShared;
    if (!is_drain && !is_fill && !is_send) d.fail("unknown state spaces");
    d.require_any({is_drain ? "bulk_group" : "mbarrier::complete_tx::bytes"});
    const bool is_multicast = is_fill && to == Space::kCluster && d.accept("multicast::cluster");
    const bool has_policy = !is_send && d.accept("L2::cache_hint");
    o.option[0] = static_cast<int>(to), o.option[1] = is_multicast, o.option[2] = kNoReduction;
    if (reduces) decode_reduction(d, is_drain);
    const size_t count = (is_drain ? 3 : 4) + is_multicast + has_policy;
    d.require_operands(count, count);
    add_address(d, 0, to);
    add_address(d, 1, from);
    Space mbarrier = to;
    if (!is_drain) add_address(d, 3, mbarrier);
    o.registers.push_back(d.read(2, Type::kU32));
    if (is_multicast) o.registers.push_back(d.read(4, Type::kU16));
    if (has_policy) d.read(count - 1, Type::kB64);
    o.execute = is_drain ? drain : is_fill ? fill : send;
}

}  // namespace emulator
