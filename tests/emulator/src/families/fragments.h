// Access to matrix elements in the registers of a warp.
#pragma once

#include "../machine.h"
#include "products.h"

namespace emulator {

// Returns element i of a lane's fragment. Elements have `bits` bits, and fill the first register from its lowest bits
// on, then the next. Registers have 4 bytes, or 8 bytes for elements of 64 bits.
inline uint64_t load_element(Warp& warp, const Slot* registers, int bits, int lane, int i) {
    if (bits == 64) return warp.reg<uint64_t>(registers[i])[lane];
    const int each = 32 / bits;
    const uint32_t word = warp.reg<uint32_t>(registers[i / each])[lane];
    return word >> (bits * (i % each)) & ((uint64_t{1} << bits) - 1);
}

inline void store_element(Warp& warp, const Slot* registers, int bits, int lane, int i, uint64_t value) {
    if (bits == 64) {
        warp.reg<uint64_t>(registers[i])[lane] = value;
        return;
    }
    const int each = 32 / bits, shift = bits * (i % each);
    const auto field = static_cast<uint32_t>(((uint64_t{1} << bits) - 1) << shift);
    uint32_t& word = warp.reg<uint32_t>(registers[i / each])[lane];
    word = (word & ~field) | (static_cast<uint32_t>(value << shift) & field);
}

// Appends the registers of operand `i` to `slots`; fails unless there are `count` of them.
inline void append_fragment(Decoder& d, size_t i, size_t count, Element element, bool is_written,
                            std::vector<Slot>& slots) {
    const Type type = element == Element::kF64 ? Type::kF64 : element == Element::kF32 ? Type::kF32 : Type::kB32;
    const auto elements = d.elements(i);
    if (elements.size() != count) d.fail("a fragment with this number of registers is unknown");
    for (const ptx::Operand* operand : elements) {
        slots.push_back(is_written ? d.write(*operand, type) : d.read(*operand, type));
    }
}

// Stores a product's types and modifiers in option[0] to option[2]; kept_product reads them.
inline void keep_product(Operation& o, const Product& p) {
    const auto index = [](Element element) { return static_cast<int>(element); };
    o.option[0] = index(p.a) | index(p.b) << 4 | index(p.c) << 8 | index(p.d) << 12;
    o.option[1] = p.saturates | static_cast<int>(p.bits) << 1;
    o.option[2] = p.rounding;
}

inline Product kept_product(const Operation& o, int m, int n, int k) {
    const auto element = [&](int place) { return static_cast<Element>(o.option[0] >> (4 * place) & 15); };
    Product p{m, n, k, element(0), element(1), element(2), element(3)};
    p.saturates = (o.option[1] & 1) != 0;
    p.bits = static_cast<Product::Bits>(o.option[1] >> 1);
    p.rounding = o.option[2];
    return p;
}

}  // namespace emulator
