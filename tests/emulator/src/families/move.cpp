// mov, cvta, isspacep. PTX ISA, "Data Movement and Conversion Instructions".
#include <chrono>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"

namespace emulator {
namespace {

__extension__ using Wide = unsigned __int128;

template <typename T>
Next mov(Warp& warp, const Operation& o, uint32_t mask) {
    T* d = warp.reg<T>(o.r[0]);
    const T* a = warp.reg<T>(o.r[1]);
    each_lane(mask, [&](int lane) { d[lane] = a[lane]; });
    return Next::kContinue;
}

Next mov_predicate(Warp& warp, const Operation& o, uint32_t mask) {
    warp.set_predicate(o.r[0], mask, warp.predicate(o.r[1]) ^ static_cast<uint32_t>(o.option[0]));
    return Next::kContinue;
}

// Both put the first part into the least significant bits.
template <typename Whole, typename Part>
Next pack(Warp& warp, const Operation& o, uint32_t mask) {
    Whole* d = warp.reg<Whole>(o.r[0]);
    each_lane(mask, [&](int lane) {
        Whole bits = 0;
        for (int i = 0; i < static_cast<int>(sizeof(Whole) / sizeof(Part)); ++i) {
            bits |= static_cast<Whole>(warp.reg<Part>(o.r[1 + i])[lane]) << (8 * sizeof(Part) * i);
        }
        d[lane] = bits;
    });
    return Next::kContinue;
}

template <typename Whole, typename Part>
Next unpack(Warp& warp, const Operation& o, uint32_t mask) {
    constexpr int kParts = sizeof(Whole) / sizeof(Part);
    const Whole* a = warp.reg<Whole>(o.r[kParts]);
    each_lane(mask, [&](int lane) {
        const Whole bits = a[lane];  // read first, because a part may have the same register
        for (int i = 0; i < kParts; ++i)
            warp.reg<Part>(o.r[i])[lane] = static_cast<Part>(bits >> (8 * sizeof(Part) * i));
    });
    return Next::kContinue;
}

template <typename T, int kShift>
Next read_clock(Warp& warp, const Operation& o, uint32_t mask) {
    T* d = warp.reg<T>(o.r[0]);
    const auto nanoseconds = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
    const T now = static_cast<T>(nanoseconds >> kShift);
    each_lane(mask, [&](int lane) { d[lane] = now; });
    return Next::kContinue;
}

constexpr uint64_t window_of(Space space) {
    switch (space) {
        case Space::kShared:
        case Space::kCluster:
            return kSharedWindow;
        case Space::kLocal:
            return kLocalWindow;
        case Space::kParam:
            return kParamWindow;
        default:
            return 0;
    }
}

Next add_window(Warp& warp, const Operation& o, uint32_t mask) {
    uint64_t* d = warp.reg<uint64_t>(o.r[0]);
    const uint64_t* a = warp.reg<uint64_t>(o.r[1]);
    each_lane(mask, [&](int lane) { d[lane] = a[lane] + static_cast<uint64_t>(o.value); });
    return Next::kContinue;
}

Next is_in_space(Warp& warp, const Operation& o, uint32_t mask) {
    const uint64_t* a = warp.reg<uint64_t>(o.r[1]);
    uint32_t bits = 0;
    each_lane(mask, [&](int lane) {
        const uint64_t offset = a[lane] & (kWindowBytes - 1);
        const bool is_other_cta = offset >= kCtaBytes && offset / kCtaBytes - 1 != warp.cta.rank;
        const bool is_in_window = a[lane] - offset == static_cast<uint64_t>(o.value);
        bits |= uint32_t{is_in_window && !(o.option[1] != 0 && is_other_cta)} << lane;
    });
    warp.set_predicate(o.r[0], mask, bits);
    return Next::kContinue;
}

// An address is global if it is in none of the windows.
Next is_in_no_window(Warp& warp, const Operation& o, uint32_t mask) {
    const uint64_t* a = warp.reg<uint64_t>(o.r[1]);
    uint32_t bits = 0;
    each_lane(mask, [&](int lane) { bits |= uint32_t{a[lane] < kSharedWindow} << lane; });
    warp.set_predicate(o.r[0], mask, bits);
    return Next::kContinue;
}

template <typename Whole>
Execute pick_parts(Decoder& d, size_t parts, bool packs) {
    const auto with = [&](auto part) -> Execute {
        using Part = decltype(part);
        if constexpr (sizeof(Part) < sizeof(Whole)) return packs ? pack<Whole, Part> : unpack<Whole, Part>;
        return nullptr;
    };
    switch (sizeof(Whole) / parts) {
        case 1:
            return with(uint8_t{});
        case 2:
            return with(uint16_t{});
        case 4:
            return with(uint32_t{});
        case 8:
            return with(uint64_t{});
        default:
            d.fail("a vector of an unknown form");
    }
}

void decode_vector(Decoder& d, Type type, bool packs) {
    Operation& o = d.operation();
    const int width = width_of(type);
    const auto elements = d.elements(packs ? 1 : 0);
    const size_t parts = elements.size();
    if ((parts != 2 && parts != 4) || width / parts < 1) d.fail("a vector of an unknown form");
    const Type part = bits_of_width(static_cast<int>(width / parts));
    size_t next = 0;
    if (packs) o.r[next++] = d.write(0, type);
    for (const ptx::Operand* element : elements) o.r[next++] = packs ? d.read(*element, part) : d.write(*element, part);
    if (!packs) o.r[next++] = d.read(1, type);
    o.execute = width == 2   ? pick_parts<uint16_t>(d, parts, packs)
                : width == 4 ? pick_parts<uint32_t>(d, parts, packs)
                : width == 8 ? pick_parts<uint64_t>(d, parts, packs)
                             : pick_parts<Wide>(d, parts, packs);
}

}  // namespace

void decode_mov(Decoder& d) {
    const Type type = d.require_type();
    d.require_operands(2, 2);
    Operation& o = d.operation();
    o.type = Class::kMove;
    using Kind = ptx::Operand::Kind;
    const ptx::Operand& source = d.operand(1);
    if (type == Type::kPred) {
        o.r[0] = d.write_predicate(d.operand(0));
        bool negated = false;
        o.r[1] = d.read_predicate(source, negated);
        o.option[0] = negated ? -1 : 0;
        o.execute = mov_predicate;
        return;
    }
    if (d.operand(0).kind == Kind::kVector) return decode_vector(d, type, false);
    if (source.kind == Kind::kVector) return decode_vector(d, type, true);
    const int width = width_of(type);
    if (width == 1) d.fail("unknown for this type");
    o.r[0] = d.write(0, type);
    if (source.kind == Kind::kName && (source.name == "%clock" || source.name == "%clock_hi" ||
                                       source.name == "%clock64" || source.name == "%globaltimer")) {
        const bool is_upper = source.name == "%clock_hi";
        if (width == 16 || width == 2 || (is_upper && width != 4)) d.fail("a clock of another width than the type");
        o.execute = is_upper     ? read_clock<uint32_t, 32>
                    : width == 4 ? read_clock<uint32_t, 0>
                                 : read_clock<uint64_t, 0>;
        return;
    }
    o.r[1] = d.read(source, type);
    o.execute = width == 2 ? mov<uint16_t> : width == 4 ? mov<uint32_t> : width == 8 ? mov<uint64_t> : mov<Wide>;
}

void decode_cvta(Decoder& d) {
    const bool from_generic = d.accept("to");
    const Space space = d.accept_space();
    const Type type = d.require_type({Type::kU64});
    d.require_operands(2, 2);
    if (space == Space::kGeneric) d.fail("a state space is missing");
    Operation& o = d.operation();
    o.r[0] = d.write(0, type), o.r[1] = d.read(1, type);
    o.value = static_cast<int64_t>(from_generic ? -window_of(space) : window_of(space));
    o.execute = add_window;
}

void decode_isspacep(Decoder& d) {
    const Space space = d.accept_space();
    if (space == Space::kGeneric || space == Space::kConst) d.fail("unknown state space");
    d.require_operands(2, 2);
    Operation& o = d.operation();
    o.option[1] = space == Space::kShared;  // .shared::cta: of this CTA only
    o.r[0] = d.write_predicate(d.operand(0)), o.r[1] = d.read(1, Type::kB64);
    o.value = static_cast<int64_t>(window_of(space));
    o.execute = space == Space::kGlobal ? is_in_no_window : is_in_space;
}

}  // namespace emulator
