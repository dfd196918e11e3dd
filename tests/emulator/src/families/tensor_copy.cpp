// Copies of boxes of tensors. PTX ISA, "Data Movement and Conversion Instructions: Tensor copy".
#include "../cluster.h"
#include "bulk.h"
#include "families.h"
#include "reduction.h"

namespace emulator {
namespace {

// registers: addresses (load: destination, tensor map, mbarrier; store: tensor map, source; prefetch: tensor map), then
// the coordinates and the multicast's CTA mask. option[0]: number of dimensions | the destination's state space << 8;
// option[1]: 1 with a CTA mask; option[2]: a ReductionOp, -1 for none.
constexpr int kBoxAlignment = 128;
constexpr int kFirstOfLoad = 6, kFirstOfStore = 4, kFirstOfPrefetch = 2;

struct TensorBox {
    TensorMap map;
    int32_t coordinates[kMostDimensions] = {};

    template <typename Function>
    void each_row_inside(Function&& function) const {
        each_row(map, coordinates, [&](const BoxRow& row) {
            if (row.bytes != 0) function(row);
        });
    }
};

TensorMap read_map(Warp& warp, uint64_t address, int lane) {
    const uint64_t window = address & ~(kWindowBytes - 1);
    if (window == kSharedWindow || window == kLocalWindow) {
        throw Fault("out-of-bounds", "a tensor map has to be a parameter, or in global or constant memory", lane);
    }
    std::byte bytes[kTensorMapBytes];
    for (int at = 0; at < kTensorMapBytes; at += kTensorMapAlignment) {
        const std::byte* from = warp.access(Space::kGeneric, address + at, kTensorMapAlignment, lane, false);
        std::memcpy(bytes + at, from, kTensorMapAlignment);
    }
    TensorMap map;
    std::memcpy(&map, bytes, sizeof(map));
    return map;
}

TensorBox tensor_box(Warp& warp, const Operation& o, int map_index, int first, int lane) {
    TensorBox box{};
    box.map = read_map(warp, address_of(warp, o, map_index, lane), lane);
    const int dimensions = o.option[0] & 255;
    std::string error = box.map.error();
    if (error.empty() && box.map.rank() != dimensions) {
        error = "it is " + std::to_string(box.map.rank()) + "-dimensional";
    }
    if (!error.empty()) throw Fault("arguments", "a tensor map that this copy cannot use: " + error, lane);
    for (int i = 0; i < dimensions; ++i) box.coordinates[i] = warp.reg<int32_t>(o.registers[first + i])[lane];
    return box;
}

Reach check_rows(Warp& warp, const Operation& o, const TensorBox& box, int lane, bool is_write) {
    Reach reach;
    box.each_row_inside([&](const BoxRow& row) {
        warp.global(row.address, row.bytes, lane, is_write);
        count_global(warp, o, row.address, row.bytes);
        reach.global.push_back({row.address, static_cast<uint64_t>(row.bytes)});
    });
    return reach;
}

Bytes gather(const TensorBox& box) {
    Bytes bytes(box.map.box_bytes());
    each_row(box.map, box.coordinates, [&](const BoxRow& row) {
        complete_row(box.map, row, reinterpret_cast<const std::byte*>(row.address), bytes.data() + row.offset);
    });
    return bytes;
}

Next load(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        const TensorBox box = tensor_box(warp, o, 1, kFirstOfLoad, lane);
        uint32_t ctas = 0;
        if (o.option[1] != 0) {
            ctas = warp.reg<uint16_t>(o.registers[kFirstOfLoad + box.map.rank()])[lane];
            if (ctas == 0) throw Fault("cluster", "a multicast to no CTA", lane);
        }
        const Targets targets =
            find_targets(warp, static_cast<Space>(o.option[0] >> 8), address_of(warp, o, 0, lane),
                         address_of(warp, o, 2, lane), ctas, box.map.box_bytes(), box.map.swizzle, kBoxAlignment, lane);
        const Reach source = check_rows(warp, o, box, lane, false);
        start_fill(warp, o, lane, targets.boxes, targets.signals, source, [box] { return gather(box); });
    });
    return Next::kContinue;
}

Next store(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) {
        const TensorBox box = tensor_box(warp, o, 0, kFirstOfStore, lane);
        const int op = o.option[2];
        const bool reduces = op >= 0;
        if (reduces && (!has_reduction(box.map.type, op) || box.map.type == ElementType::kF64)) {
            throw Fault("unsupported", "this reduction does not exist for the tensor map's element type", lane);
        }
        const SharedBox source = shared_box(warp, Space::kShared, address_of(warp, o, 1, lane), box.map.box_bytes(),
                                            box.map.swizzle, kBoxAlignment, lane);
        const Reach destination = check_rows(warp, o, box, lane, true);
        const Effect effect = reduces ? effect_of(box.map.type, op) : Effect::kStore;
        start_drain(warp, o, lane, source, destination, effect, [box, op, reduces](const Bytes& data) {
            box.each_row_inside([&](const BoxRow& row) {
                auto* to = reinterpret_cast<std::byte*>(row.address);
                const std::byte* from = data.data() + row.offset + row.before;
                if (reduces) {
                    reduce(box.map.type, op, to, from, row.bytes);
                } else {
                    std::memcpy(to, from, row.bytes);
                }
            });
        });
    });
    return Next::kContinue;
}

Next prefetch(Warp& warp, const Operation& o, uint32_t mask) {
    each_lane(mask, [&](int lane) { tensor_box(warp, o, 0, kFirstOfPrefetch, lane); });
    return Next::kContinue;
}

void add_coordinates(Decoder& d, size_t operand, int dimensions) {
    const ptx::Operand& whole = d.operand(operand).elements[1];
    const bool is_vector = whole.kind == ptx::Operand::Kind::kVector;
    const size_t count = is_vector ? whole.elements.size() : 1;
    if (count != static_cast<size_t>(dimensions)) d.fail("another number of coordinates than of dimensions");
    for (size_t i = 0; i < count; ++i) {
        d.operation().registers.push_back(d.read(is_vector ? whole.elements[i] : whole, Type::kS32));
    }
}

}  // namespace

void decode_tensor(Decoder& d, bool reduces, bool prefetches) {
    Operation& o = d.operation();
    const int dimensions = d.require_any({"1d", "2d", "3d", "4d", "5d"}) + 1;
    o.option[0] = dimensions, o.option[2] = -1;
    if (prefetches) d.require_any({"L2"});
    const Space first = d.accept_space(), second = prefetches ? Space::kShared : d.accept_space();
    const bool is_store = !prefetches && first == Space::kGlobal && second == Space::kShared;
    const bool is_load =
        !prefetches && !reduces && (first == Space::kShared || first == Space::kCluster) && second == Space::kGlobal;
    if (!is_store && !is_load && !(prefetches && first == Space::kGlobal)) d.fail("unknown state spaces");
    if (reduces) o.option[2] = require_reduction(d);
    d.accept("tile");
    if (!prefetches) d.require_any({is_store ? "bulk_group" : "mbarrier::complete_tx::bytes"});
    const bool is_multicast = is_load && first == Space::kCluster && d.accept("multicast::cluster");
    const bool has_policy = d.accept("L2::cache_hint");
    const size_t count = (prefetches ? 1 : is_store ? 2 : 3) + is_multicast + has_policy;
    d.require_operands(count, count);
    Space map = Space::kGeneric, shared = is_load ? first : Space::kShared, mbarrier = shared;
    if (is_load) {
        o.option[0] |= static_cast<int>(first) << 8;
        o.option[1] = is_multicast;
        add_address(d, 0, shared);
        add_address(d, 1, map, 2);
        add_address(d, 2, mbarrier);
    } else {
        add_address(d, 0, map, 2);
        if (is_store) add_address(d, 1, shared);
    }
    add_coordinates(d, is_load ? 1 : 0, dimensions);
    if (is_multicast) o.registers.push_back(d.read(3, Type::kU16));
    if (has_policy) d.read(count - 1, Type::kB64);
    o.execute = is_load ? load : is_store ? store : prefetch;
}

}  // namespace emulator
