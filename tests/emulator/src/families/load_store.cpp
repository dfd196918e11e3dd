// ld, st, and instructions for caches only. PTX ISA, "Data Movement and Conversion Instructions: ld, st".
#include "addresses.h"
#include "families.h"

namespace emulator {
namespace {

constexpr int kMostBytes = 16;  // per lane

struct Shape {
    int count, width, register_width;  // number of elements; bytes of one in memory and of its register
    bool extends_sign;
};

Shape unpack(const Operation& o) {
    return {o.option[1] & 15, o.option[1] >> 4 & 15, o.option[1] >> 8 & 15, (o.option[1] >> 12 & 1) != 0};
}

// r: elements, then the address. option[0]: state space.
Next load(Warp& warp, const Operation& o, uint32_t mask) {
    const Shape shape = unpack(o);
    const auto space = static_cast<Space>(o.option[0]);
    const int bytes = shape.count * shape.width;
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[shape.count], mask, addresses);
    each_lane(mask, [&](int lane) {
        const Located at = warp.locate(space, addresses[lane], bytes, lane, false);
        warp.touch(at, bytes, lane, false);
        const std::byte* from = at.host;
        for (int i = 0; i < shape.count; ++i) {
            uint64_t bits = 0;
            std::memcpy(&bits, from + i * shape.width, shape.width);
            if (shape.extends_sign) {
                const int unused = 64 - 8 * shape.width;
                bits = static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
            }
            std::memcpy(warp.reg<std::byte>(o.r[i]) + lane * shape.register_width, &bits, shape.register_width);
        }
        if (o.order != Order::kWeak) warp.acquire(at, lane);
    });
    warp.count_memory(o, space, addresses, bytes, mask);
    return Next::kContinue;
}

Next store(Warp& warp, const Operation& o, uint32_t mask) {
    const Shape shape = unpack(o);
    const auto space = static_cast<Space>(o.option[0]);
    const int bytes = shape.count * shape.width;
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[shape.count], mask, addresses);
    each_lane(mask, [&](int lane) {
        const Located at = warp.locate(space, addresses[lane], bytes, lane, true);
        std::byte value[kMostBytes];
        for (int i = 0; i < shape.count; ++i) {
            std::memcpy(value + i * shape.width, warp.reg<std::byte>(o.r[i]) + lane * shape.register_width,
                        shape.width);
        }
        warp.touch_by_store(at, bytes, lane, value);
        if (o.order != Order::kWeak) warp.release(at, lane, false);
        std::memcpy(at.host, value, bytes);
    });
    warp.count_memory(o, space, addresses, bytes, mask);
    return Next::kContinue;
}

// Loads or stores a .b128 register.
template <bool kLoads>
Next access_wide(Warp& warp, const Operation& o, uint32_t mask) {
    constexpr int kBytes = 16;
    const auto space = static_cast<Space>(o.option[0]);
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    std::byte* registers = warp.reg<std::byte>(o.r[0]);
    each_lane(mask, [&](int lane) {
        const Located at = warp.locate(space, addresses[lane], kBytes, lane, !kLoads);
        std::byte* mine = registers + lane * kBytes;
        warp.touch(at, kBytes, lane, !kLoads);
        if (!kLoads && o.order != Order::kWeak) warp.release(at, lane, false);
        std::memcpy(kLoads ? mine : at.host, kLoads ? at.host : mine, kBytes);
        if (kLoads && o.order != Order::kWeak) warp.acquire(at, lane);
    });
    warp.count_memory(o, space, addresses, kBytes, mask);
    return Next::kContinue;
}

Next nothing(Warp&, const Operation&, uint32_t) {
    return Next::kContinue;
}

Next zero_policy(Warp& warp, const Operation& o, uint32_t mask) {
    uint64_t* d = warp.reg<uint64_t>(o.r[0]);
    each_lane(mask, [&](int lane) { d[lane] = 0; });
    return Next::kContinue;
}

void decode_access(Decoder& d, bool is_load) {
    Operation& o = d.operation();
    accept_order_and_scope(d, Order::kWeak);
    Space space = d.accept_space();
    if (is_load && d.accept("nc") && space != Space::kGlobal) d.fail("unknown modifier .nc");
    const bool has_policy = accept_cache_hints(d);
    d.accept("unified");
    const int vector = d.accept_any({"v2", "v4", "v8"});
    const int count = vector < 0 ? 1 : 2 << vector;
    const Type type = d.require_type();
    if (type == Type::kPred || is_packed(type) || is_integer_pair(type) || type == Type::kTF32) {
        d.fail("unknown for this type");
    }
    const int width = width_of(type);
    if (count * width > kMostBytes) d.fail("more than 16 bytes a lane are not supported");
    d.require_operands(2 + has_policy, 2 + has_policy);
    if (has_policy) d.read(2, Type::kB64);
    const auto elements = d.elements(is_load ? 0 : 1);
    if (static_cast<int>(elements.size()) != count) d.fail("a vector of another length than the modifier says");
    int register_width = 0;
    for (int i = 0; i < count; ++i) {
        const auto [slot, found] = is_load ? d.write_any(*elements[i], type) : d.read_any(*elements[i], type);
        o.r[i] = slot;
        const bool is_sink = elements[i]->kind == ptx::Operand::Kind::kSink;
        if (register_width != 0 && found != register_width && !is_sink)
            d.fail("registers of different widths in a vector");
        if (!is_sink) register_width = std::max(register_width, found);
    }
    if (register_width == 0) register_width = width;
    for (int i = 0; i < count; ++i) {
        if (elements[i]->kind == ptx::Operand::Kind::kSink) o.r[i] = d.scratch(register_width);
    }
    set_address(o, o.r[count], d.address(is_load ? 1 : 0, space));
    if (!is_load && (space == Space::kParam || space == Space::kConst)) d.fail("a store into read-only memory");
    o.type = class_of(space);
    o.option[0] = static_cast<int>(space);
    o.option[1] = count | width << 4 | register_width << 8 | (is_load && is_signed(type)) << 12;
    o.execute = is_load ? load : store;
    if (type == Type::kB128) o.execute = is_load ? access_wide<true> : access_wide<false>;
}

}  // namespace

void decode_ld(Decoder& d) {
    decode_access(d, true);
}

void decode_st(Decoder& d) {
    if (d.accept("async")) return decode_st_async(d);
    decode_access(d, false);
}

void decode_prefetch(Decoder& d) {
    Space space = d.accept_space();
    if (d.root() == "prefetchu") {
        d.require_any({"L1"});
    } else if (!d.accept("tensormap")) {
        d.require_any({"L1", "L2", "L2::evict_last", "L2::evict_normal"});
    }
    d.require_operands(1, 1);
    d.address(0, space);
    d.operation().type = Class::kGlobal;
    d.operation().execute = nothing;
}

// Policies advise the L2 cache, which is not emulated.
void decode_createpolicy(Decoder& d) {
    const int form = d.require_any({"fractional", "range", "cvt"});
    size_t least = 1, most = 2;  // a fraction
    if (form == 1) {
        Space space = d.accept_space();
        if (space != Space::kGlobal && space != Space::kGeneric) d.fail("unknown state space");
        least = most = 4;
    }
    if (form == 2) {
        d.require_any({"L2"});
        least = most = 2;
    } else {
        d.require_any({"L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged"});
        d.accept_any({"L2::evict_first", "L2::evict_unchanged"});
    }
    d.require_type({Type::kB64});
    d.require_operands(least, most);
    d.operation().r[0] = d.write(0, Type::kB64);
    d.operation().execute = zero_policy;
}

}  // namespace emulator
