// cvt.pack. PTX ISA, "Data Movement and Conversion Instructions: cvt.pack".
#include "../decoder.h"
#include "elementwise.h"
#include "families.h"

namespace emulator {
namespace {

// d = c << (2 n) | a << n | b, with a and b clamped to n = `value` bits. option[0]: 1 if they are signed.
Next pack(Warp& warp, const Operation& o, uint32_t mask) {
    const int bits = static_cast<int>(o.value);
    const int32_t least = o.option[0] != 0 ? -(1 << (bits - 1)) : 0;
    const int32_t most = o.option[0] != 0 ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
    const uint32_t field = (1u << bits) - 1;
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    const int32_t *a = warp.reg<int32_t>(o.r[1]), *b = warp.reg<int32_t>(o.r[2]);
    const uint32_t* c = warp.reg<uint32_t>(o.r[3]);
    const auto clamp = [&](int32_t x) { return static_cast<uint32_t>(std::max(least, std::min(most, x))) & field; };
    each_lane(mask, [&](int lane) {
        const uint64_t above = uint64_t{c[lane]} << (2 * bits);
        d[lane] = static_cast<uint32_t>(above) | clamp(a[lane]) << bits | clamp(b[lane]);
    });
    return Next::kContinue;
}

}  // namespace

void decode_cvt_pack(Decoder& d) {
    d.require_any({"sat"});
    const int which = d.require_any({"u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"});
    d.require_type({Type::kS32});
    const bool has_upper = which > 1;
    if (has_upper) d.require_type({Type::kB32});
    d.require_operands(has_upper ? 4 : 3, has_upper ? 4 : 3);
    Operation& o = d.operation();
    o.type = Class::kConvert;
    o.value = 16 >> which / 2;
    o.option[0] = which % 2;
    o.r[0] = d.write(0, Type::kB32), o.r[1] = d.read(1, Type::kS32), o.r[2] = d.read(2, Type::kS32);
    o.r[3] = has_upper ? d.read(3, Type::kB32) : d.constant(0, 4);
    o.execute = pack;
}

}  // namespace emulator
