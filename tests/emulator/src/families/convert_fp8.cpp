// cvt to and from pairs of fp8. PTX ISA, "Data Movement and Conversion Instructions: cvt".
#include "elementwise.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

// option[0]: 1 for e5m2, 0 for e4m3; option[1]: 1 with .relu. In pairs the second source is the lower half.

uint32_t narrow(double value, const Operation& o) {
    if (o.option[1] != 0 && value < 0) value = 0;
    return encode(value, o.option[0] != 0 ? kE5m2 : kE4m3, Rounding::kNearestEven, true);
}

Next from_single(Warp& warp, const Operation& o, uint32_t mask) {
    uint16_t* d = warp.reg<uint16_t>(o.r[0]);
    const float *high = warp.reg<float>(o.r[1]), *low = warp.reg<float>(o.r[2]);
    each_lane(mask,
              [&](int lane) { d[lane] = static_cast<uint16_t>(narrow(high[lane], o) << 8 | narrow(low[lane], o)); });
    return Next::kContinue;
}

Next from_halves(Warp& warp, const Operation& o, uint32_t mask) {
    uint16_t* d = warp.reg<uint16_t>(o.r[0]);
    const uint32_t* a = warp.reg<uint32_t>(o.r[1]);
    each_lane(mask, [&](int lane) {
        const float high = from_half(static_cast<uint16_t>(a[lane] >> 16));
        const float low = from_half(static_cast<uint16_t>(a[lane]));
        d[lane] = static_cast<uint16_t>(narrow(high, o) << 8 | narrow(low, o));
    });
    return Next::kContinue;
}

Next to_halves(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    const uint16_t* a = warp.reg<uint16_t>(o.r[1]);
    const auto widen = [&](int bits) {
        const auto byte = static_cast<uint8_t>(bits);
        const float value = o.option[0] != 0 ? from_e5m2(byte) : from_e4m3(byte);
        return uint32_t{to_half(o.option[1] != 0 && value < 0 ? 0 : value)};
    };
    each_lane(mask, [&](int lane) { d[lane] = widen(a[lane] >> 8) << 16 | widen(a[lane]); });
    return Next::kContinue;
}

bool is_fp8_pair(Type type) {
    return type == Type::kE4M3x2 || type == Type::kE5M2x2;
}

}  // namespace

void decode_cvt_fp8(Decoder& d, Type to, Type from) {
    Operation& o = d.operation();
    d.require_target(89);
    o.type = Class::kConvert;
    const bool narrows = is_fp8_pair(to);
    o.option[0] = (narrows ? to : from) == Type::kE5M2x2;
    d.require_any({"rn"});
    if (narrows) d.require_any({"satfinite"});
    o.option[1] = d.accept("relu");
    if (narrows && from == Type::kF32) {
        d.require_operands(3, 3);
        o.r[0] = d.write(0, to), o.r[1] = d.read(1, from), o.r[2] = d.read(2, from);
        o.execute = from_single;
        return;
    }
    if ((narrows ? from : to) != Type::kF16x2) d.fail("unknown for these types");
    d.require_operands(2, 2);
    o.r[0] = d.write(0, to), o.r[1] = d.read(1, from);
    o.execute = narrows ? from_halves : to_halves;
}

}  // namespace emulator
