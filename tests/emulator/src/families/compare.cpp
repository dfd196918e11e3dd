// setp, set, selp. PTX ISA, "Comparison and Selection Instructions".
#include <cmath>
#include <type_traits>

#include "../decoder.h"
#include "elementwise.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

enum Compare : int { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };

template <int kCompare, typename T>
bool compare(T a, T b) {
    const bool unordered = a != a || b != b;
    switch (kCompare) {
        case kEq:
            return a == b;
        case kNe:
            return a != b && !unordered;
        case kLt:
            return a < b;
        case kLe:
            return a <= b;
        case kGt:
            return a > b;
        case kGe:
            return a >= b;
        case kEqu:
            return a == b || unordered;
        case kNeu:
            return a != b;
        case kLtu:
            return !(a >= b);
        case kLeu:
            return !(a > b);
        case kGtu:
            return !(a <= b);
        case kGeu:
            return !(a < b);
        case kNum:
            return !unordered;
        default:
            return unordered;
    }
}

struct FlushedSingle {  // an fp32 register whose subnormals count as 0
    float bits;
    operator float() const { return flush(bits); }
};
struct FlushedHalf {
    uint16_t bits;
    operator float() const { return (bits & 0x7fff) < 0x0400 ? std::copysign(0.0f, from_half(bits)) : from_half(bits); }
};
struct HalfRegister {
    uint16_t bits;
    operator float() const { return from_half(bits); }
};
struct BfloatRegister {
    uint16_t bits;
    operator float() const { return from_bfloat(bits); }
};

template <typename T, int kCompare>
uint32_t compare_lanes(Warp& warp, Slot a_slot, Slot b_slot, uint32_t mask) {
    const T *a = warp.reg<T>(a_slot), *b = warp.reg<T>(b_slot);
    uint32_t result = 0;
    using V = std::conditional_t<std::is_arithmetic_v<T>, T, float>;
    each_lane(mask, [&](int lane) { result |= uint32_t{compare<kCompare, V>(a[lane], b[lane])} << lane; });
    return result;
}

using CompareLanes = uint32_t (*)(Warp&, Slot, Slot, uint32_t);

template <typename T>
CompareLanes pick_compare(int which) {
    constexpr CompareLanes kTable[] = {compare_lanes<T, kEq>,  compare_lanes<T, kNe>,  compare_lanes<T, kLt>,
                                       compare_lanes<T, kLe>,  compare_lanes<T, kGt>,  compare_lanes<T, kGe>,
                                       compare_lanes<T, kEqu>, compare_lanes<T, kNeu>, compare_lanes<T, kLtu>,
                                       compare_lanes<T, kLeu>, compare_lanes<T, kGtu>, compare_lanes<T, kGeu>,
                                       compare_lanes<T, kNum>, compare_lanes<T, kNan>};
    return kTable[which];
}

// p = (a compare b) op c; q = !(a compare b) op c. op is in option[0]: -1 none, 0 and, 1 or, 2 xor.
uint32_t combine(uint32_t bits, uint32_t c, int op) {
    return op == 0 ? bits & c : op == 1 ? bits | c : op == 2 ? bits ^ c : bits;
}

uint32_t evaluate(Warp& warp, const Operation& o, uint32_t mask, uint32_t& inverse) {
    const auto compare_all = reinterpret_cast<CompareLanes>(o.value);
    const uint32_t bits = compare_all(warp, o.r[2], o.r[3], mask);
    const uint32_t c = o.option[0] < 0 ? 0 : warp.predicate(o.r[4]) ^ static_cast<uint32_t>(o.option[1]);
    inverse = combine(~bits, c, o.option[0]);
    return combine(bits, c, o.option[0]);
}

Next setp(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t inverse;
    const uint32_t bits = evaluate(warp, o, mask, inverse);
    warp.set_predicate(o.r[0], mask, bits);
    warp.set_predicate(o.r[1], mask, inverse);
    return Next::kContinue;
}

// Compares the lower halves into `low` and the upper halves into `high`, one bit per lane. T converts a half to float.
template <typename T>
void compare_halves(Warp& warp, const Operation& o, uint32_t mask, uint32_t& low, uint32_t& high) {
    const uint32_t *a = warp.reg<uint32_t>(o.r[2]), *b = warp.reg<uint32_t>(o.r[3]);
    using CompareOne = bool (*)(float, float);
    const auto compare_one = reinterpret_cast<CompareOne>(o.value);
    const auto at = [](uint32_t bits) -> float { return T{static_cast<uint16_t>(bits)}; };
    low = high = 0;
    each_lane(mask, [&](int lane) {
        low |= uint32_t{compare_one(at(a[lane]), at(b[lane]))} << lane;
        high |= uint32_t{compare_one(at(a[lane] >> 16), at(b[lane] >> 16))} << lane;
    });
    const uint32_t c = o.option[0] < 0 ? 0 : warp.predicate(o.r[4]) ^ static_cast<uint32_t>(o.option[1]);
    low = combine(low, c, o.option[0]), high = combine(high, c, o.option[0]);
}

// Sets p for the lower half and q for the upper half.
template <typename T>
Next setp_pair(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t low, high;
    compare_halves<T>(warp, o, mask, low, high);
    warp.set_predicate(o.r[0], mask, low);
    warp.set_predicate(o.r[1], mask, high);
    return Next::kContinue;
}

template <typename T>
Next set_pair(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t low, high;
    compare_halves<T>(warp, o, mask, low, high);
    uint32_t* d = warp.reg<uint32_t>(o.r[0]);
    const auto yes = static_cast<uint32_t>(o.option[2]);
    each_lane(mask, [&](int lane) { d[lane] = (low >> lane & 1) * yes | (high >> lane & 1) * yes << 16; });
    return Next::kContinue;
}

template <typename T>
Next set(Warp& warp, const Operation& o, uint32_t mask) {
    uint32_t inverse;
    const uint32_t bits = evaluate(warp, o, mask, inverse);
    T* d = warp.reg<T>(o.r[0]);
    const T yes = static_cast<T>(o.option[2]);
    each_lane(mask, [&](int lane) { d[lane] = (bits >> lane & 1) != 0 ? yes : T{0}; });
    return Next::kContinue;
}

template <typename T>
Next selp(Warp& warp, const Operation& o, uint32_t mask) {
    T* d = warp.reg<T>(o.r[0]);
    const T *a = warp.reg<T>(o.r[1]), *b = warp.reg<T>(o.r[2]);
    const uint32_t p = warp.predicate(o.r[3]) ^ static_cast<uint32_t>(o.option[0]);
    each_lane(mask, [&](int lane) { d[lane] = (p >> lane & 1) != 0 ? a[lane] : b[lane]; });
    return Next::kContinue;
}

int accept_compare(Decoder& d) {
    const int found = d.require_any({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu",
                                     "num", "nan", "lo", "ls", "hi", "hs"});
    constexpr int kUnsigned[] = {kLt, kLe, kGt, kGe};
    return found > kNan ? kUnsigned[found - kNan - 1] : found;
}

// Decodes a comparison of scalars and its two operands.
void decode_comparison(Decoder& d, int which, Type type, bool flushes) {
    Operation& o = d.operation();
    o.type = Class::kCompare;
    if (!is_float(type) && which > kGe) d.fail("a comparison of floating-point numbers");
    if (is_bits(type) && which > kNe) d.fail("unknown for this type");
    if (flushes && type != Type::kF32 && type != Type::kF16) d.fail("unknown modifier .ftz");
    o.r[2] = d.read(1, type), o.r[3] = d.read(2, type);
    CompareLanes found = nullptr;
    switch (type) {
        case Type::kB16:
        case Type::kU16:
            found = pick_compare<uint16_t>(which);
            break;
        case Type::kS16:
            found = pick_compare<int16_t>(which);
            break;
        case Type::kB32:
        case Type::kU32:
            found = pick_compare<uint32_t>(which);
            break;
        case Type::kS32:
            found = pick_compare<int32_t>(which);
            break;
        case Type::kB64:
        case Type::kU64:
            found = pick_compare<uint64_t>(which);
            break;
        case Type::kS64:
            found = pick_compare<int64_t>(which);
            break;
        case Type::kF16:
            found = flushes ? pick_compare<FlushedHalf>(which) : pick_compare<HalfRegister>(which);
            break;
        case Type::kBF16:
            found = pick_compare<BfloatRegister>(which);
            break;
        case Type::kF32:
            found = flushes ? pick_compare<FlushedSingle>(which) : pick_compare<float>(which);
            break;
        case Type::kF64:
            found = pick_compare<double>(which);
            break;
        default:
            d.fail("unknown for this type");
    }
    o.value = reinterpret_cast<int64_t>(found);
}

void decode_combination(Decoder& d, int op) {
    Operation& o = d.operation();
    o.option[0] = op;
    d.require_operands(op < 0 ? 3 : 4, op < 0 ? 3 : 4);
    if (op < 0) return;
    bool negated = false;
    o.r[4] = d.read_predicate(d.operand(3), negated);
    o.option[1] = negated ? -1 : 0;
}

struct SetpPair {
    template <typename T>
    static constexpr Execute kExecute = setp_pair<T>;
};
struct SetPair {
    template <typename T>
    static constexpr Execute kExecute = set_pair<T>;
};

template <typename Shape>
Execute decode_pair_comparison(Decoder& d, int which, Type type, bool flushes) {
    constexpr bool (*kTable[])(float, float) = {
        compare<kEq, float>,  compare<kNe, float>,  compare<kLt, float>,  compare<kLe, float>,  compare<kGt, float>,
        compare<kGe, float>,  compare<kEqu, float>, compare<kNeu, float>, compare<kLtu, float>, compare<kLeu, float>,
        compare<kGtu, float>, compare<kGeu, float>, compare<kNum, float>, compare<kNan, float>};
    const bool is_fp16 = type == Type::kF16x2;
    if (flushes && !is_fp16) d.fail("unknown modifier .ftz");
    Operation& o = d.operation();
    o.type = Class::kCompare;
    o.r[2] = d.read(1, type), o.r[3] = d.read(2, type);
    o.value = reinterpret_cast<int64_t>(kTable[which]);
    return flushes   ? Shape::template kExecute<FlushedHalf>
           : is_fp16 ? Shape::template kExecute<HalfRegister>
                     : Shape::template kExecute<BfloatRegister>;
}

// Returns what `set` yields for true (in each half of a pair): all ones for integers, 1.0 for floating-point types.
int yes_of(Type result, bool is_pair) {
    switch (result) {
        case Type::kF32:
            return 0x3f800000;
        case Type::kF16:
        case Type::kF16x2:
            return 0x3c00;
        case Type::kBF16:
        case Type::kBF16x2:
            return 0x3f80;
        default:
            return is_pair ? 0xffff : -1;
    }
}

}  // namespace

void decode_setp(Decoder& d) {
    const int which = accept_compare(d), op = d.accept_any({"and", "or", "xor"});
    const bool flushes = d.accept("ftz");
    const Type type = d.require_type();
    decode_combination(d, op);
    Operation& o = d.operation();
    const ptx::Operand& results = d.operand(0);
    const bool is_pair = results.kind == ptx::Operand::Kind::kPair;
    o.r[0] = d.write_predicate(is_pair ? results.elements[0] : results);
    o.r[1] = is_pair ? d.write_predicate(results.elements[1]) : d.scratch(0);
    if (is_packed(type)) {
        o.execute = decode_pair_comparison<SetpPair>(d, which, type, flushes);
        return;
    }
    decode_comparison(d, which, type, flushes);
    o.execute = setp;
}

void decode_set(Decoder& d) {
    const int which = accept_compare(d), op = d.accept_any({"and", "or", "xor"});
    const bool flushes = d.accept("ftz");
    const Type result = d.require_type({Type::kU32, Type::kS32, Type::kF32, Type::kU16, Type::kS16, Type::kF16,
                                        Type::kBF16, Type::kF16x2, Type::kBF16x2});
    const Type type = d.require_type();
    decode_combination(d, op);
    Operation& o = d.operation();
    o.r[0] = d.write(0, result);
    o.option[2] = yes_of(result, is_packed(type));
    if (is_packed(type)) {
        if (result != type && result != Type::kU32 && result != Type::kS32) d.fail("unknown for these types");
        o.execute = decode_pair_comparison<SetPair>(d, which, type, flushes);
        return;
    }
    const bool of_half = type == Type::kF16 || type == Type::kBF16;
    if (is_packed(result) || (width_of(result) == 2 && is_integer(result) && !of_half)) {
        d.fail("unknown for these types");
    }
    decode_comparison(d, which, type, flushes);
    o.execute = width_of(result) == 2 ? set<uint16_t> : set<uint32_t>;
}

void decode_selp(Decoder& d) {
    const Type type = d.require_type();
    d.require_operands(4, 4);
    Operation& o = d.operation();
    o.type = Class::kCompare;
    if (type == Type::kPred || width_of(type) < 2 || width_of(type) > 8) d.fail("unknown for this type");
    o.r[0] = d.write(0, type), o.r[1] = d.read(1, type), o.r[2] = d.read(2, type);
    bool negated = false;
    o.r[3] = d.read_predicate(d.operand(3), negated);
    o.option[0] = negated ? -1 : 0;
    const int width = width_of(type);
    o.execute = width == 2 ? selp<uint16_t> : width == 4 ? selp<uint32_t> : selp<uint64_t>;
}

}  // namespace emulator
