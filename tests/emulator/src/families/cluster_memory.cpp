// Distributed shared memory: mapa, getctarank, st.async, red.async. PTX ISA, "Data Movement and Conversion
// Instructions" and "Parallel Synchronization and Communication Instructions".
#include "../cluster.h"
#include "bulk.h"
#include "families.h"
#include "reduction.h"

namespace emulator {
namespace {

struct Placed {
    uint32_t rank;
    uint64_t offset;
};

// Returns the CTA and the offset of an address, even if that CTA has ended. option[0]: 0 if the address is generic.
Placed place(Warp& warp, const Operation& o, uint64_t address, int lane) {
    if (o.option[0] == 0) address -= kSharedWindow;
    if (address < kCtaBytes) return {warp.cta.rank, address};
    if (address >= (warp.cta.cluster.num_ctas() + uint64_t{1}) * kCtaBytes) {
        throw Fault("cluster", "an address that is in the shared memory of no CTA of the cluster", lane);
    }
    return {static_cast<uint32_t>(address / kCtaBytes - 1), address % kCtaBytes};
}

template <typename T>
Next map_address(Warp& warp, const Operation& o, uint32_t mask) {
    T* d = warp.reg<T>(o.r[0]);
    const T* a = warp.reg<T>(o.r[1]);
    const uint32_t* rank = warp.reg<uint32_t>(o.r[2]);
    each_lane(mask, [&](int lane) {
        if (rank[lane] >= warp.cta.cluster.num_ctas()) {
            throw Fault("cluster",
                        "mapa to CTA " + std::to_string(rank[lane]) + " of a cluster of " +
                            std::to_string(warp.cta.cluster.num_ctas()),
                        lane);
        }
        const uint64_t mapped = (rank[lane] + uint64_t{1}) * kCtaBytes + place(warp, o, a[lane], lane).offset;
        d[lane] = static_cast<T>(mapped + (o.option[0] == 0 ? kSharedWindow : 0));
    });
    return Next::kContinue;
}

template <typename T>
Next find_rank(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    const T* a = warp.reg<T>(o.r[1]);
    each_lane(mask, [&](int lane) { d[lane] = place(warp, o, a[lane], lane).rank; });
    return Next::kContinue;
}

// registers: addresses of destination and mbarrier, then the values. option[0]: the addresses' state space; option[1]:
// bytes of one value; option[2]: for red.async, ElementType << 8 | ReductionOp.
constexpr int kFirstValue = 4;

const Reach kFromRegisters{{}, {}, Proxy::kGeneric};

Bytes values(Warp& warp, const Operation& o, int lane) {
    const int width = o.option[1];
    Bytes bytes;
    for (size_t i = kFirstValue; i < o.registers.size(); ++i) {
        const std::byte* value = warp.reg<std::byte>(o.registers[i]) + lane * width;
        bytes.insert(bytes.end(), value, value + width);
    }
    return bytes;
}

Targets find_target(Warp& warp, const Operation& o, int lane) {
    const int bytes = o.option[1] * static_cast<int>(o.registers.size() - kFirstValue);
    return find_targets(warp, static_cast<Space>(o.option[0]), address_of(warp, o, 0, lane),
                        address_of(warp, o, 1, lane), 0, bytes, Swizzle::kNone, bytes, lane);
}

Next store(Warp& warp, const Operation& o, uint32_t mask) {
    if (warp.cta.cluster.num_ctas() == 1) {
        throw Fault("cluster", "st.async in a cluster of one CTA", __builtin_ctz(mask));
    }
    each_lane(mask, [&](int lane) {
        const Targets targets = find_target(warp, o, lane);
        start_fill(warp, o, lane, targets.boxes, targets.signals, kFromRegisters,
                   [data = values(warp, o, lane)] { return data; });
    });
    return Next::kContinue;
}

Next reduce_value(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        const Targets targets = find_target(warp, o, lane);
        if (targets.boxes[0].owner == &warp.cta) {
            throw Fault("cluster", "red.async to the shared memory of the same CTA", lane);
        }
        const auto type = static_cast<ElementType>(o.option[2] >> 8);
        const int op = o.option[2] & 255;
        start_update(warp, o, lane, targets.boxes[0], targets.signals[0], kFromRegisters,
                     [data = values(warp, o, lane), type, op](std::byte* to) {
                         reduce(type, op, to, data.data(), static_cast<int64_t>(data.size()));
                     });
    });
    return Next::kContinue;
}

bool accept_cluster_space(Decoder& d) {
    const Space space = d.accept_space();
    if (space != Space::kCluster && space != Space::kGeneric) d.fail("unknown state space");
    return space == Space::kCluster;
}

// Decodes the operands [destination], value, [mbarrier].
void decode_asynchronous(Decoder& d, Type type, size_t count) {
    Operation& o = d.operation();
    d.require_any({"mbarrier::complete_tx::bytes"});
    d.require_operands(3, 3);
    const auto elements = d.elements(1);
    if (elements.size() != count) d.fail("a vector of another length than the modifier says");
    auto space = static_cast<Space>(o.option[0]);
    add_address(d, 0, space);
    add_address(d, 2, space);
    for (const ptx::Operand* element : elements) o.registers.push_back(d.read(*element, type));
    o.option[1] = width_of(type);
    o.type = Class::kAsync;
}

}  // namespace

void decode_mapa(Decoder& d) {
    Operation& o = d.operation();
    d.require_target(90);
    o.option[0] = accept_cluster_space(d);
    const Type type = d.require_type({Type::kU32, Type::kU64});
    if (type == Type::kU32 && o.option[0] == 0) d.fail("a 32-bit generic address");
    d.require_operands(3, 3);
    o.r[0] = d.write(0, type), o.r[1] = d.read(1, type), o.r[2] = d.read(2, Type::kU32);
    o.type = Class::kMove;
    o.execute = type == Type::kU32 ? map_address<uint32_t> : map_address<uint64_t>;
}

void decode_getctarank(Decoder& d) {
    Operation& o = d.operation();
    d.require_target(90);
    o.option[0] = accept_cluster_space(d);
    const Type type = d.require_type({Type::kU32, Type::kU64});
    if (type == Type::kU32 && o.option[0] == 0) d.fail("a 32-bit generic address");
    d.require_operands(2, 2);
    o.r[0] = d.write(0, Type::kU32), o.r[1] = d.read(1, type);
    o.type = Class::kMove;
    o.execute = type == Type::kU32 ? find_rank<uint32_t> : find_rank<uint64_t>;
}

void decode_st_async(Decoder& d) {
    Operation& o = d.operation();
    d.require_target(90);
    d.accept("weak");
    o.option[0] = static_cast<int>(accept_cluster_space(d) ? Space::kCluster : Space::kGeneric);
    const int vector = d.accept_any({"v2", "v4"});
    const Type type = d.require_type(
        {Type::kB32, Type::kB64, Type::kU32, Type::kU64, Type::kS32, Type::kS64, Type::kF32, Type::kF64});
    if (vector == 1 && width_of(type) == 8) d.fail("more than 16 bytes a lane");
    decode_asynchronous(d, type, vector < 0 ? 1 : size_t{2} << vector);
    o.execute = store;
}

void decode_red_async(Decoder& d) {
    Operation& o = d.operation();
    d.require_target(90);
    d.require_any({"relaxed"});
    d.require_any({"cluster"});
    o.option[0] = static_cast<int>(accept_cluster_space(d) ? Space::kCluster : Space::kGeneric);
    const int op = require_reduction(d);
    const Type type = d.require_type({Type::kB32, Type::kU32, Type::kS32, Type::kU64});
    const bool is_bits = op == kAnd || op == kOr || op == kXor;
    const bool is_known = is_bits                    ? type == Type::kB32
                          : op == kAdd               ? type != Type::kB32
                          : op == kMin || op == kMax ? type == Type::kU32 || type == Type::kS32
                                                     : type == Type::kU32;
    if (!is_known) d.fail("unknown operation for this type");
    const ElementType element = type == Type::kU64   ? ElementType::kU64
                                : type == Type::kS32 ? ElementType::kS32
                                                     : ElementType::kU32;
    o.option[2] = static_cast<int>(element) << 8 | op;
    decode_asynchronous(d, type, 1);
    o.execute = reduce_value;
}

}  // namespace emulator
