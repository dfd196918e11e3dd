// Instructions between the lanes of a warp: shfl, vote, match, redux, activemask, elect. The warp gathers the lanes of
// the member mask before it executes one of them.
#include "../decoder.h"
#include "../machine.h"
#include "families.h"

namespace emulator {
namespace {

enum Shuffle : int { kUp, kDown, kBfly, kIdx };

// r: result, predicate, a, b, c.
template <int kMode>
Next shfl(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    uint32_t a[kWarpSize];
    std::memcpy(a, warp.reg<uint32_t>(o.r[2]), sizeof(a));
    const uint32_t *b = warp.reg<uint32_t>(o.r[3]), *c = warp.reg<uint32_t>(o.r[4]);
    uint32_t in_range = 0;
    each_lane(mask, [&](int lane) {
        const int by = static_cast<int>(b[lane] & 31), clamp = static_cast<int>(c[lane] & 31);
        const int segment = static_cast<int>(c[lane] >> 8 & 31);
        const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        int from = 0;
        bool valid = false;
        switch (kMode) {
            case kUp:
                from = lane - by, valid = from >= most;
                break;
            case kDown:
                from = lane + by, valid = from <= most;
                break;
            case kBfly:
                from = lane ^ by, valid = from <= most;
                break;
            default:
                from = least | (by & ~segment), valid = from <= most;
                break;
        }
        if (!valid) from = lane;
        if ((mask >> from & 1) == 0) {
            throw Fault("divergence", "shfl reads lane " + std::to_string(from) + ", which does not take part", lane);
        }
        in_range |= uint32_t{valid} << lane;
        d[lane] = a[from];
    });
    warp.set_predicate(o.r[1], mask, in_range);
    return Next::kContinue;
}

enum Vote : int { kAll, kAny, kUni, kBallot };

Next vote(Warp& warp, const Operation& o, uint32_t mask) {
    const uint32_t p = (warp.predicate(o.r[1]) ^ static_cast<uint32_t>(o.option[1])) & mask;
    if (o.option[0] == kBallot) {
        uint32_t* d = warp.reg<uint32_t>(o.r[0]);
        each_lane(mask, [&](int lane) { d[lane] = p; });
        return Next::kContinue;
    }
    const bool result = o.option[0] == kAll ? p == mask : o.option[0] == kAny ? p != 0 : p == 0 || p == mask;
    warp.set_predicate(o.r[0], mask, result ? kAllLanes : 0);
    return Next::kContinue;
}

// r: result, predicate, a.
template <typename T>
Next match(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    T a[kWarpSize];
    std::memcpy(a, warp.reg<T>(o.r[2]), sizeof(a));
    bool all_equal = true;
    each_lane(mask, [&](int lane) {
        uint32_t same = 0;
        each_lane(mask, [&](int other) { same |= uint32_t{a[other] == a[lane]} << other; });
        all_equal = all_equal && same == mask;
        d[lane] = same;
    });
    if (o.option[0] != 0) {  // match.all
        each_lane(mask, [&](int lane) { d[lane] = all_equal ? mask : 0; });
        warp.set_predicate(o.r[1], mask, all_equal ? kAllLanes : 0);
    }
    return Next::kContinue;
}

enum Reduction : int { kAdd, kMin, kMax, kAnd, kOr, kXor };

template <typename T>
Next redux(Warp& warp, const Operation& o, uint32_t mask) {
    T* d = warp.reg<T>(o.r[0]);
    const T* a = warp.reg<T>(o.r[1]);
    T result = a[__builtin_ctz(mask)];
    each_lane(mask & (mask - 1), [&](int lane) {
        const T x = a[lane];
        switch (o.option[0]) {
            case kAdd:
                result = static_cast<T>(static_cast<uint32_t>(result) + static_cast<uint32_t>(x));
                break;
            case kMin:
                result = std::min(result, x);
                break;
            case kMax:
                result = std::max(result, x);
                break;
            case kAnd:
                result &= x;
                break;
            case kOr:
                result |= x;
                break;
            default:
                result ^= x;
                break;
        }
    });
    each_lane(mask, [&](int lane) { d[lane] = result; });
    return Next::kContinue;
}

Next activemask(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    each_lane(mask, [&](int lane) { d[lane] = mask; });
    return Next::kContinue;
}

// The lowest lane that takes part is the leader; PTX requires that the same mask always elects the same lane.
Next elect(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    const int leader = __builtin_ctz(mask);
    each_lane(mask, [&](int lane) { d[lane] = leader; });
    warp.set_predicate(o.r[1], mask, 1u << leader);
    return Next::kContinue;
}

void set_members(Decoder& d, size_t operand) {
    d.operation().member_mask = d.read(operand, Type::kB32);
    d.operation().has_member_mask = true;
    d.operation().type = Class::kWarp;
}

// Decodes the results d|p; p may be missing.
void write_results(Decoder& d, Slot& value, Slot& predicate) {
    const ptx::Operand& results = d.operand(0);
    const bool is_pair = results.kind == ptx::Operand::Kind::kPair;
    value = d.write(is_pair ? results.elements[0] : results, Type::kB32);
    predicate = is_pair ? d.write_predicate(results.elements[1]) : d.scratch(0);
}

}  // namespace

void decode_shfl(Decoder& d) {
    d.require_any({"sync"});
    const int mode = d.require_any({"up", "down", "bfly", "idx"});
    d.require_type({Type::kB32});
    d.require_operands(5, 5);
    Operation& o = d.operation();
    write_results(d, o.r[0], o.r[1]);
    for (size_t i = 1; i < 4; ++i) o.r[1 + i] = d.read(i, Type::kB32);
    set_members(d, 4);
    constexpr Execute kModes[] = {shfl<kUp>, shfl<kDown>, shfl<kBfly>, shfl<kIdx>};
    o.execute = kModes[mode];
}

void decode_vote(Decoder& d) {
    d.require_any({"sync"});
    const int mode = d.require_any({"all", "any", "uni", "ballot"});
    d.require_type({mode == kBallot ? Type::kB32 : Type::kPred});
    d.require_operands(3, 3);
    Operation& o = d.operation();
    o.r[0] = mode == kBallot ? d.write(0, Type::kB32) : d.write_predicate(d.operand(0));
    bool negated = false;
    o.r[1] = d.read_predicate(d.operand(1), negated);
    o.option[0] = mode, o.option[1] = negated ? -1 : 0;
    set_members(d, 2);
    o.execute = vote;
}

void decode_match(Decoder& d) {
    const bool all = d.require_any({"any", "all"}) == 1;
    d.require_any({"sync"});
    const Type type = d.require_type({Type::kB32, Type::kB64});
    d.require_operands(3, 3);
    Operation& o = d.operation();
    write_results(d, o.r[0], o.r[1]);
    o.r[2] = d.read(1, type);
    o.option[0] = all;
    set_members(d, 2);
    o.execute = type == Type::kB32 ? match<uint32_t> : match<uint64_t>;
}

void decode_elect(Decoder& d) {
    d.require_target(90);
    d.require_any({"sync"});
    d.require_operands(2, 2);
    Operation& o = d.operation();
    if (d.operand(0).kind != ptx::Operand::Kind::kPair) d.fail("a register and a predicate are expected: d|p");
    write_results(d, o.r[0], o.r[1]);
    set_members(d, 1);
    o.execute = elect;
}

void decode_redux(Decoder& d) {
    d.require_any({"sync"});
    const int op = d.require_any({"add", "min", "max", "and", "or", "xor"});
    const Type type = op <= kMax ? d.require_type({Type::kU32, Type::kS32}) : d.require_type({Type::kB32});
    d.require_operands(3, 3);
    Operation& o = d.operation();
    o.r[0] = d.write(0, type), o.r[1] = d.read(1, type);
    o.option[0] = op;
    set_members(d, 2);
    o.execute = type == Type::kS32 ? redux<int32_t> : redux<uint32_t>;
}

void decode_activemask(Decoder& d) {
    d.require_type({Type::kB32});
    d.require_operands(1, 1);
    d.operation().type = Class::kWarp;
    d.operation().r[0] = d.write(0, Type::kB32);
    d.operation().execute = activemask;
}

}  // namespace emulator
