// fp32 and fp64 arithmetic. PTX ISA, "Floating Point Instructions". A NaN result is the canonical NaN.
//
// The .approx forms are computed in double precision and rounded to nearest. That is within the error bounds of the
// manual, but not bit-identical to a GPU.
#include <cfenv>
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
struct DivApprox {  // computes a * (1 / b): the reciprocal of a large b is subnormal and becomes zero
    static float apply(float a, float b) { return std::fabs(b) > 0x1p126f ? a * std::copysign(0.0f, b) : a / b; }
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
template <bool kIsMax, bool kPropagatesNan>
struct ExtremeXorSign {
    template <typename T>
    static T apply(T a, T b) {
        const bool sign = std::signbit(a) != std::signbit(b);
        return std::copysign(Extreme<kIsMax, kPropagatesNan>::apply(std::fabs(a), std::fabs(b)), sign ? T{-1} : T{1});
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

// Runs the Execute in `value` with the rounding mode in option[0]. The call through a pointer keeps the compiler from
// moving arithmetic across the changes of mode.
Next directed(Warp& warp, const Operation& o, uint32_t mask) {
    std::fesetround(o.option[0]);
    const Next next = reinterpret_cast<Execute>(o.value)(warp, o, mask);
    std::fesetround(FE_TONEAREST);
    return next;
}

// Accepts a rounding and stores its mode in option[0]. Returns false if there is none.
bool accept_rounding(Decoder& d) {
    const int found = d.accept_any({"rn", "rz", "rm", "rp"});
    constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    if (found >= 0) d.operation().option[0] = kModes[found];
    return found >= 0;
}

// Wraps `execute`, which has been chosen before, for a rounding other than to nearest.
void apply_rounding(Operation& o) {
    if (o.option[0] == FE_TONEAREST) return;
    o.value = reinterpret_cast<int64_t>(o.execute);
    o.execute = directed;
}

template <typename T, typename F, int kOperands>
Execute shape() {
    if constexpr (kOperands == 1) return unary<T, F>;
    if constexpr (kOperands == 2) return binary<T, F>;
    if constexpr (kOperands == 3) return ternary<T, F>;
}

template <typename F, int kOperands>
Execute pick_single(bool flushes, bool saturates) {
    if (flushes) {
        return saturates ? shape<float, Modified<F, true, true>, kOperands>()
                         : shape<float, Modified<F, true, false>, kOperands>();
    }
    return saturates ? shape<float, Modified<F, false, true>, kOperands>()
                     : shape<float, Modified<F, false, false>, kOperands>();
}

template <typename F, int kOperands>
Execute pick(Type type, bool flushes, bool saturates) {
    if (type == Type::kF64) return shape<double, Double<F>, kOperands>();
    return pick_single<F, kOperands>(flushes, saturates);
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

// Uses only the upper 32 bits of the source; the lower 32 bits of the result are 0. Subnormals are flushed.
template <typename F>
struct UpperHalf {
    static double keep(double x) {
        const double kept = bit_cast<double>(bit_cast<uint64_t>(x) & 0xffffffff00000000u);
        return std::fabs(kept) < 0x1p-1022 ? std::copysign(0.0, kept) : kept;
    }
    static double apply(double x) {
        if (x != x) return canonical(x);
        return keep(F::apply(keep(x)));
    }
};

// rcp.approx.ftz.f64, rsqrt.approx{.ftz}.f64
void decode_approximate_double(Decoder& d, bool flushes) {
    read_operands(d, Type::kF64, 1);
    Operation& o = d.operation();
    if (d.root() == "rcp" && flushes) o.execute = unary<double, UpperHalf<Rcp>>;
    if (d.root() == "rsqrt") o.execute = flushes ? unary<double, UpperHalf<Rsqrt>> : unary<double, Double<Rsqrt>>;
    if (o.execute == nullptr) d.fail("unknown for this type");
}

template <bool kIsMax>
void decode_extreme(Decoder& d, Type type, bool flushes) {
    const bool nan = d.accept("NaN"), signs = d.accept("xorsign");
    if (signs) d.require_any({"abs"});
    if ((nan || signs) && type != Type::kF32) d.fail("unknown modifier for this type");
    read_operands(d, type, 2);
    Execute& execute = d.operation().execute;
    if (signs) {
        execute = nan ? pick_single<ExtremeXorSign<kIsMax, true>, 2>(flushes, false)
                      : pick_single<ExtremeXorSign<kIsMax, false>, 2>(flushes, false);
    } else {
        execute = nan ? pick<Extreme<kIsMax, true>, 2>(type, flushes, false)
                      : pick<Extreme<kIsMax, false>, 2>(type, flushes, false);
    }
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
        } else if (is_single) {  // changes only the sign: a NaN keeps its bits
            operation.execute = is_neg ? unary<float, Neg> : unary<float, Abs>;
        } else {
            operation.execute = is_neg ? unary<double, Neg> : unary<double, Abs>;
        }
        return;
    }
    if (root == "min" || root == "max") {
        return root == "max" ? decode_extreme<true>(d, type, flushes) : decode_extreme<false>(d, type, flushes);
    }
    if (root == "copysign") {
        read_operands(d, type, 2);
        operation.execute = is_single ? binary<float, CopySign> : binary<double, CopySign>;
        return;
    }
    const bool saturates = d.accept("sat");
    if (saturates && !is_single) d.fail("unknown modifier .sat");
    if (root == "div") {
        const bool is_rounded = accept_rounding(d);
        const int form = is_rounded || !is_single ? -1 : d.accept_any({"full", "approx"});
        if (!is_rounded && form < 0) d.fail("a modifier is missing, or unknown");
        if (saturates) d.fail("unknown modifier .sat");
        read_operands(d, type, 2);
        operation.execute = form == 1 ? pick_single<DivApprox, 2>(flushes, false) : pick<Div, 2>(type, flushes, false);
        return apply_rounding(operation);
    }
    // add, sub and mul round to nearest by default; fma and mad must name a rounding.
    const bool is_rounded = accept_rounding(d), needs_rounding = root == "fma" || root == "mad";
    if (needs_rounding && !is_rounded) d.fail("a rounding is missing");
    if (root == "fma" || root == "mad") {
        read_operands(d, type, 3);
        operation.execute = pick<Fma, 3>(type, flushes, saturates);
        return apply_rounding(operation);
    }
    read_operands(d, type, 2);
    if (root == "add") operation.execute = pick<Add, 2>(type, flushes, saturates);
    if (root == "sub") operation.execute = pick<Sub, 2>(type, flushes, saturates);
    if (root == "mul") operation.execute = pick<Mul, 2>(type, flushes, saturates);
    if (operation.execute == nullptr) d.fail("unknown for this type");
    apply_rounding(operation);
}

void decode_approximate(Decoder& d) {
    const std::string_view root = d.root();
    Operation& operation = d.operation();
    const bool has_exact_form = root == "rcp" || root == "sqrt";
    const bool is_exact = has_exact_form && accept_rounding(d);
    if (!is_exact && !d.accept("approx")) d.fail("a modifier is missing, or unknown");
    const bool flushes = d.accept("ftz");
    const Type type = d.require_type();
    if (is_packed(type) || type == Type::kF16 || type == Type::kBF16) {
        // .ftz is required for ex2 of bf16, optional for ex2 of fp16, and not allowed for the others.
        if (root == "ex2" ? type != Type::kF16 && type != Type::kF16x2 && !flushes : flushes) {
            d.fail("unknown modifier, or .ftz is missing");
        }
        return decode_half(d, type, flushes);
    }
    if (type == Type::kF64 && !is_exact) return decode_approximate_double(d, flushes);
    if (type == Type::kF64 ? flushes : type != Type::kF32) d.fail("unknown for this type");
    if (root == "tanh" && flushes) d.fail("unknown modifier .ftz");
    read_operands(d, type, 1);
    if (root == "ex2") operation.execute = pick<Ex2, 1>(Type::kF32, flushes, false);
    if (root == "lg2") operation.execute = pick<Lg2, 1>(Type::kF32, flushes, false);
    if (root == "sin") operation.execute = pick<Sin, 1>(Type::kF32, flushes, false);
    if (root == "cos") operation.execute = pick<Cos, 1>(Type::kF32, flushes, false);
    if (root == "tanh") operation.execute = pick<Tanh, 1>(Type::kF32, flushes, false);
    if (root == "rsqrt") operation.execute = pick<Rsqrt, 1>(type, flushes, false);
    if (root == "rcp") operation.execute = pick<Rcp, 1>(type, flushes, false);
    if (root == "sqrt") operation.execute = pick<Sqrt, 1>(type, flushes, false);
    apply_rounding(operation);
}

}  // namespace emulator
