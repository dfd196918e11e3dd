// cvt. PTX ISA, "Data Movement and Conversion Instructions: cvt".
#include <cmath>
#include <limits>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

// The parameters of a conversion, unpacked from the operation's options.
struct Conversion {
    Type to, from;
    Rounding rounding;
    bool to_integral, flushes, saturates, relu, satfinite;
};

Conversion unpack(const Operation& o) {
    const int flags = o.option[3];
    return {static_cast<Type>(o.option[0]),
            static_cast<Type>(o.option[1]),
            static_cast<Rounding>(o.option[2]),
            (flags & 1) != 0,
            (flags & 2) != 0,
            (flags & 4) != 0,
            (flags & 8) != 0,
            (flags & 16) != 0};
}

// Returns the bits of a lane's register, which may be wider than the type; the value is in the lower bits.
uint64_t load_bits(const std::byte* at, int width) {
    uint64_t bits = 0;
    std::memcpy(&bits, at, width);
    return bits;
}

__extension__ using Wide = __int128;  // holds every 64-bit integer, signed or not

Wide load_integer(uint64_t bits, Type type) {
    switch (type) {
        case Type::kU8:
            return static_cast<uint8_t>(bits);
        case Type::kS8:
            return static_cast<int8_t>(bits);
        case Type::kU16:
            return static_cast<uint16_t>(bits);
        case Type::kS16:
            return static_cast<int16_t>(bits);
        case Type::kU32:
            return static_cast<uint32_t>(bits);
        case Type::kS32:
            return static_cast<int32_t>(bits);
        case Type::kS64:
            return static_cast<int64_t>(bits);
        default:
            return bits;
    }
}

double load_float(uint64_t bits, Type type) {
    switch (type) {
        case Type::kF16:
            return from_half(static_cast<uint16_t>(bits));
        case Type::kBF16:
            return from_bfloat(static_cast<uint16_t>(bits));
        case Type::kF32:
            return bit_cast<float>(static_cast<uint32_t>(bits));
        default:
            return bit_cast<double>(bits);
    }
}

Wide clamp(Wide value, Type type) {
    const int bits = 8 * width_of(type);
    const Wide least = is_signed(type) ? -(Wide{1} << (bits - 1)) : Wide{0};
    const Wide most = is_signed(type) ? (Wide{1} << (bits - 1)) - 1 : (Wide{1} << bits) - 1;
    return value < least ? least : value > most ? most : value;
}

double round_to_integral(double x, Rounding rounding) {
    switch (rounding) {
        case Rounding::kNearestEven:
            return std::nearbyint(x);
        case Rounding::kZero:
            return std::trunc(x);
        case Rounding::kDown:
            return std::floor(x);
        default:
            return std::ceil(x);
    }
}

uint64_t store_float(double x, const Conversion& c) {
    if (c.saturates) x = x > 0 ? std::fmin(x, 1.0) : 0.0;
    if (c.relu && x < 0) x = 0;
    switch (c.to) {
        case Type::kF16:
            return encode(x, kHalf, c.rounding, c.satfinite);
        case Type::kBF16:
            return encode(x, kBfloat, c.rounding, c.satfinite);
        case Type::kTF32: {
            const uint32_t bits = encode(x, kTf32, c.rounding, c.satfinite);
            return std::isnan(x) ? 0x7fffffffu : bits << 13;
        }
        case Type::kF32: {
            const uint32_t bits = encode(x, kSingle, c.rounding);
            return c.flushes ? bit_cast<uint32_t>(flush(bit_cast<float>(bits))) : bits;
        }
        default:
            return bit_cast<uint64_t>(x);
    }
}

uint64_t convert(uint64_t bits, const Conversion& c) {
    if (is_integer(c.from)) {
        const Wide value = load_integer(bits, c.from);
        if (is_integer(c.to)) return static_cast<uint64_t>(c.saturates ? clamp(value, c.to) : value);
        // Integers of more than 53 bits are rounded to odd before the second rounding; f64 only needs one.
        double x = static_cast<double>(value);
        const bool is_below = static_cast<Wide>(x) < value;
        if (static_cast<Wide>(x) != value && c.to == Type::kF64) {
            const bool towards_zero = c.rounding == Rounding::kZero;
            const bool wants_below = c.rounding == Rounding::kDown || (towards_zero && value > 0);
            const bool wants_above = c.rounding == Rounding::kUp || (towards_zero && value < 0);
            if (is_below ? wants_above : wants_below) x = std::nextafter(x, is_below ? INFINITY : -INFINITY);
        } else if (static_cast<Wide>(x) != value) {
            uint64_t odd = bit_cast<uint64_t>(x);
            if ((odd & 1) == 0) odd += is_below == (x > 0) ? 1 : -1;
            x = bit_cast<double>(odd);
        }
        return store_float(x, c);
    }
    double x = load_float(bits, c.from);
    if (c.flushes && c.from == Type::kF32) x = flush(static_cast<float>(x));
    if (is_integer(c.to)) {
        if (std::isnan(x)) return 0;
        x = round_to_integral(x, c.rounding);
        return static_cast<uint64_t>(clamp(static_cast<Wide>(std::fmax(-0x1p100, std::fmin(0x1p100, x))), c.to));
    }
    if (c.to_integral && !std::isnan(x)) x = round_to_integral(x, c.rounding);
    return store_float(x, c);
}

// r: result, source. value: the widths of their registers in bytes, result | source << 4.
Next cvt(Warp& warp, const Operation& o, uint32_t mask) {
    const Conversion c = unpack(o);
    const int to_width = static_cast<int>(o.value & 15), from_width = static_cast<int>(o.value >> 4);
    std::byte* d = warp.reg<std::byte>(o.r[0]);
    const std::byte* a = warp.reg<std::byte>(o.r[1]);
    each_lane(mask, [&](int lane) {
        uint64_t bits = convert(load_bits(a + lane * from_width, from_width), c);
        if (is_integer(c.to)) bits = static_cast<uint64_t>(load_integer(bits, c.to));  // extends it to a wider register
        std::memcpy(d + lane * to_width, &bits, to_width);
    });
    return Next::kContinue;
}

// Converts two fp32 numbers to a pair. The first source becomes the upper half.
Next cvt_pair(Warp& warp, const Operation& o, uint32_t mask) {
    const Conversion c = unpack(o);
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    const uint32_t *high = warp.reg<uint32_t>(o.r[1]), *low = warp.reg<uint32_t>(o.r[2]);
    each_lane(mask,
              [&](int lane) { d[lane] = static_cast<uint32_t>(convert(high[lane], c) << 16 | convert(low[lane], c)); });
    return Next::kContinue;
}

Next widen_half(Warp& warp, const Operation& o, uint32_t mask) {
    float* d = warp.reg<float>(o.r[0]);
    const uint16_t* a = warp.reg<uint16_t>(o.r[1]);
    each_lane(mask, [&](int lane) { d[lane] = canonical(from_half(a[lane])); });
    return Next::kContinue;
}

}  // namespace

void decode_cvt(Decoder& d) {
    if (d.accept("pack")) return decode_cvt_pack(d);
    const Type to = d.require_type(), from = d.require_type();
    const auto is_fp8_pair = [](Type t) { return t == Type::kE4M3x2 || t == Type::kE5M2x2; };
    if (is_fp8_pair(to) || is_fp8_pair(from)) return decode_cvt_fp8(d, to, from);
    const int rounding = d.accept_any({"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"});
    const bool to_integral = rounding > 4;
    const bool relu = d.accept("relu"), satfinite = d.accept("satfinite"), flushes = d.accept("ftz"),
               sat = d.accept("sat");
    constexpr Rounding kRoundings[] = {Rounding::kNearestEven, Rounding::kZero, Rounding::kDown, Rounding::kUp,
                                       Rounding::kNearestAway};
    Operation& o = d.operation();
    o.type = Class::kConvert;
    const bool is_pair = is_packed(to);
    const auto is_scalar = [](Type t) {
        return is_integer(t) || t == Type::kF16 || t == Type::kBF16 || t == Type::kF32 || t == Type::kF64;
    };
    if (!is_scalar(from) || !(is_scalar(to) || to == Type::kTF32 || is_pair)) d.fail("unknown for these types");
    if ((is_pair || to == Type::kTF32) && from != Type::kF32) d.fail("unknown for these types");
    const bool has_bfloat = to == Type::kBF16 || from == Type::kBF16;
    if (has_bfloat && to != Type::kF32 && from != Type::kF32) d.require_target(90);
    if (is_pair && rounding > 1) d.fail("unknown rounding for these types");
    if (rounding == 4 && to != Type::kTF32) d.fail("unknown rounding for these types");
    if (to == Type::kTF32 && rounding != 4) d.require_target(90);
    if (to == Type::kTF32 && rounding == 4 && relu) d.fail("unknown modifier .relu for these types");
    if (is_integer(to) && is_float(from) && !to_integral) d.fail("a rounding to an integer is missing");
    if (is_integer(to) && is_integer(from) && rounding >= 0) d.fail("a rounding that means nothing");
    if (to_integral && !is_integer(to) && to != from) d.fail("unknown rounding for these types");
    const bool narrows = is_float(to) && (is_integer(from) || width_of(to) < width_of(from) || to == Type::kTF32 ||
                                          is_pair || (width_of(to) == 2 && to != from));
    if (narrows && rounding < 0 && !(to == from)) d.fail("a rounding is missing");
    if (sat && (is_pair || to == Type::kTF32 || to == Type::kBF16)) d.fail("unknown modifier .sat for these types");
    if ((relu || satfinite) && !(is_pair || to == Type::kF16 || to == Type::kBF16 || to == Type::kTF32)) {
        d.fail("unknown modifier for these types");
    }
    if (flushes && to != Type::kF32 && from != Type::kF32) d.fail("unknown modifier .ftz for these types");
    const Rounding how = rounding < 0  ? Rounding::kNearestEven
                         : to_integral ? kRoundings[rounding - 5]
                                       : kRoundings[rounding];
    const Type element = to == Type::kF16x2 ? Type::kF16 : to == Type::kBF16x2 ? Type::kBF16 : to;
    o.option[0] = static_cast<int>(element), o.option[1] = static_cast<int>(from), o.option[2] = static_cast<int>(how);
    o.option[3] = to_integral | flushes << 1 | sat << 2 | relu << 3 | satfinite << 4;
    if (is_pair) {
        d.require_operands(3, 3);
        o.r[0] = d.write(0, Type::kB32), o.r[1] = d.read(1, Type::kF32), o.r[2] = d.read(2, Type::kF32);
        o.execute = cvt_pair;
        return;
    }
    d.require_operands(2, 2);
    const auto [destination, to_width] = d.write_any(d.operand(0), to);
    const auto [source, from_width] = d.read_any(d.operand(1), from);
    o.r[0] = destination, o.r[1] = source;
    o.value = to_width | from_width << 4;
    if (is_float(to) && to_width != width_of(to)) d.fail("a register of another width than the type");
    o.execute = cvt;
    if (to == Type::kF32 && from == Type::kF16 && from_width == 2 && !sat && !flushes) o.execute = widen_half;
}

}  // namespace emulator
