// Integer arithmetic. PTX ISA, "Integer Arithmetic Instructions".
#include <limits>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"

namespace emulator {
namespace {

template <typename T>
using Unsigned = std::make_unsigned_t<T>;

struct Add {
    template <typename T>
    static T apply(T a, T b) {
        return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
    }
};
struct Sub {
    template <typename T>
    static T apply(T a, T b) {
        return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
    }
};
struct AddSat {
    static int32_t apply(int32_t a, int32_t b) {
        const int64_t sum = int64_t{a} + b;
        return static_cast<int32_t>(std::max<int64_t>(INT32_MIN, std::min<int64_t>(INT32_MAX, sum)));
    }
};
struct SubSat {
    static int32_t apply(int32_t a, int32_t b) {
        const int64_t difference = int64_t{a} - b;
        return static_cast<int32_t>(std::max<int64_t>(INT32_MIN, std::min<int64_t>(INT32_MAX, difference)));
    }
};
struct MulLo {
    template <typename T>
    static T apply(T a, T b) {
        return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    }
};
struct MulHi {
    template <typename T>
    static T apply(T a, T b) {
        __extension__ using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
    }
};
// PTX does not specify division by zero; GPUs return all ones.
struct Div {
    template <typename T>
    static T apply(T a, T b) {
        if (b == 0) return static_cast<T>(-1);
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub::apply(T{0}, a);
        return static_cast<T>(a / b);
    }
};
struct Rem {
    template <typename T>
    static T apply(T a, T b) {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
        return static_cast<T>(a % b);
    }
};
struct Min {
    template <typename T>
    static T apply(T a, T b) {
        return a < b ? a : b;
    }
};
struct Max {
    template <typename T>
    static T apply(T a, T b) {
        return a > b ? a : b;
    }
};
template <typename F>
struct NotNegative {  // .relu
    template <typename T>
    static T apply(T a, T b) {
        return std::max(F::apply(a, b), T{0});
    }
};
template <typename T, typename F>
struct Pair {  // two 16-bit numbers in a register
    static uint32_t apply(uint32_t a, uint32_t b) {
        const T low = F::apply(static_cast<T>(a), static_cast<T>(b));
        const T high = F::apply(static_cast<T>(a >> 16), static_cast<T>(b >> 16));
        return static_cast<uint16_t>(low) | uint32_t{static_cast<uint16_t>(high)} << 16;
    }
};
struct Neg {
    template <typename T>
    static T apply(T a) {
        return Sub::apply(T{0}, a);
    }
};
struct Abs {
    template <typename T>
    static T apply(T a) {
        return a < 0 ? Sub::apply(T{0}, a) : a;
    }
};
struct MadLo {
    template <typename T>
    static T apply(T a, T b, T c) {
        return Add::apply(MulLo::apply(a, b), c);
    }
};
struct MadHi {
    template <typename T>
    static T apply(T a, T b, T c) {
        return Add::apply(MulHi::apply(a, b), c);
    }
};
struct MadHiSat {
    static int32_t apply(int32_t a, int32_t b, int32_t c) { return AddSat::apply(MulHi::apply(a, b), c); }
};

// d = a * b + c, where d and c have twice the width of a and b.
template <typename Narrow, typename Wide>
Next multiply_wide(Warp& warp, const Operation& operation, uint32_t mask) {
    Wide* d = warp.reg<Wide>(operation.r[0]);
    const Narrow *a = warp.reg<Narrow>(operation.r[1]), *b = warp.reg<Narrow>(operation.r[2]);
    const Wide* c = warp.reg<Wide>(operation.r[3]);
    each_lane(mask, [&](int lane) {
        d[lane] = Add::apply(static_cast<Wide>(static_cast<Wide>(a[lane]) * static_cast<Wide>(b[lane])), c[lane]);
    });
    return Next::kContinue;
}

#define EMULATOR_PICK(shape)                      \
    template <typename F>                         \
    Execute pick_##shape(Decoder& d, Type type) { \
        switch (type) {                           \
            case Type::kU16:                      \
                return shape<uint16_t, F>;        \
            case Type::kS16:                      \
                return shape<int16_t, F>;         \
            case Type::kU32:                      \
                return shape<uint32_t, F>;        \
            case Type::kS32:                      \
                return shape<int32_t, F>;         \
            case Type::kU64:                      \
                return shape<uint64_t, F>;        \
            case Type::kS64:                      \
                return shape<int64_t, F>;         \
            default:                              \
                d.fail("unknown for this type");  \
        }                                         \
    }
EMULATOR_PICK(unary)
EMULATOR_PICK(binary)
EMULATOR_PICK(ternary)
#undef EMULATOR_PICK

void read_operands(Decoder& d, Type type, int count) {
    d.require_operands(count + 1, count + 1);
    d.operation().type = Class::kInteger;
    d.operation().r[0] = d.write(0, type);
    for (int i = 1; i <= count; ++i) d.operation().r[i] = d.read(i, type);
}

Type wide(Type type) {
    switch (type) {
        case Type::kU16:
            return Type::kU32;
        case Type::kS16:
            return Type::kS32;
        case Type::kU32:
            return Type::kU64;
        default:
            return Type::kS64;
    }
}

template <typename T>
Execute pick_pair(std::string_view root, bool relu) {
    if (root == "add") return binary<uint32_t, Pair<T, Add>>;
    if (root == "min") return relu ? binary<uint32_t, Pair<T, NotNegative<Min>>> : binary<uint32_t, Pair<T, Min>>;
    if (root == "max") return relu ? binary<uint32_t, Pair<T, NotNegative<Max>>> : binary<uint32_t, Pair<T, Max>>;
    return nullptr;
}

void decode_pair(Decoder& d, Type type) {
    const bool relu = d.root() != "add" && type == Type::kS16x2 && d.accept("relu");
    d.require_target(90);
    read_operands(d, type, 2);
    d.operation().execute =
        type == Type::kU16x2 ? pick_pair<uint16_t>(d.root(), relu) : pick_pair<int16_t>(d.root(), relu);
    if (d.operation().execute == nullptr) d.fail("unknown for this type");
}

}  // namespace

void decode_integer(Decoder& d, Type type) {
    const std::string_view root = d.root();
    Operation& operation = d.operation();
    if (is_integer_pair(type)) return decode_pair(d, type);
    if (root == "neg" || root == "abs") {
        if (!is_signed(type)) d.fail("unknown for this type");
        read_operands(d, type, 1);
        operation.execute = root == "neg" ? pick_unary<Neg>(d, type) : pick_unary<Abs>(d, type);
        return;
    }
    const bool saturates = d.accept("sat");
    if (saturates && type != Type::kS32) d.fail(".sat is for s32 alone");
    if (saturates && root != "add" && root != "sub" && root != "mad") d.fail("unknown modifier .sat");
    if (root == "mul" || root == "mad") {
        const bool adds = root == "mad";
        const int form = d.require_any({"lo", "hi", "wide"});
        if (saturates && form != 1) d.fail("unknown modifier .sat");
        if (form == 2) {
            if (width_of(type) == 8) d.fail("unknown for this type");
            d.require_operands(adds ? 4 : 3, adds ? 4 : 3);
            operation.type = Class::kInteger;
            operation.r[0] = d.write(0, wide(type));
            operation.r[1] = d.read(1, type), operation.r[2] = d.read(2, type);
            operation.r[3] = adds ? d.read(3, wide(type)) : d.constant(0, width_of(wide(type)));
            operation.execute = type == Type::kU16   ? multiply_wide<uint16_t, uint32_t>
                                : type == Type::kS16 ? multiply_wide<int16_t, int32_t>
                                : type == Type::kU32 ? multiply_wide<uint32_t, uint64_t>
                                                     : multiply_wide<int32_t, int64_t>;
            return;
        }
        read_operands(d, type, adds ? 3 : 2);
        operation.execute = saturates ? ternary<int32_t, MadHiSat>
                            : adds    ? (form == 0 ? pick_ternary<MadLo>(d, type) : pick_ternary<MadHi>(d, type))
                                      : (form == 0 ? pick_binary<MulLo>(d, type) : pick_binary<MulHi>(d, type));
        return;
    }
    read_operands(d, type, 2);
    if (root == "add") operation.execute = saturates ? binary<int32_t, AddSat> : pick_binary<Add>(d, type);
    if (root == "sub") operation.execute = saturates ? binary<int32_t, SubSat> : pick_binary<Sub>(d, type);
    if (root == "div") operation.execute = pick_binary<Div>(d, type);
    if (root == "rem") operation.execute = pick_binary<Rem>(d, type);
    const bool relu = (root == "min" || root == "max") && type == Type::kS32 && d.accept("relu");
    if (relu) d.require_target(90);
    if (root == "min") operation.execute = relu ? binary<int32_t, NotNegative<Min>> : pick_binary<Min>(d, type);
    if (root == "max") operation.execute = relu ? binary<int32_t, NotNegative<Max>> : pick_binary<Max>(d, type);
}

}  // namespace emulator
