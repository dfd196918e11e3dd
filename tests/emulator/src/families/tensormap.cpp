// Tensor maps that kernels create: tensormap.replace, tensormap.cp_fenceproxy. PTX ISA, "Data Movement and Conversion
// Instructions: tensormap.replace", "Parallel Synchronization and Communication Instructions: tensormap.cp_fenceproxy".
#include "addresses.h"
#include "families.h"

#include "../tensor_map.h"

namespace emulator {
namespace {

// r: address, value. option[0]: state space; option[1]: offset of the field | its bytes << 8 | (1 if the value has 64
// bits) << 12; option[2]: the largest value, 0 for no limit.
Next replace(Warp& warp, const Operation& o, uint32_t mask) {
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[0], mask, addresses);
    const uint64_t* value = warp.reg<uint64_t>(o.r[1]);
    const uint32_t* narrow = warp.reg<uint32_t>(o.r[1]);
    const int offset = o.option[1] & 255, bytes = o.option[1] >> 8 & 15;
    const bool is_wide = o.option[1] >> 12 != 0;
    each_lane(mask, [&](int lane) {
        if (addresses[lane] % kTensorMapAlignment != 0) {
            throw Fault("misaligned", "a tensor map at an address that is no multiple of 64", lane);
        }
        const uint64_t bits = is_wide ? value[lane] : narrow[lane];
        if (o.option[2] != 0 && bits > static_cast<uint64_t>(o.option[2])) {
            throw Fault("arguments", "tensormap.replace: " + std::to_string(bits) + " is out of the field's range",
                        lane);
        }
        std::memcpy(warp.access(static_cast<Space>(o.option[0]), addresses[lane] + offset, bytes, lane, true), &bits,
                    bytes);
    });
    return Next::kContinue;
}

// Copies the map once for the whole warp. r: destination, source. value: the source's offset; option[0]: the width of
// its base; option[1]: the destination's offset.
Next copy(Warp& warp, const Operation& o, uint32_t mask) {
    const int lane = __builtin_ctz(mask);
    const uint64_t to = warp.reg<uint64_t>(o.r[0])[lane] + static_cast<uint64_t>(int64_t{o.option[1]});
    const uint64_t base = o.option[0] == 4 ? warp.reg<uint32_t>(o.r[1])[lane] : warp.reg<uint64_t>(o.r[1])[lane];
    const uint64_t from = base + static_cast<uint64_t>(o.value);
    for (int at = 0; at < kTensorMapBytes; at += kTensorMapAlignment) {
        std::memcpy(warp.access(Space::kGlobal, to + at, kTensorMapAlignment, lane, true),
                    warp.access(Space::kShared, from + at, kTensorMapAlignment, lane, false), kTensorMapAlignment);
    }
    return Next::kContinue;
}

struct Field {
    const char* name;
    size_t offset, bytes;
    int element_bytes;  // of one element of an array field, which an ordinal selects; else 0
    int largest;        // 0: any value
};
constexpr Field kFields[] = {
    {"global_address", offsetof(TensorMap, address), 8, 0, 0},
    {"rank", offsetof(TensorMap, last_dimension), 1, 0, kMostDimensions - 1},
    {"box_dim", offsetof(TensorMap, box), 10, 2, 256},
    {"global_dim", offsetof(TensorMap, dims), 40, 8, 0},
    {"global_stride", offsetof(TensorMap, strides), 32, 8, 0},
    {"element_stride", offsetof(TensorMap, element_strides), 5, 1, 8},
    {"elemtype", offsetof(TensorMap, type), 1, 0, static_cast<int>(ElementType::kTF32Ftz)},
    {"interleave_layout", offsetof(TensorMap, interleave), 1, 0, 0},
    {"swizzle_mode", offsetof(TensorMap, swizzle), 1, 0, static_cast<int>(Swizzle::k128B)},
    {"fill_mode", offsetof(TensorMap, fill), 1, 0, static_cast<int>(Fill::kNaN)},
};
constexpr int kFirstImmediate = 6;  // index into kFields: from here on, the value must be a constant

void decode_replace(Decoder& d) {
    Operation& o = d.operation();
    d.require_any({"tile"});
    int index = 0;
    while (!d.accept(kFields[index].name)) {
        if (++index == static_cast<int>(std::size(kFields))) d.fail("an unknown field of a tensor map");
    }
    const Field& field = kFields[index];
    Space space = d.accept_space();
    if (space != Space::kGeneric && space != Space::kGlobal && space != Space::kShared) d.fail("unknown state space");
    d.require_any({"b1024"});
    const bool is_wide = index == 0 || field.offset == offsetof(TensorMap, strides);
    const Type type = d.require_type({is_wide ? Type::kB64 : Type::kB32});
    const size_t last = field.element_bytes != 0 ? 2 : 1;
    d.require_operands(last + 1, last + 1);
    size_t offset = field.offset;
    if (last == 2) {
        const int64_t ordinal = d.immediate(1) * field.element_bytes;
        if (ordinal < 0 || ordinal >= static_cast<int64_t>(field.bytes)) d.fail("an ordinal beyond the dimensions");
        offset += static_cast<size_t>(ordinal);
    }
    if (index >= kFirstImmediate && d.immediate(last) > field.largest) d.fail("an unsupported value of the field");
    set_address(o, o.r[0], d.address(0, space));
    o.r[1] = d.read(last, type);
    const size_t bytes = field.element_bytes != 0 ? field.element_bytes : field.bytes;
    o.option[0] = static_cast<int>(space);
    o.option[1] = static_cast<int>(offset | bytes << 8 | size_t{is_wide} << 12);
    o.option[2] = field.largest;
    o.execute = replace;
}

void decode_copy(Decoder& d) {
    Operation& o = d.operation();
    Space to = d.accept_space(), from = d.accept_space();
    if (to != Space::kGlobal || from != Space::kShared) d.fail("unknown state spaces");
    d.require_any({"tensormap::generic"});
    d.require_any({"release"});
    d.require_any({"cta", "cluster", "gpu", "sys"});
    d.require_any({"sync"});
    d.require_any({"aligned"});
    d.require_operands(3, 3);
    if (d.immediate(2) != kTensorMapBytes) d.fail("a tensor map has 128 bytes");
    const Address destination = d.address(0, to), source = d.address(1, from);
    o.r[0] = destination.base, o.r[1] = source.base;
    o.value = source.offset;
    o.option[0] = source.base_width, o.option[1] = static_cast<int>(destination.offset);
    if (destination.offset != o.option[1]) d.fail("an offset of more than 31 bits");
    o.is_aligned = true;
    o.execute = copy;
}

}  // namespace

void decode_tensormap_object(Decoder& d) {
    d.operation().type = Class::kAsync;
    d.require_target(90);
    if (d.require_any({"replace", "cp_fenceproxy"}) == 0) {
        decode_replace(d);
    } else {
        decode_copy(d);
    }
}

}  // namespace emulator
