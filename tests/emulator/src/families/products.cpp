#include "products.h"

#include <cfenv>
#include <cmath>

#include "tensor_core.h"

namespace emulator {
namespace {

// Returns the number of products that a tensor core adds in one step.
int step_of(Element element) {
    return element == Element::kTF32 ? 4 : 8;
}

double to_double(uint64_t bits, Element element) {
    switch (element) {
        case Element::kF16:
            return from_half(static_cast<uint16_t>(bits));
        case Element::kBF16:
            return from_bfloat(static_cast<uint16_t>(bits));
        case Element::kTF32:
            return Tf32::get(&bits, 0);
        case Element::kF32:
            return bit_cast<float>(static_cast<uint32_t>(bits));
        default:
            return bit_cast<double>(bits);
    }
}

int32_t to_integer(uint64_t bits, Element element) {
    switch (element) {
        case Element::kS8:
            return static_cast<int8_t>(bits);
        case Element::kU8:
            return static_cast<uint8_t>(bits);
        case Element::kS4:
            return static_cast<int8_t>(bits << 4) >> 4;
        case Element::kU4:
            return static_cast<int32_t>(bits & 15);
        default:
            return static_cast<int32_t>(bits);
    }
}

template <typename T, typename Convert>
std::vector<T> converted(const Elements& elements, Element element, Convert&& convert) {
    std::vector<T> found;
    found.reserve(elements.size());
    for (const uint64_t bits : elements) found.push_back(static_cast<T>(convert(bits, element)));
    return found;
}

Elements multiply_double(const Product& p, const Elements& a, const Elements& b, const Elements& c) {
    Elements d;
    std::fesetround(p.rounding);
    for (int row = 0; row < p.m; ++row) {
        for (int column = 0; column < p.n; ++column) {
            volatile double sum = bit_cast<double>(c[row * p.n + column]);  // volatile: stays between the mode changes
            for (int k = 0; k < p.k; ++k) {
                sum = std::fma(bit_cast<double>(a[row * p.k + k]), bit_cast<double>(b[k * p.n + column]), sum);
            }
            d.push_back(bit_cast<uint64_t>(static_cast<double>(sum)));
        }
    }
    std::fesetround(FE_TONEAREST);
    return d;
}

Elements multiply_bits(const Product& p, const Elements& a, const Elements& b, const Elements& c) {
    Elements d;
    for (int row = 0; row < p.m; ++row) {
        for (int column = 0; column < p.n; ++column) {
            auto sum = static_cast<uint32_t>(c[row * p.n + column]);
            for (int k = 0; k < p.k; ++k) {
                const uint64_t left = a[row * p.k + k], right = b[k * p.n + column];
                sum += static_cast<uint32_t>(p.bits == Product::Bits::kXor ? left ^ right : left & right);
            }
            d.push_back(sum);
        }
    }
    return d;
}

}  // namespace

Elements multiply(const Product& p, const Elements& a, const Elements& b, const Elements& c) {
    if (p.a == Element::kF64) return multiply_double(p, a, b, c);
    if (p.a == Element::kB1) return multiply_bits(p, a, b, c);
    if (is_integer(p.a)) {
        const auto left = converted<int32_t>(a, p.a, to_integer), right = converted<int32_t>(b, p.b, to_integer);
        auto sums = converted<int32_t>(c, p.c, to_integer);
        add_products(left.data(), right.data(), sums.data(), p.m, p.n, p.k, p.saturates);
        return converted<uint64_t>(Elements(sums.begin(), sums.end()), p.d,
                                   [](uint64_t bits, Element) { return bits & 0xffffffff; });
    }
    const auto left = converted<double>(a, p.a, to_double), right = converted<double>(b, p.b, to_double);
    auto sums = converted<float>(c, p.c, to_double);
    const bool all_half = p.c == Element::kF16 && p.d == Element::kF16;
    add_products(left.data(), right.data(), sums.data(), p.m, p.n, p.k, std::min(step_of(p.a), p.k),
                 all_half ? SumFormat::kHalf : SumFormat::kSingle);
    Elements d;
    for (const float sum : sums) d.push_back(p.d == Element::kF16 ? to_half(sum) : bit_cast<uint32_t>(sum));
    return d;
}

std::vector<Element> accept_elements(Decoder& d) {
    std::vector<Element> found;
    while (true) {
        const int next = d.accept_first({"f16", "bf16", "tf32", "f64", "s8", "u8", "s4", "u4", "b1", "f32", "s32"});
        if (next < 0) return found;
        found.push_back(static_cast<Element>(next));
    }
}

void accept_product_modifiers(Decoder& d, Product& product) {
    if (is_integer(product.a) && product.a != Element::kB1) product.saturates = d.accept("satfinite");
    if (product.a == Element::kB1) {
        product.bits = d.require_any({"xor", "and"}) == 0 ? Product::Bits::kXor : Product::Bits::kAnd;
        d.require_any({"popc"});
    }
    product.rounding = FE_TONEAREST;
    if (product.a == Element::kF64) {
        constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
        const int found = d.accept_any({"rn", "rz", "rm", "rp"});
        if (found > 0) product.rounding = kModes[found];
    }
}

}  // namespace emulator
