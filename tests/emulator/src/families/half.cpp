// fp16 and bf16 arithmetic, one number or a pair in a register. PTX ISA, "Half Precision Floating Point Instructions".
#include <cmath>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

struct Fp16 {
    static float from(uint16_t bits) { return from_half(bits); }
    static uint16_t to(double value) { return to_half(value); }
};
struct Bf16 {
    static float from(uint16_t bits) { return from_bfloat(bits); }
    static uint16_t to(double value) { return to_bfloat(value); }
};

uint16_t flush_half(uint16_t bits) {
    return (bits & 0x7fff) < 0x0400 ? bits & 0x8000 : bits;
}

// Results are rounded once: in double precision, products of 16-bit numbers are exact, and sums are rounded to odd.
struct Add {
    static double apply(double a, double b) { return multiply_add_to_odd(1, a, b); }
};
struct Sub {
    static double apply(double a, double b) { return multiply_add_to_odd(1, a, -b); }
};
struct Mul {
    static double apply(double a, double b) { return a * b; }
};
struct Fma {
    static double apply(double a, double b, double c) { return multiply_add_to_odd(a, b, c); }
};
struct FmaRelu {
    static double apply(double a, double b, double c) {
        const double x = multiply_add_to_odd(a, b, c);
        return x < 0 ? 0 : x;
    }
};
template <bool kIsMax, bool kPropagatesNan>
struct Extreme {
    static double apply(double a, double b) {
        if (a != a || b != b) return kPropagatesNan || (a != a && b != b) ? NAN : a != a ? b : a;
        if (a == b) return std::signbit(a) == kIsMax ? b : a;
        return (a < b) == kIsMax ? b : a;
    }
};
template <bool kIsMax, bool kPropagatesNan>
struct ExtremeXorSign {
    static double apply(double a, double b) {
        const double result = Extreme<kIsMax, kPropagatesNan>::apply(std::fabs(a), std::fabs(b));
        return std::copysign(result, std::signbit(a) != std::signbit(b) ? -1.0 : 1.0);
    }
};
struct Ex2 {
    static double apply(double a) { return std::exp2(a); }
};
struct Tanh {
    static double apply(double a) { return std::tanh(a); }
};

template <typename F, typename Format, bool kFlushes, bool kSaturates>
struct Rounded {
    static double in(uint16_t x) { return Format::from(kFlushes ? flush_half(x) : x); }
    template <typename... T>
    static uint16_t apply(T... x) {
        double result = F::apply(in(x)...);
        if (kSaturates) result = result > 0 ? std::fmin(result, 1.0) : 0.0;
        const uint16_t bits = Format::to(result);
        return kFlushes ? flush_half(bits) : bits;
    }
};

struct NegBits {
    static uint16_t apply(uint16_t a) { return a ^ 0x8000; }
};
struct AbsBits {
    static uint16_t apply(uint16_t a) { return a & 0x7fff; }
};
template <typename F>
struct FlushedBits {
    static uint16_t apply(uint16_t a) { return F::apply(flush_half(a)); }
};
template <typename F>
constexpr bool kIsOfBits = false;
template <>
constexpr bool kIsOfBits<NegBits> = true;
template <>
constexpr bool kIsOfBits<AbsBits> = true;

template <typename F>
struct Pair {
    template <typename... T>
    static uint32_t apply(T... x) {
        const uint16_t low = F::apply(static_cast<uint16_t>(x)...), high = F::apply(static_cast<uint16_t>(x >> 16)...);
        return low | uint32_t{high} << 16;
    }
};

template <int kOperands, typename F>
Execute shape(bool packed) {
    if constexpr (kOperands == 1) return packed ? unary<uint32_t, Pair<F>> : unary<uint16_t, F>;
    if constexpr (kOperands == 2) return packed ? binary<uint32_t, Pair<F>> : binary<uint16_t, F>;
    if constexpr (kOperands == 3) return packed ? ternary<uint32_t, Pair<F>> : ternary<uint16_t, F>;
}

template <int kOperands, typename F>
void set(Decoder& d, Type type, bool flushes = false, bool saturates = false) {
    d.require_operands(kOperands + 1, kOperands + 1);
    const bool packed = is_packed(type), is_fp16 = type == Type::kF16 || type == Type::kF16x2;
    const Type bits = packed ? Type::kB32 : Type::kB16;
    Operation& operation = d.operation();
    operation.type = Class::kHalf;
    operation.r[0] = d.write(0, bits);
    for (int i = 1; i <= kOperands; ++i) operation.r[i] = d.read(i, bits);
    if constexpr (kIsOfBits<F>) {
        if (flushes && !is_fp16) d.fail("unknown modifier .ftz");
        operation.execute = flushes ? shape<kOperands, FlushedBits<F>>(packed) : shape<kOperands, F>(packed);
    } else if (!is_fp16) {
        if (flushes || saturates) d.fail("unknown modifier for bf16");
        operation.execute = shape<kOperands, Rounded<F, Bf16, false, false>>(packed);
    } else if (flushes) {
        operation.execute = saturates ? shape<kOperands, Rounded<F, Fp16, true, true>>(packed)
                                      : shape<kOperands, Rounded<F, Fp16, true, false>>(packed);
    } else {
        operation.execute = saturates ? shape<kOperands, Rounded<F, Fp16, false, true>>(packed)
                                      : shape<kOperands, Rounded<F, Fp16, false, false>>(packed);
    }
}

template <bool kIsMax>
void set_extreme(Decoder& d, Type type, bool flushes) {
    const bool nan = d.accept("NaN");
    if (!d.accept("xorsign")) {
        return nan ? set<2, Extreme<kIsMax, true>>(d, type, flushes) : set<2, Extreme<kIsMax, false>>(d, type, flushes);
    }
    d.require_any({"abs"});
    return nan ? set<2, ExtremeXorSign<kIsMax, true>>(d, type, flushes)
               : set<2, ExtremeXorSign<kIsMax, false>>(d, type, flushes);
}

}  // namespace

void decode_half(Decoder& d, Type type, bool flushes) {
    const std::string_view root = d.root();
    const bool is_fp16 = type == Type::kF16 || type == Type::kF16x2;
    if (root == "ex2") return set<1, Ex2>(d, type, flushes && is_fp16);
    if (root == "tanh") return set<1, Tanh>(d, type);
    flushes = d.accept("ftz");
    if (root == "neg") return set<1, NegBits>(d, type, flushes);
    if (root == "abs") return set<1, AbsBits>(d, type, flushes);
    if (root == "max") return set_extreme<true>(d, type, flushes);
    if (root == "min") return set_extreme<false>(d, type, flushes);
    const bool is_rounded = d.accept("rn"), saturates = d.accept("sat");
    if (root == "fma") {
        if (!is_rounded) d.fail("a rounding is missing");
        if (!d.accept("relu")) return set<3, Fma>(d, type, flushes, saturates);
        return saturates ? d.fail("unknown combination of modifiers") : set<3, FmaRelu>(d, type, flushes);
    }
    if (root == "add") return set<2, Add>(d, type, flushes, saturates);
    if (root == "sub") return set<2, Sub>(d, type, flushes, saturates);
    if (root == "mul") return set<2, Mul>(d, type, flushes, saturates);
    d.fail("unknown for this type");
}

}  // namespace emulator
