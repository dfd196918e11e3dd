// wmma.load, wmma.mma, wmma.store. PTX ISA, "Warp Level Matrix Instructions using wmma".
//
// How a fragment's elements lie in registers is unspecified. Here lane l of 32 has, of the matrix by rows, the elements
// from l * E / 32 on (E: of the whole matrix); where a fragment has registers for more, they are repeated. Accumulators of
// one shape agree in all types, so that programs which convert between them element by element work. Elements of less than
// a byte fill one register of each lane, as mma.sync has them.
#include "addresses.h"
#include "families.h"
#include "fragments.h"

namespace emulator {
namespace {

struct Shape {
    const char* name;
    int m, n, k;
};

constexpr Shape kShapes[] = {{"m16n16k16", 16, 16, 16}, {"m32n8k16", 32, 8, 16}, {"m8n32k16", 8, 32, 16},
                             {"m16n16k8", 16, 16, 8},   {"m8n8k4", 8, 8, 4},     {"m8n8k32", 8, 8, 32},
                             {"m8n8k128", 8, 8, 128}};

int require_shape(Decoder& d) {  // its index
    for (int i = 0; i < static_cast<int>(std::size(kShapes)); ++i) {
        if (d.accept(kShapes[i].name)) return i;
    }
    d.fail("unknown shape");
}

enum class Matrix : uint8_t { kA, kB, kSum };

// Which shapes there are for a type of A and B.
bool is_known(const Shape& s, Element element) {
    const bool deep = s.k == 16;
    switch (element) {
        case Element::kF16:
        case Element::kBF16:
        case Element::kS8:
        case Element::kU8:
            return deep;
        case Element::kTF32:
            return s.k == 8;
        case Element::kF64:
            return s.k == 4;
        case Element::kS4:
        case Element::kU4:
            return s.k == 32;
        case Element::kB1:
            return s.k == 128;
        case Element::kF32:
            return deep || s.k == 8;
        default:
            return deep || s.k >= 32;  // sums of integers
    }
}

int rows_of(const Shape& s, Matrix matrix) {
    return matrix == Matrix::kB ? s.k : s.m;
}
int columns_of(const Shape& s, Matrix matrix) {
    return matrix == Matrix::kA ? s.k : s.n;
}

size_t num_registers(const Shape& s, Matrix matrix, Element element) {
    if (element == Element::kF16) return matrix == Matrix::kSum ? 4 : 8;
    const int bits = bits_of(element), elements = rows_of(s, matrix) * columns_of(s, matrix) / kWarpSize;
    return bits == 64 ? elements : elements * bits / 32;
}

// A fragment in memory and in registers. Elements of less than a byte are moved 32 bits at a time: these are neighbours in
// memory, along k.
struct Layout {
    int rows, columns, bits, num_held;  // num_held: elements that a lane's registers have room for
    bool by_rows;
    int packed;  // elements of the matrix in each of these
};

Layout layout_of(const Shape& s, Matrix matrix, Element element, bool by_rows) {
    const int bits = std::max(bits_of(element), 8);
    Layout layout{rows_of(s, matrix), columns_of(s, matrix), bits, 0, by_rows, 1};
    if (bits_of(element) < 8) {
        layout.bits = 32, layout.packed = 32 / bits_of(element);
        (matrix == Matrix::kA ? layout.columns : layout.rows) /= layout.packed;
    }
    const auto registers = static_cast<int>(num_registers(s, matrix, element));
    layout.num_held = registers * (layout.bits == 64 ? 1 : 32 / layout.bits);
    return layout;
}

// registers: the fragment; r[0]: address, r[1]: stride. `value`: the address's offset; option[0]: what is moved;
// option[1]: state space.
int keep_moved(int shape, Matrix matrix, Element element, bool by_rows, bool is_load) {
    return shape | static_cast<int>(matrix) << 4 | static_cast<int>(element) << 8 | by_rows << 12 | is_load << 13;
}

Next access(Warp& warp, const Operation& o, uint32_t mask) {
    const int moved = o.option[0];
    const Layout l = layout_of(kShapes[moved & 15], static_cast<Matrix>(moved >> 4 & 15),
                               static_cast<Element>(moved >> 8 & 15), (moved >> 12 & 1) != 0);
    const bool is_load = moved >> 13 != 0;
    const auto space = static_cast<Space>(o.option[1]);
    const int bytes = l.bits / 8, per_lane = l.rows * l.columns / kWarpSize;
    uint64_t base[kWarpSize], addresses[kWarpSize];
    lane_addresses(warp, o, o.r[0], mask, base);
    const uint32_t* stride = warp.reg<uint32_t>(o.r[1]);
    for (int i = 0; i < (is_load ? l.num_held : per_lane); ++i) {
        each_lane(mask, [&](int lane) {
            const int element = lane * per_lane + i % per_lane, row = element / l.columns, column = element % l.columns;
            const uint64_t line = l.by_rows ? row : column, along = l.by_rows ? column : row;
            addresses[lane] = base[lane] + (line * (stride[lane] / l.packed) + along) * bytes;
            std::byte* host = warp.access(space, addresses[lane], bytes, lane, !is_load);
            uint64_t bits = 0;
            if (is_load) {
                std::memcpy(&bits, host, bytes);
                store_element(warp, o.registers.data(), l.bits, lane, i, bits);
            } else {
                bits = load_element(warp, o.registers.data(), l.bits, lane, i);
                std::memcpy(host, &bits, bytes);
            }
        });
        if (i < per_lane) warp.count_memory(o, space, addresses, bytes, mask);
    }
    return Next::kContinue;
}

// Where the i-th element of a lane is in its matrix by rows. Elements of less than a byte follow each other along k.
int place_of(const Shape& s, Matrix matrix, Element element, int lane, int i) {
    const int columns = columns_of(s, matrix), per_lane = rows_of(s, matrix) * columns / kWarpSize;
    if (matrix != Matrix::kB || bits_of(element) >= 8) return lane * per_lane + i;
    return (lane / columns * per_lane + i) * columns + lane % columns;
}

Elements gather(Warp& warp, const Slot* registers, const Shape& s, Matrix matrix, Element element) {
    Elements found(rows_of(s, matrix) * columns_of(s, matrix));
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < static_cast<int>(found.size()) / kWarpSize; ++i) {
            const uint64_t bits = load_element(warp, registers, bits_of(element), lane, i);
            found[place_of(s, matrix, element, lane, i)] = bits;
        }
    }
    return found;
}

// registers: d, a, b, c. `value`: the shape; option: see keep_product.
Next product(Warp& warp, const Operation& o, uint32_t) {
    const Shape& s = kShapes[o.value];
    const Product p = kept_product(o, s.m, s.n, s.k);
    const Slot* a = o.registers.data() + num_registers(s, Matrix::kSum, p.d);
    const Slot* b = a + num_registers(s, Matrix::kA, p.a);
    const Slot* c = b + num_registers(s, Matrix::kB, p.b);
    const Elements sums = multiply(p, gather(warp, a, s, Matrix::kA, p.a), gather(warp, b, s, Matrix::kB, p.b),
                                   gather(warp, c, s, Matrix::kSum, p.c));
    const int per_lane = s.m * s.n / kWarpSize;
    for (int i = 0; i < s.m * s.n; ++i) {
        store_element(warp, o.registers.data(), bits_of(p.d), i / per_lane, i % per_lane, sums[i]);
    }
    return Next::kContinue;
}

void decode_access(Decoder& d, bool is_load) {
    Operation& o = d.operation();
    const int which = is_load ? d.require_any({"a", "b", "c"}) : 2 + d.require_any({"d"});
    const Matrix matrix = which == 0 ? Matrix::kA : which == 1 ? Matrix::kB : Matrix::kSum;
    d.require_any({"sync"});
    d.require_any({"aligned"});
    const bool by_rows = d.require_any({"row", "col"}) == 0;
    const int shape_index = require_shape(d);
    const Shape& shape = kShapes[shape_index];
    Space space = d.accept_space();
    if (space != Space::kGeneric && space != Space::kGlobal && space != Space::kShared) d.fail("unknown state space");
    const std::vector<Element> elements = accept_elements(d);
    if (elements.size() != 1) d.fail("a type is missing, or unknown");
    const Element element = elements[0];
    const bool of_sums = element == Element::kF32 || element == Element::kS32;
    const bool of_both = element == Element::kF16 || element == Element::kF64;
    if (!is_known(shape, element) || (!of_both && of_sums != (matrix == Matrix::kSum))) {
        d.fail("unknown shape for this type");
    }
    if (bits_of(element) < 8 && by_rows != (matrix == Matrix::kA)) d.fail("unknown layout for this type");
    d.require_operands(2, 3);
    const Layout layout = layout_of(shape, matrix, element, by_rows);
    append_fragment(d, is_load ? 0 : 1, num_registers(shape, matrix, element), element, is_load, o.registers);
    set_address(o, o.r[0], d.address(is_load ? 1 : 0, space));
    const int dense = (by_rows ? layout.columns : layout.rows) * layout.packed;
    o.r[1] = d.num_operands() == 3 ? d.read(2, Type::kU32) : d.constant(dense, 4);
    o.option[0] = keep_moved(shape_index, matrix, element, by_rows, is_load);
    o.option[1] = static_cast<int>(space);
    o.type = Class::kMatrixLoad;
    o.execute = access;
}

// The sums' type for a type of A and B.
bool fits(Element element, Element sum) {
    if (element == Element::kF16) return sum == Element::kF16 || sum == Element::kF32;
    if (element == Element::kF64) return sum == Element::kF64;
    return sum == (is_integer(element) ? Element::kS32 : Element::kF32);
}

// fp16 names the types of D and C, the others also those of A and B.
Product require_product(Decoder& d, const Shape& shape) {
    const std::vector<Element> types = accept_elements(d);
    Product p{shape.m, shape.n, shape.k, Element::kF16, Element::kF16, Element::kF16, Element::kF16};
    if (types.size() == 2) {
        p.d = types[0], p.c = types[1];
    } else if (types.size() == 4) {
        p.d = types[0], p.a = types[1], p.b = types[2], p.c = types[3];
    }
    const bool names_fp16 = types.size() == 4 && p.a == Element::kF16;
    if ((types.size() != 2 && types.size() != 4) || names_fp16 || p.a != p.b || !fits(p.a, p.c) || !fits(p.a, p.d) ||
        !is_known(shape, p.a)) {
        d.fail("unknown shape for these types");
    }
    accept_product_modifiers(d, p);
    return p;
}

void decode_product(Decoder& d) {
    Operation& o = d.operation();
    d.require_any({"sync"});
    d.require_any({"aligned"});
    // Fragments hold the same elements whatever the layout in memory was, so these mean nothing here.
    const int layouts[] = {d.accept_first({"row", "col"}), d.accept_first({"row", "col"})};
    if (layouts[0] < 0 || layouts[1] < 0) d.fail("a layout is missing, or unknown");
    const int shape_index = require_shape(d);
    const Shape& shape = kShapes[shape_index];
    const Product p = require_product(d, shape);
    if (bits_of(p.a) < 8 && (layouts[0] != 0 || layouts[1] != 1)) d.fail("unknown layout for this type");
    d.require_operands(4, 4);
    append_fragment(d, 0, num_registers(shape, Matrix::kSum, p.d), p.d, true, o.registers);
    append_fragment(d, 1, num_registers(shape, Matrix::kA, p.a), p.a, false, o.registers);
    append_fragment(d, 2, num_registers(shape, Matrix::kB, p.b), p.b, false, o.registers);
    append_fragment(d, 3, num_registers(shape, Matrix::kSum, p.c), p.c, false, o.registers);
    keep_product(o, p);
    o.value = shape_index;
    o.type = Class::kTensorCore;
    o.execute = product;
}

}  // namespace

void decode_wmma(Decoder& d) {
    d.operation().is_aligned = true;
    if (d.accept("load")) return decode_access(d, true);
    if (d.accept("store")) return decode_access(d, false);
    d.require_any({"mma"});
    decode_product(d);
}

}  // namespace emulator
