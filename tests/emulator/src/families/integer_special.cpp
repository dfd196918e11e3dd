// Less common integer instructions: carry chains, sad, dp4a, bmsk and szext. PTX ISA, "Integer Arithmetic
// Instructions", "Extended-Precision Integer Arithmetic Instructions".
#include <limits>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"

namespace emulator {
namespace {

template <typename T>
using Bits = std::make_unsigned_t<T>;

// r: result, carry, a, b, c. option[0]: 1 reads the carry; option[1]: 1 writes it; option[2]: 1 subtracts (the carry is
// a borrow); option[3]: 1 adds the low half of a * b to c, 2 the high half.
template <typename T>
Next extended(Warp& warp, const Operation& o, uint32_t mask) {
    __extension__ using Signed = __int128;
    __extension__ using Wide = unsigned __int128;
    using U = Bits<T>;
    constexpr int kBits = 8 * sizeof(T);
    U* d = warp.reg<U>(o.r[0]);
    const T *a = warp.reg<T>(o.r[2]), *b = warp.reg<T>(o.r[3]), *c = warp.reg<T>(o.r[4]);
    const uint32_t carries = o.option[0] != 0 ? warp.predicate(o.r[1]) : 0;
    uint32_t out = 0;
    each_lane(mask, [&](int lane) {
        U left = static_cast<U>(a[lane]), right = static_cast<U>(b[lane]);
        if (o.option[3] != 0) {
            const Wide product = static_cast<Wide>(Signed{a[lane]}) * static_cast<Wide>(Signed{b[lane]});
            left = static_cast<U>(o.option[3] == 1 ? product : product >> kBits);
            right = static_cast<U>(c[lane]);
        }
        const Wide carry = carries >> lane & 1;
        const Wide result = o.option[2] != 0 ? Wide{left} - right - carry : Wide{left} + right + carry;
        d[lane] = static_cast<U>(result);
        out |= static_cast<uint32_t>(result >> kBits & 1) << lane;
    });
    if (o.option[1] != 0) warp.set_predicate(o.r[1], mask, out);
    return Next::kContinue;
}

struct SumOfDifference {
    template <typename T>
    static T apply(T a, T b, T c) {
        using U = Bits<T>;
        const U difference = a < b ? static_cast<U>(b) - static_cast<U>(a) : static_cast<U>(a) - static_cast<U>(b);
        return static_cast<T>(static_cast<U>(c) + difference);
    }
};

// c plus four products of bytes.
template <typename A, typename B>
struct Dot4 {
    static uint32_t apply(uint32_t a, uint32_t b, uint32_t c) {
        for (int i = 0; i < 4; ++i) {
            c += static_cast<uint32_t>(int32_t{static_cast<A>(a >> (8 * i))} * int32_t{static_cast<B>(b >> (8 * i))});
        }
        return c;
    }
};
uint32_t ones_from(uint32_t position) {
    return position >= 32 ? 0 : ~0u << position;
}

template <bool kClamps>
struct BitMask {
    static uint32_t apply(uint32_t first, uint32_t length) {
        if (!kClamps) first &= 31, length &= 31;
        const uint32_t end = length >= 32 || first >= 32 ? 32 : first + length;
        return ones_from(first) & ~ones_from(end);
    }
};

template <typename T, bool kClamps>
struct Extend {
    static uint32_t apply(uint32_t a, uint32_t length) {
        if (!kClamps) length &= 31;
        if (length >= 32) return a;
        const uint32_t above = ones_from(length);
        const bool is_negative = std::is_signed_v<T> && length != 0 && (a >> (length - 1) & 1) != 0;
        return is_negative ? a | above : a & ~above;
    }
};

void read_operands(Decoder& d, Type type, int count) {
    d.require_operands(count + 1, count + 1);
    d.operation().type = Class::kInteger;
    d.operation().r[0] = d.write(0, type);
    for (int i = 1; i <= count; ++i) d.operation().r[i] = d.read(i, type);
}

}  // namespace

// add.cc, addc, sub.cc, subc, mad.cc, madc.
void decode_extended(Decoder& d, bool writes_carry) {
    Operation& o = d.operation();
    const std::string_view root = d.root();
    o.option[0] = root.back() == 'c' ? 1 : 0;
    o.option[1] = writes_carry;
    o.option[2] = root.substr(0, 3) == "sub";
    if (root.substr(0, 3) == "mad") o.option[3] = 1 + d.require_any({"lo", "hi"});
    const size_t sources = o.option[3] != 0 ? 3 : 2;
    const Type type = d.require_type({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
    d.require_operands(sources + 1, sources + 1);
    o.type = Class::kInteger;
    o.r[0] = d.write(0, type), o.r[1] = d.carry();
    o.r[2] = d.read(1, type), o.r[3] = d.read(2, type);
    o.r[4] = sources == 3 ? d.read(3, type) : o.r[3];
    o.execute = type == Type::kU32   ? extended<uint32_t>
                : type == Type::kS32 ? extended<int32_t>
                : type == Type::kU64 ? extended<uint64_t>
                                     : extended<int64_t>;
}

void decode_carry(Decoder& d) {
    decode_extended(d, d.accept("cc"));
}

void decode_sad(Decoder& d) {
    const Type type = d.require_type();
    read_operands(d, type, 3);
    Execute& execute = d.operation().execute;
    if (type == Type::kU16) execute = ternary<uint16_t, SumOfDifference>;
    if (type == Type::kS16) execute = ternary<int16_t, SumOfDifference>;
    if (type == Type::kU32) execute = ternary<uint32_t, SumOfDifference>;
    if (type == Type::kS32) execute = ternary<int32_t, SumOfDifference>;
    if (type == Type::kU64) execute = ternary<uint64_t, SumOfDifference>;
    if (type == Type::kS64) execute = ternary<int64_t, SumOfDifference>;
    if (execute == nullptr) d.fail("unknown for this type");
}

void decode_dot(Decoder& d) {
    const Type a = d.require_type({Type::kU32, Type::kS32}), b = d.require_type({Type::kU32, Type::kS32});
    read_operands(d, Type::kB32, 3);
    const bool is_signed_b = b == Type::kS32;
    d.operation().execute =
        a == Type::kU32
            ? (is_signed_b ? ternary<uint32_t, Dot4<uint8_t, int8_t>> : ternary<uint32_t, Dot4<uint8_t, uint8_t>>)
            : (is_signed_b ? ternary<uint32_t, Dot4<int8_t, int8_t>> : ternary<uint32_t, Dot4<int8_t, uint8_t>>);
}

void decode_bit_mask(Decoder& d) {
    const bool clamps = d.require_any({"clamp", "wrap"}) == 0;
    if (d.root() == "bmsk") {
        read_operands(d, d.require_type({Type::kB32}), 2);
        d.operation().execute = clamps ? binary<uint32_t, BitMask<true>> : binary<uint32_t, BitMask<false>>;
        return;
    }
    const Type type = d.require_type({Type::kU32, Type::kS32});
    read_operands(d, type, 2);
    d.operation().execute =
        type == Type::kU32
            ? (clamps ? binary<uint32_t, Extend<uint32_t, true>> : binary<uint32_t, Extend<uint32_t, false>>)
            : (clamps ? binary<uint32_t, Extend<int32_t, true>> : binary<uint32_t, Extend<int32_t, false>>);
}

}  // namespace emulator
