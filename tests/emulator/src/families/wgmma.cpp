// wgmma. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#include "../wgmma.h"

#include "../cluster.h"
#include "../decoder.h"
#include "families.h"
#include "tensor_core.h"
#include "wgmma_operands.h"

namespace emulator {
namespace {

constexpr int kRows = 16;  // of a warp

// The shape, types and modifiers of a wgmma.mma_async. An operation stores them in its options.
struct Form {
    int columns, depth;
    Type a, b, sum;
    bool a_in_registers, transposes_a, transposes_b, negates_a, negates_b, saturates, negates_scale;

    void pack(Operation& o) const {
        o.option[0] = columns;
        o.option[1] = static_cast<int>(a) | static_cast<int>(b) << 8 | static_cast<int>(sum) << 16;
        o.option[2] = a_in_registers | transposes_a << 1 | transposes_b << 2 | negates_a << 3 | negates_b << 4 |
                      saturates << 5 | negates_scale << 6;
    }
    static Form unpack(const Operation& o) {
        const auto type = [&](int shift) { return static_cast<Type>(o.option[1] >> shift & 255); };
        const auto flag = [&](int bit) { return (o.option[2] >> bit & 1) != 0; };
        return {o.option[0], 32 / width_of(type(0)),
                type(0),     type(8),
                type(16),    flag(0),
                flag(1),     flag(2),
                flag(3),     flag(4),
                flag(5),     flag(6)};
    }
    bool is_integer() const { return sum == Type::kS32; }
    // Hopper adds the products of a whole instruction at a time; for fp8 it keeps fewer bits.
    SumFormat sum_format() const {
        return sum == Type::kF16 ? SumFormat::kHalf : width_of(a) == 1 ? SumFormat::kNarrow : SumFormat::kSingle;
    }
};

template <typename Function>
auto with_integer_format(Type type, Function&& function) {
    return type == Type::kS8 ? function(Signed8{}) : function(Unsigned8{});
}

// Reads A, [16, K], from registers. They hold the fragment that mma.sync uses, see gather_a in matrix.cpp.
template <typename Format, typename T>
void read_fragment(Warp& warp, const std::vector<TrackedRegister>& registers, int depth, T* a) {
    constexpr int kEach = 4 / Format::kBytes;
    for (size_t r = 0; r < registers.size(); ++r) {
        const uint32_t* bits = warp.reg<uint32_t>(registers[r].slot);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            T* const row = a + (lane / 4 + 8 * (r % 2)) * depth + (lane % 4 + 4 * (r / 2)) * kEach;
            for (int i = 0; i < kEach; ++i) row[i] = Format::get(bits + lane, i);
        }
    }
}

template <typename T>
void negate(std::vector<T>& matrix, bool negates) {
    if (!negates) return;
    for (T& x : matrix) x = -x;
}

// One warp's part of a wgmma.mma_async. T: double or int32_t.
template <typename T>
struct Product {
    Form form;
    Cta* cta;
    int first_row;  // the warp's first row of A
    uint64_t descriptor_a, descriptor_b;
    bool adds;         // scale-d
    std::vector<T> a;  // [16, K]; if A is in shared memory, empty until the multiplication is performed

    template <typename Function>
    static void with_format(Type type, Function&& function) {
        if constexpr (std::is_same_v<T, double>) {
            with_float_format(type, function);
        } else {
            with_integer_format(type, function);
        }
    }

    void read_a(Warp& warp, const std::vector<TrackedRegister>& registers) {
        a.resize(kRows * form.depth);
        with_format(form.a,
                    [&](auto format) { read_fragment<decltype(format)>(warp, registers, form.depth, a.data()); });
    }

    void operator()(WgmmaSums& sums) {
        const int depth = form.depth, columns = form.columns;
        if (!form.a_in_registers) {
            a.resize(kRows * depth);
            with_format(form.a, [&](auto format) {
                read_matrix<decltype(format)>(*cta, MatrixDescriptor(descriptor_a), form.transposes_a, first_row, kRows,
                                              "A", a.data(), depth, 1);
            });
        }
        std::vector<T> b(columns * depth);
        with_format(form.b, [&](auto format) {
            read_matrix<decltype(format)>(*cta, MatrixDescriptor(descriptor_b), form.transposes_b, 0, columns, "B",
                                          b.data(), 1, columns);
        });
        negate(a, form.negates_a != form.negates_b);
        if constexpr (std::is_same_v<T, double>) {
            if (!adds) std::fill(sums.values.begin(), sums.values.end(), 0.0f);
            add_products(a.data(), b.data(), sums.values.data(), kRows, columns, depth, depth, form.sum_format());
        } else {
            if (!adds) std::fill(sums.integers.begin(), sums.integers.end(), 0);
            add_products(a.data(), b.data(), sums.integers.data(), kRows, columns, depth, form.saturates);
        }
    }
};

uint64_t uniform(Warp& warp, Slot slot, const char* what) {
    const uint64_t* values = warp.reg<uint64_t>(slot);
    for (int lane = 1; lane < kWarpSize; ++lane) {
        if (values[lane] == values[0]) continue;
        throw Fault("wgmma", std::string("threads of a warp have different descriptors of matrix ") + what, lane);
    }
    return values[0];
}

// Reports to the race detector what the warp's part of the instruction reads from shared memory.
AsyncId follow_reads(Warp& warp, const Form& form, const WarpgroupLog::Entry& entry) {
    HappensBefore& order = *warp.cta.cluster.order;
    const AsyncId id = order.start(Proxy::kAsync);
    const int each = 16 / width_of(form.a);
    const Lanes by = warp.acting(kAllLanes);
    const auto touch = [&](uint64_t address, int, int) {
        order.touch_shared(id, by, {warp.operation_number(), false}, warp.cta.rank, address, 16);
    };
    if (!form.a_in_registers) {
        const int first_row = warp.thread(0) / kWarpSize % 4 * kRows;
        each_chunk(MatrixDescriptor(entry.descriptors[0]), form.transposes_a, first_row, kRows, each, touch);
    }
    each_chunk(MatrixDescriptor(entry.descriptors[1]), form.transposes_b, 0, form.columns, each, touch);
    return id;
}

template <typename T>
void start(Warp& warp, const Operation& o, const Form& form, const WarpgroupLog::Entry& entry) {
    Product<T> product{
        form,       &warp.cta, warp.thread(0) / kWarpSize % 4 * kRows, entry.descriptors[0], entry.descriptors[1],
        entry.adds, {}};
    const auto& access = warp.cta.launch.program->tracked_accesses[o.tracked];
    if (form.a_in_registers) product.read_a(warp, access.reads);
    WgmmaSums sums{};
    sums.columns = form.columns, sums.depth = form.depth;
    sums.is_half = form.sum == Type::kF16, sums.is_integer = form.is_integer();
    warp.wgmma().issue(o, sums, std::move(product));
    if (warp.cta.cluster.order) warp.wgmma().follow(follow_reads(warp, form, entry));
}

// r: descriptors of A (unless it is in registers) and B, scale-d.
Next multiply(Warp& warp, const Operation& o, uint32_t) {
    const Form form = Form::unpack(o);
    warp.wgmma().check_warpgroup();
    const uint32_t adds = warp.predicate(o.r[2]) ^ (form.negates_scale ? kAllLanes : 0);
    if (adds != 0 && adds != kAllLanes) throw Fault("wgmma", "threads of a warp have different scale-d", 0);
    WarpgroupLog::Entry entry{&o, {0, uniform(warp, o.r[1], "B")}, adds != 0};
    if (!form.a_in_registers) entry.descriptors[0] = uniform(warp, o.r[0], "A");
    const MatrixDescriptor a(entry.descriptors[0]), b(entry.descriptors[1]);  // throw if they are invalid
    if (form.transposes_a) a.require_whole_atoms(4 * kRows, "A");
    if (form.transposes_b) b.require_whole_atoms(form.columns, "B");
    warp.wgmma().log(entry);
    if (form.is_integer()) {
        start<int32_t>(warp, o, form, entry);
    } else {
        start<double>(warp, o, form, entry);
    }
    return Next::kContinue;
}

enum Control : int { kFence, kCommit, kWait };

// option[0]: a Control; value: the most groups that wait_group leaves in flight.
Next control(Warp& warp, const Operation& o, uint32_t mask) {
    WgmmaUnit& unit = warp.wgmma();
    unit.check_warpgroup();
    if (!unit.waits_for_others) unit.log({&o, {0, 0}, false});
    if (o.option[0] == kFence) unit.fence();
    if (o.option[0] == kCommit) unit.commit();
    unit.waits_for_others = o.option[0] == kWait && !unit.wait(static_cast<uint32_t>(o.value));
    if (unit.waits_for_others) return warp.wait_and_retry(Path::State::kWarpgroup, mask);
    // PTX does not say that the wait synchronises lanes, but all lanes execute it together, and kernels rely on it.
    if (o.option[0] == kWait && warp.cta.cluster.order) warp.cta.cluster.order->synchronise(warp.acting(mask));
    return Next::kContinue;
}

bool is_fp8(Type type) {
    return type == Type::kE4M3 || type == Type::kE5M2;
}

bool is_int8(Type type) {
    return type == Type::kS8 || type == Type::kU8;
}

// Accepts the shape .m64nNkK, where the types determine K, and returns N.
int require_columns(Decoder& d, int depth, bool is_integer) {
    for (int n = 8; n <= 256; n += 8) {
        if (is_integer && n > 32 && n % 16 != 0) continue;
        if (d.accept("m64n" + std::to_string(n) + "k" + std::to_string(depth))) return n;
    }
    d.fail("unknown shape for these types");
}

// Reads a constant operand that must be `first` or `second`. Returns true for `second`.
bool is_second(Decoder& d, size_t& next, int64_t first, int64_t second) {
    const int64_t value = d.immediate(next++);
    if (value != first && value != second) d.fail("a constant of an unknown value");
    return value == second;
}

void decode_multiply(Decoder& d) {
    Operation& o = d.operation();
    Form form{};
    form.sum = d.require_type({Type::kF16, Type::kF32, Type::kS32});
    form.a = d.require_type(), form.b = d.require_type();
    const bool is_16_bit = form.a == Type::kF16 || form.a == Type::kBF16;
    const bool known = form.is_integer()  ? is_int8(form.a) && is_int8(form.b)
                       : is_fp8(form.a)   ? is_fp8(form.b)
                       : form.a != form.b ? false
                       : form.a == Type::kF16
                           ? true
                           : (form.a == Type::kBF16 || form.a == Type::kTF32) && form.sum == Type::kF32;
    if (!known) d.fail("unknown for these types");
    form.depth = 32 / width_of(form.a);
    form.columns = require_columns(d, form.depth, form.is_integer());
    form.saturates = form.is_integer() && d.accept("satfinite");
    form.a_in_registers = d.operand(1).kind == ptx::Operand::Kind::kVector;
    const size_t transposes = !is_16_bit ? 0 : form.a_in_registers ? 1 : 2;
    const size_t expected = 4 + (form.is_integer() ? 0 : 2) + transposes;
    d.require_operands(expected, expected);

    const Type sum = form.sum == Type::kF16 ? Type::kB32 : form.sum;
    const auto sums = d.elements(0);
    if (static_cast<int>(sums.size()) != form.columns / (form.sum == Type::kF16 ? 4 : 2)) {
        d.fail("an accumulator with this number of registers is unknown");
    }
    for (const ptx::Operand* element : sums) d.write(*element, sum);  // recorded in tracked_accesses, not in `r`
    if (form.a_in_registers) {
        const auto elements = d.elements(1);
        if (elements.size() != 4) d.fail("a fragment with this number of registers is unknown");
        for (const ptx::Operand* element : elements) d.read(*element, Type::kB32);
    } else {
        o.r[0] = d.read(1, Type::kB64);
    }
    o.r[1] = d.read(2, Type::kB64);
    o.r[2] = d.read_predicate(d.operand(3), form.negates_scale);
    size_t next = 4;
    if (!form.is_integer()) {
        form.negates_a = is_second(d, next, 1, -1);
        form.negates_b = is_second(d, next, 1, -1);
    }
    if (transposes == 2) form.transposes_a = is_second(d, next, 0, 1);
    if (transposes != 0) form.transposes_b = is_second(d, next, 0, 1);
    form.pack(o);
    o.type = Class::kTensorCore;
    o.execute = multiply;
}

}  // namespace

void decode_wgmma(Decoder& d) {
    Operation& o = d.operation();
    o.is_aligned = true;
    d.require_target(90);
    const int kind = d.require_any({"mma_async", "fence", "commit_group", "wait_group"});
    d.require_any({"sync"});
    d.require_any({"aligned"});
    if (kind == 0) return decode_multiply(d);
    o.type = Class::kAsync;
    o.option[0] = kind - 1;
    o.execute = control;
    d.require_operands(o.option[0] == kWait ? 1 : 0, o.option[0] == kWait ? 1 : 0);
    if (o.option[0] == kWait) o.value = d.immediate(0);
}

}  // namespace emulator
