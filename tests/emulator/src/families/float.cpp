// fp32 and fp64 arithmetic. PTX ISA, "Floating Point Instructions". Results that are NaN are the canonical one.
//
// The .approx forms are computed in double precision and rounded to nearest: closer to the true value than the bounds
// that the manual gives for hardware, and so within them, but not what a GPU gives bit for bit.
#include <cmath>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

inline double canonical(double x) {
    return x != x ? bit_cast<double>(uint64_t{0x7fffffffffffffff}) : x;
}
using emulator::canonical;

struct Add {
    template <typename T>
    static T apply(T a, T b) {
        return a + b;
    }
};
struct Sub {
    template <typename T>
    static T apply(T a, T b) {
        return a - b;
    }
};
struct Mul {
    template <typename T>
    static T apply(T a, T b) {
        return a * b;
    }
};
struct Div {
    template <typename T>
    static T apply(T a, T b) {
        return a / b;
    }
};
struct Fma {
    template <typename T>
    static T apply(T a, T b, T c) {
        return std::fma(a, b, c);
    }
};
template <bool kIsMax, bool kPropagatesNan>
struct Extreme {
    template <typename T>
    static T apply(T a, T b) {
        if (a != a || b != b) return kPropagatesNan || (a != a && b != b) ? canonical(a + b) : a != a ? b : a;
        if (a == b) return std::signbit(a) == kIsMax ? b : a;  // -0 < +0
        return (a < b) == kIsMax ? b : a;
    }
};
template <bool kIsMax>
struct ExtremeXorSign {
    template <typename T>
    static T apply(T a, T b) {
        const bool sign = std::signbit(a) != std::signbit(b);
        return std::copysign(Extreme<kIsMax, false>::apply(std::fabs(a), std::fabs(b)), sign ? T{-1} : T{1});
    }
};
struct Neg {
    template <typename T>
    static T apply(T a) {
        return -a;
    }
};
struct Abs {
    template <typename T>
    static T apply(T a) {
        return std::fabs(a);
    }
};
struct CopySign {
    template <typename T>
    static T apply(T a, T b) {
        return std::copysign(b, a);
    }
};

template <typename F, bool kFlushes, bool kSaturates>
struct Modified {
    static float in(float x) { return kFlushes ? flush(x) : x; }
    static float out(float x) {
        if (kFlushes) x = flush(x);
        if (kSaturates) return x > 0 ? std::fmin(x, 1.0f) : 0.0f;  // NaN becomes 0
        return canonical(x);
    }
    template <typename... T>
    static float apply(T... x) {
        return out(F::apply(in(x)...));
    }
};

template <typename F>
struct Double {
    template <typename... T>
    static double apply(T... x) {
        return canonical(F::apply(x...));
    }
};

template <typename F, int kOperands>
Execute pick(Type type, bool flushes, bool saturates) {
    const auto shape = [](auto functor, auto element) -> Execute {
        using Functor = decltype(functor);
        using T = decltype(element);
        if constexpr (kOperands == 1) return unary<T, Functor>;
        if constexpr (kOperands == 2) return binary<T, Functor>;
        if constexpr (kOperands == 3) return ternary<T, Functor>;
    };
    if (type == Type::kF64) return shape(Double<F>{}, double{});
    if (flushes)
        return saturates ? shape(Modified<F, true, true>{}, float{}) : shape(Modified<F, true, false>{}, float{});
    return saturates ? shape(Modified<F, false, true>{}, float{}) : shape(Modified<F, false, false>{}, float{});
}

struct Ex2 {
    template <typename T>
    static T apply(T x) {
        return static_cast<T>(std::exp2(static_cast<double>(x)));
    }
};
struct Lg2 {
    template <typename T>
    static T apply(T x) {
        return static_cast<T>(std::log2(static_cast<double>(x)));
    }
};
struct Sin {
    template <typename T>
    static T apply(T x) {
        return static_cast<T>(std::sin(static_cast<double>(x)));
    }
};
struct Cos {
    template <typename T>
    static T apply(T x) {
        return static_cast<T>(std::cos(static_cast<double>(x)));
    }
};
struct Tanh {
    template <typename T>
    static T apply(T x) {
        return static_cast<T>(std::tanh(static_cast<double>(x)));
    }
};
struct Rsqrt {
    template <typename T>
    static T apply(T x) {
        return static_cast<T>(1.0 / std::sqrt(static_cast<double>(x)));
    }
};
struct Rcp {
    template <typename T>
    static T apply(T x) {
        return 1 / x;
    }
};
struct Sqrt {
    template <typename T>
    static T apply(T x) {
        return std::sqrt(x);
    }
};

void read_operands(Decoder& d, Type type, int count) {
    d.require_operands(count + 1, count + 1);
    d.operation().type = Class::kFloat;
    d.operation().r[0] = d.write(0, type);
    for (int i = 1; i <= count; ++i) d.operation().r[i] = d.read(i, type);
}

}  // namespace

void decode_float(Decoder& d, Type type) {
    const std::string_view root = d.root();
    Operation& operation = d.operation();
    const bool flushes = d.accept("ftz"), is_single = type == Type::kF32;
    if (flushes && !is_single) d.fail("unknown modifier .ftz");
    if (root == "neg" || root == "abs") {
        read_operands(d, type, 1);
        const bool is_neg = root == "neg";
        if (flushes) {
            operation.execute = is_neg ? pick<Neg, 1>(type, true, false) : pick<Abs, 1>(type, true, false);
        } else if (is_single) {  // only the sign: a NaN keeps its bits
            operation.execute = is_neg ? unary<float, Neg> : unary<float, Abs>;
        } else {
            operation.execute = is_neg ? unary<double, Neg> : unary<double, Abs>;
        }
        return;
    }
    if (root == "min" || root == "max") {
        const bool nan = d.accept("NaN"), is_max = root == "max";
        if (nan && !is_single) d.fail("unknown modifier .NaN");
        if (d.accept("xorsign")) {
            if (!is_single || !d.accept("abs") || nan) d.fail("unknown combination of modifiers");
            read_operands(d, type, 2);
            operation.execute = is_max ? pick<ExtremeXorSign<true>, 2>(type, flushes, false)
                                       : pick<ExtremeXorSign<false>, 2>(type, flushes, false);
            return;
        }
        read_operands(d, type, 2);
        operation.execute = is_max ? (nan ? pick<Extreme<true, true>, 2>(type, flushes, false)
                                          : pick<Extreme<true, false>, 2>(type, flushes, false))
                                   : (nan ? pick<Extreme<false, true>, 2>(type, flushes, false)
                                          : pick<Extreme<false, false>, 2>(type, flushes, false));
        return;
    }
    if (root == "copysign") {
        read_operands(d, type, 2);
        operation.execute = is_single ? binary<float, CopySign> : binary<double, CopySign>;
        return;
    }
    const bool saturates = d.accept("sat");
    if (saturates && !is_single) d.fail("unknown modifier .sat");
    if (root == "div") {
        if (is_single) {
            d.require_any({"rn", "full", "approx"});
        } else {
            d.require_any({"rn"});
        }
        if (saturates) d.fail("unknown modifier .sat");
        read_operands(d, type, 2);
        operation.execute = pick<Div, 2>(type, flushes, false);
        return;
    }
    d.accept("rn");  // no rounding means this one too; the others are not executed
    if (root == "fma" || root == "mad") {
        read_operands(d, type, 3);
        operation.execute = pick<Fma, 3>(type, flushes, saturates);
        return;
    }
    read_operands(d, type, 2);
    if (root == "add") operation.execute = pick<Add, 2>(type, flushes, saturates);
    if (root == "sub") operation.execute = pick<Sub, 2>(type, flushes, saturates);
    if (root == "mul") operation.execute = pick<Mul, 2>(type, flushes, saturates);
}

void decode_approximate(Decoder& d) {
    const std::string_view root = d.root();
    Operation& operation = d.operation();
    const bool is_approximate = d.accept("approx"), flushes = d.accept("ftz");
    const bool has_exact_form = root == "rcp" || root == "sqrt";
    if (!is_approximate && !(has_exact_form && d.accept("rn"))) d.fail("a modifier is missing, or unknown");
    const Type type = d.require_type();
    if (is_packed(type) || type == Type::kF16 || type == Type::kBF16) {
        if (flushes && type == Type::kBF16) d.accept("ftz");
        return decode_half(d, type);
    }
    if (type == Type::kF64 ? is_approximate || !has_exact_form || flushes : type != Type::kF32) {
        d.fail("unknown for this type");
    }
    read_operands(d, type, 1);
    if (root == "ex2") operation.execute = pick<Ex2, 1>(Type::kF32, flushes, false);
    if (root == "lg2") operation.execute = pick<Lg2, 1>(Type::kF32, flushes, false);
    if (root == "sin") operation.execute = pick<Sin, 1>(Type::kF32, flushes, false);
    if (root == "cos") operation.execute = pick<Cos, 1>(Type::kF32, flushes, false);
    if (root == "tanh") operation.execute = pick<Tanh, 1>(Type::kF32, flushes, false);
    if (root == "rsqrt") operation.execute = pick<Rsqrt, 1>(type, flushes, false);
    if (root == "rcp") operation.execute = pick<Rcp, 1>(type, flushes, false);
    if (root == "sqrt") operation.execute = pick<Sqrt, 1>(type, flushes, false);
}

}  // namespace emulator
