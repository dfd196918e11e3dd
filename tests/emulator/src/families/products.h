// Products of the small matrices that a warp multiplies. Elements of all types are passed as bits.
#pragma once

#include <cstdint>
#include <vector>

#include "../decoder.h"

namespace emulator {

enum class Element : uint8_t { kF16, kBF16, kTF32, kF64, kS8, kU8, kS4, kU4, kB1, kF32, kS32 };

constexpr int bits_of(Element element) {
    switch (element) {
        case Element::kF16:
        case Element::kBF16:
            return 16;
        case Element::kF64:
            return 64;
        case Element::kS8:
        case Element::kU8:
            return 8;
        case Element::kS4:
        case Element::kU4:
            return 4;
        case Element::kB1:
            return 1;
        default:
            return 32;
    }
}

constexpr bool is_integer(Element element) {
    return (element >= Element::kS8 && element <= Element::kB1) || element == Element::kS32;
}

// d[m, n] = a[m, k] b[k, n] + c[m, n]
struct Product {
    enum class Bits : uint8_t { kXor, kAnd };  // how one-bit elements are multiplied; the sum counts the ones
    int m, n, k;
    Element a, b, c, d;
    bool saturates = false;
    Bits bits = Bits::kXor;
    int rounding = 0;  // of f64 sums: an argument of fesetround
};

// A matrix in row-major order.
using Elements = std::vector<uint64_t>;

// Sums follow tensor_core.h. In f64, the products are added one after the other, each with one rounding (fma).
Elements multiply(const Product& product, const Elements& a, const Elements& b, const Elements& c);

// Accepts the element types of a matrix instruction and returns them in the order of its modifiers.
std::vector<Element> accept_elements(Decoder& d);

// Accepts the element type's modifiers: a rounding for f64, .satfinite for integers, .xor.popc or .and.popc for bits.
void accept_product_modifiers(Decoder& d, Product& product);

}  // namespace emulator
