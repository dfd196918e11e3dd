// The mma.sync shapes that matrix.cpp does not have: fp64, m8n8 of 8-bit integers, 4-bit integers, bits, and the fp16
// m8n8k4 of sm_70. PTX ISA, "Warp Level Matrix Instructions: mma".
#include "families.h"
#include "fragments.h"

namespace emulator {
namespace {

struct Shape {
    const char* name;
    int m, n, k;
};

constexpr Shape kShapes[] = {{"m8n8k4", 8, 8, 4},       {"m8n8k16", 8, 8, 16},    {"m8n8k32", 8, 8, 32},
                             {"m8n8k128", 8, 8, 128},   {"m16n8k4", 16, 8, 4},    {"m16n8k8", 16, 8, 8},
                             {"m16n8k16", 16, 8, 16},   {"m16n8k32", 16, 8, 32},  {"m16n8k64", 16, 8, 64},
                             {"m16n8k128", 16, 8, 128}, {"m16n8k256", 16, 8, 256}};

// The fragments of lane 4g + t; a register of A and B holds `each` elements. Register r of A: row g + 8 (r % 2), from
// column (t + 4 (r / 2)) · each on. Register r of B: column g, from row (t + 4 r) · each on. C and D: rows g and g + 8,
// columns 2t and 2t + 1. A shape with 8 rows has only row g: the even registers of A, two elements of C and D.
struct Figure {
    int each, registers_a, registers_b, sums;
};

Figure figure_of(const Shape& s, Element element) {
    const int bits = bits_of(element), each = bits == 64 ? 1 : 32 / bits;
    return {each, s.m * s.k / kWarpSize / each, s.n * s.k / kWarpSize / each, s.m * s.n / kWarpSize};
}

int sum_place(const Shape& s, int lane, int i) {
    return (lane / 4 + 8 * (i / 2)) * s.n + lane % 4 * 2 + i % 2;
}

// registers: d, a, b, c. value: index into kShapes; option: see keep_product.
Next multiply_shape(Warp& warp, const Operation& o, uint32_t) {
    const Shape& s = kShapes[o.value];
    const Product p = kept_product(o, s.m, s.n, s.k);
    const Figure f = figure_of(s, p.a);
    const Slot* const d_slots = o.registers.data();
    const Slot *const a_slots = d_slots + f.sums, *const b_slots = a_slots + f.registers_a;
    const Slot* const c_slots = b_slots + f.registers_b;
    const int bits = bits_of(p.a), sum_bits = bits_of(p.c);
    Elements a(s.m * s.k), b(s.k * s.n), c(s.m * s.n);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int r = 0; r < f.registers_a; ++r) {
            const int row = s.m == 8 ? g : g + 8 * (r % 2), column = (t + 4 * (s.m == 8 ? r : r / 2)) * f.each;
            for (int i = 0; i < f.each; ++i) {
                a[row * s.k + column + i] = load_element(warp, a_slots, bits, lane, r * f.each + i);
            }
        }
        for (int r = 0; r < f.registers_b; ++r) {
            for (int i = 0; i < f.each; ++i) {
                b[((t + 4 * r) * f.each + i) * s.n + g] = load_element(warp, b_slots, bits, lane, r * f.each + i);
            }
        }
        for (int i = 0; i < f.sums; ++i) c[sum_place(s, lane, i)] = load_element(warp, c_slots, sum_bits, lane, i);
    }
    const Elements sums = multiply(p, a, b, c);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < f.sums; ++i) {
            store_element(warp, d_slots, sum_bits, lane, i, sums[sum_place(s, lane, i)]);
        }
    }
    return Next::kContinue;
}

// fp16 m8n8k4 computes four products at a time. Lanes 4q to 4q + 3 and 4q + 16 to 4q + 19 hold product q.
struct Quad {
    int quad, half, t;  // lane = 16 half + 4 quad + t
    explicit Quad(int lane) : quad(lane / 4 % 4), half(lane / 16), t(lane % 4) {}
};

// These return the row-major index in its matrix of a lane's element i.
int quad_place_a(int lane, int i, bool by_rows) {
    const Quad q(lane);
    return by_rows ? (q.t + 4 * q.half) * 4 + i : (i + 4 * q.half) * 4 + q.t;
}
int quad_place_b(int lane, int i, bool by_rows) {
    const Quad q(lane);
    return by_rows ? q.t * 8 + i + 4 * q.half : i * 8 + q.t + 4 * q.half;
}
int quad_place_sum(int lane, int i, Element element) {
    const Quad q(lane);
    if (element == Element::kF16) return (q.t + 4 * q.half) * 8 + i;
    return ((lane & 1) + (i & 2) + 4 * q.half) * 8 + (i & 4) + (lane & 2) + (i & 1);
}

// value: bit 0 if A is row-major, bit 1 if B is.
Next multiply_quads(Warp& warp, const Operation& o, uint32_t) {
    constexpr int kQuads = 4, kSums = 8;
    const Product p = kept_product(o, 8, 8, 4);
    const auto registers = [](Element sum) { return sum == Element::kF16 ? 4 : 8; };
    const Slot* const d_slots = o.registers.data();
    const Slot *const a_slots = d_slots + registers(p.d), *const b_slots = a_slots + 2, *const c_slots = b_slots + 2;
    for (int quad = 0; quad < kQuads; ++quad) {
        Elements a(8 * 4), b(4 * 8), c(8 * 8);
        const auto each_member = [&](auto&& function) {
            for (int lane = 0; lane < kWarpSize; ++lane) {
                if (Quad(lane).quad == quad) function(lane);
            }
        };
        each_member([&](int lane) {
            for (int i = 0; i < 4; ++i) {
                a[quad_place_a(lane, i, (o.value & 1) != 0)] = load_element(warp, a_slots, 16, lane, i);
                b[quad_place_b(lane, i, (o.value & 2) != 0)] = load_element(warp, b_slots, 16, lane, i);
            }
            for (int i = 0; i < kSums; ++i) {
                c[quad_place_sum(lane, i, p.c)] = load_element(warp, c_slots, bits_of(p.c), lane, i);
            }
        });
        const Elements sums = multiply(p, a, b, c);
        each_member([&](int lane) {
            for (int i = 0; i < kSums; ++i) {
                store_element(warp, d_slots, bits_of(p.d), lane, i, sums[quad_place_sum(lane, i, p.d)]);
            }
        });
    }
    return Next::kContinue;
}

void append_fragments(Decoder& d, const Product& p, size_t d_count, size_t a_count, size_t b_count, size_t c_count) {
    Operation& o = d.operation();
    d.require_operands(4, 4);
    append_fragment(d, 0, d_count, p.d, true, o.registers);
    append_fragment(d, 1, a_count, p.a, false, o.registers);
    append_fragment(d, 2, b_count, p.b, false, o.registers);
    append_fragment(d, 3, c_count, p.c, false, o.registers);
    keep_product(o, p);
}

void decode_quads(Decoder& d, const Product& p, bool a_by_rows, bool b_by_rows) {
    const auto is_sum = [](Element e) { return e == Element::kF16 || e == Element::kF32; };
    if (p.b != Element::kF16 || !is_sum(p.c) || !is_sum(p.d) || (p.c == Element::kF32 && p.d == Element::kF16)) {
        d.fail("unknown shape for these types");
    }
    const auto count = [](Element sum) { return sum == Element::kF16 ? 4 : 8; };
    append_fragments(d, p, count(p.d), 2, 2, count(p.c));
    d.operation().value = a_by_rows | b_by_rows << 1;
    d.operation().execute = multiply_quads;
}

// Returns true if PTX has the shape for the type.
bool is_known(const Shape& s, Element element) {
    switch (element) {
        case Element::kF64:
            return s.k <= 16 && (s.m == 16 || s.k == 4);
        case Element::kS8:
        case Element::kU8:
            return s.m == 8 && s.k == 16;
        case Element::kS4:
        case Element::kU4:
            return s.k == 32 || s.k == 64;
        case Element::kB1:
            return s.k >= 128;
        default:
            return false;
    }
}

}  // namespace

bool decode_other_mma(Decoder& d) {
    const std::string_view opcode = d.operation().instruction->opcode;
    const auto has = [&](std::string_view word) { return opcode.find(word) != std::string_view::npos; };
    if (!has(".m8n8k") && !has(".f64") && !has(".s4") && !has(".u4") && !has(".b1")) return false;
    d.require_any({"sync"});
    d.require_any({"aligned"});
    int index = 0;
    while (index < static_cast<int>(std::size(kShapes)) && !d.accept(kShapes[index].name)) ++index;
    if (index == std::size(kShapes)) d.fail("unknown shape");
    const Shape& shape = kShapes[index];
    const int layouts[] = {d.accept_first({"row", "col"}), d.accept_first({"row", "col"})};
    if (layouts[0] < 0 || layouts[1] < 0) d.fail("a layout is missing, or unknown");
    const std::vector<Element> types = accept_elements(d);
    if (types.size() != 4) d.fail("types are missing, or unknown");
    Product p{shape.m, shape.n, shape.k, types[1], types[2], types[3], types[0]};
    d.operation().is_aligned = true;
    d.operation().type = Class::kTensorCore;
    if (p.a == Element::kF16 && index == 0) {
        decode_quads(d, p, layouts[0] == 0, layouts[1] == 0);
        return true;
    }
    const bool is_double = p.a == Element::kF64;
    const Element sum = is_double ? Element::kF64 : Element::kS32;
    const bool mixes = is_integer(p.a) && is_integer(p.b) && bits_of(p.a) == bits_of(p.b);
    if (layouts[0] != 0 || layouts[1] != 1 || p.c != sum || p.d != sum || !(p.a == p.b || mixes) ||
        !is_known(shape, p.a)) {
        d.fail("unknown shape for these types");
    }
    if (is_double && shape.m == 16) d.require_target(90);
    accept_product_modifiers(d, p);
    const Figure f = figure_of(shape, p.a);
    append_fragments(d, p, f.sums, f.registers_a, f.registers_b, f.sums);
    d.operation().value = index;
    d.operation().execute = multiply_shape;
    return true;
}

}  // namespace emulator
