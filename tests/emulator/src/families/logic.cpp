// Logic, shifts and bit fields. PTX ISA, "Logic and Shift Instructions" and "Integer Arithmetic Instructions".
#include "../decoder.h"
#include "elementwise.h"
#include "families.h"

namespace emulator {
namespace {

struct And {
    template <typename T>
    static T apply(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <typename T>
    static T apply(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <typename T>
    static T apply(T a, T b) {
        return a ^ b;
    }
};
struct Not {
    template <typename T>
    static T apply(T a) {
        return static_cast<T>(~a);
    }
};
template <typename F>
Next predicate_binary(Warp& warp, const Operation& operation, uint32_t mask) {
    const uint32_t a = warp.predicate(operation.r[1]) ^ static_cast<uint32_t>(operation.option[0]);
    const uint32_t b = warp.predicate(operation.r[2]) ^ static_cast<uint32_t>(operation.option[1]);
    warp.set_predicate(operation.r[0], mask, F::apply(a, b));
    return Next::kContinue;
}

template <typename T, bool kLeft>
Next shift(Warp& warp, const Operation& operation, uint32_t mask) {
    T* d = warp.reg<T>(operation.r[0]);
    const T* a = warp.reg<T>(operation.r[1]);
    const uint32_t* amount = warp.reg<uint32_t>(operation.r[2]);
    constexpr uint32_t kBits = 8 * sizeof(T);
    each_lane(mask, [&](int lane) {
        const uint32_t by = amount[lane];
        if (kLeft) {
            d[lane] = by >= kBits ? T{0} : static_cast<T>(static_cast<uint64_t>(a[lane]) << by);
        } else {
            const T most = std::is_signed_v<T> ? static_cast<T>(a[lane] >> (kBits - 1)) : T{0};
            d[lane] = by >= kBits ? most : static_cast<T>(a[lane] >> by);
        }
    });
    return Next::kContinue;
}

template <bool kLeft, bool kWraps>
Next funnel_shift(Warp& warp, const Operation& operation, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(operation.r[0]);
    const uint32_t *low = warp.reg<uint32_t>(operation.r[1]), *high = warp.reg<uint32_t>(operation.r[2]);
    const uint32_t* amount = warp.reg<uint32_t>(operation.r[3]);
    each_lane(mask, [&](int lane) {
        const uint64_t both = uint64_t{high[lane]} << 32 | low[lane];
        const uint32_t by = kWraps ? amount[lane] & 31 : std::min(amount[lane], 32u);
        d[lane] = static_cast<uint32_t>(kLeft ? both >> (32 - by) : both >> by);
    });
    return Next::kContinue;
}

Next lop3(Warp& warp, const Operation& operation, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(operation.r[0]);
    const uint32_t *a = warp.reg<uint32_t>(operation.r[1]), *b = warp.reg<uint32_t>(operation.r[2]);
    const uint32_t* c = warp.reg<uint32_t>(operation.r[3]);
    const auto table = static_cast<uint32_t>(operation.value);
    each_lane(mask, [&](int lane) {
        uint32_t result = 0;
        for (uint32_t row = 0; row < 8; ++row) {
            if ((table >> row & 1) == 0) continue;
            result |= ((row & 4) != 0 ? a[lane] : ~a[lane]) & ((row & 2) != 0 ? b[lane] : ~b[lane]) &
                      ((row & 1) != 0 ? c[lane] : ~c[lane]);
        }
        d[lane] = result;
    });
    return Next::kContinue;
}

// p = (d != 0) op q. r[4]: p, r[5]: q; option[0]: 1 for or, 0 for and; option[1]: mask to xor with q.
Next lop3_predicate(Warp& warp, const Operation& operation, uint32_t mask) {
    lop3(warp, operation, mask);
    const uint32_t* d = warp.reg<uint32_t>(operation.r[0]);
    uint32_t bits = 0;
    each_lane(mask, [&](int lane) { bits |= uint32_t{d[lane] != 0} << lane; });
    const uint32_t q = warp.predicate(operation.r[5]) ^ static_cast<uint32_t>(operation.option[1]);
    warp.set_predicate(operation.r[4], mask, operation.option[0] != 0 ? bits | q : bits & q);
    return Next::kContinue;
}

// The selectors of modes f4e, b4e, rc8, ecl, ecr and rc16, by the lower two bits of c.
constexpr uint16_t kPermutations[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                          {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                          {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};

// Each byte of the result is one of the eight bytes of b:a, or eight copies of that byte's sign bit.
Next prmt(Warp& warp, const Operation& operation, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(operation.r[0]);
    const uint32_t *a = warp.reg<uint32_t>(operation.r[1]), *b = warp.reg<uint32_t>(operation.r[2]);
    const uint32_t* c = warp.reg<uint32_t>(operation.r[3]);
    each_lane(mask, [&](int lane) {
        const uint64_t bytes = uint64_t{b[lane]} << 32 | a[lane];
        const uint32_t selectors =
            operation.option[0] == 0 ? c[lane] : kPermutations[operation.option[0] - 1][c[lane] & 3];
        uint32_t result = 0;
        for (int i = 0; i < 4; ++i) {
            const uint32_t select = selectors >> (4 * i) & 15;
            uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (select & 7))) & 0xff;
            if ((select & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
            result |= byte << (8 * i);
        }
        d[lane] = result;
    });
    return Next::kContinue;
}

template <typename T>
Next bit_field_extract(Warp& warp, const Operation& operation, uint32_t mask) {
    using U = std::make_unsigned_t<T>;
    T* d = warp.reg<T>(operation.r[0]);
    const T* a = warp.reg<T>(operation.r[1]);
    const uint32_t *position = warp.reg<uint32_t>(operation.r[2]), *length = warp.reg<uint32_t>(operation.r[3]);
    constexpr uint32_t kBits = 8 * sizeof(T);
    each_lane(mask, [&](int lane) {
        const uint32_t at = position[lane] & 0xff, count = length[lane] & 0xff;
        U result = 0;
        if (count != 0) {
            const bool sign = std::is_signed_v<T> && (a[lane] >> std::min(at + count - 1, kBits - 1) & 1) != 0;
            const U bits = at < kBits ? static_cast<U>(a[lane]) >> at : U{0};
            const uint32_t valid = std::min(count, at < kBits ? kBits - at : 0u);
            const U below = valid >= kBits ? ~U{0} : (U{1} << valid) - 1;
            result = (bits & below) | (sign ? ~below : U{0});
        }
        d[lane] = static_cast<T>(result);
    });
    return Next::kContinue;
}

template <typename T>
Next bit_field_insert(Warp& warp, const Operation& operation, uint32_t mask) {
    T* d = warp.reg<T>(operation.r[0]);
    const T *a = warp.reg<T>(operation.r[1]), *b = warp.reg<T>(operation.r[2]);
    const uint32_t *position = warp.reg<uint32_t>(operation.r[3]), *length = warp.reg<uint32_t>(operation.r[4]);
    constexpr uint32_t kBits = 8 * sizeof(T);
    each_lane(mask, [&](int lane) {
        const uint32_t at = position[lane] & 0xff, count = length[lane] & 0xff;
        const T below = count >= kBits ? ~T{0} : (T{1} << count) - 1;
        const T field = at >= kBits ? T{0} : below << at;
        d[lane] = (b[lane] & ~field) | (at >= kBits ? T{0} : (a[lane] << at) & field);
    });
    return Next::kContinue;
}

enum class Count { kOnes, kLeadingZeros, kHighest };

template <typename T, Count kCount>
Next count_bits(Warp& warp, const Operation& operation, uint32_t mask) {
    uint32_t* d = warp.reg<uint32_t>(operation.r[0]);
    const T* a = warp.reg<T>(operation.r[1]);
    constexpr int kBits = 8 * sizeof(T);
    each_lane(mask, [&](int lane) {
        T x = a[lane];
        if (kCount == Count::kHighest && std::is_signed_v<T> && x < 0) x = static_cast<T>(~x);
        const uint64_t bits = static_cast<std::make_unsigned_t<T>>(x);
        const uint32_t zeros = bits == 0 ? kBits : __builtin_clzll(bits) - (64 - kBits);
        if (kCount == Count::kOnes) d[lane] = __builtin_popcountll(bits);
        if (kCount == Count::kLeadingZeros) d[lane] = zeros;
        if (kCount == Count::kHighest) {
            const uint32_t highest = bits == 0 ? ~0u : kBits - 1 - zeros;
            d[lane] = operation.option[0] != 0 && bits != 0 ? kBits - 1 - highest : highest;
        }
    });
    return Next::kContinue;
}

struct Reverse {
    template <typename T>
    static T apply(T a) {
        T result = 0;
        for (size_t i = 0; i < 8 * sizeof(T); ++i) result |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
        return result;
    }
};

}  // namespace

void decode_logic(Decoder& d) {
    const std::string_view root = d.root();
    const bool is_not = root == "not";
    const Type type = d.require_type({Type::kPred, Type::kB16, Type::kB32, Type::kB64});
    d.require_operands(is_not ? 2 : 3, is_not ? 2 : 3);
    Operation& o = d.operation();
    o.type = Class::kLogic;
    if (type == Type::kPred) {
        o.r[0] = d.write_predicate(d.operand(0));
        bool negated = false;
        o.r[1] = d.read_predicate(d.operand(1), negated);
        o.option[0] = (negated != is_not) ? -1 : 0;
        o.r[2] = o.r[1], o.option[1] = o.option[0];
        if (!is_not) {
            o.r[2] = d.read_predicate(d.operand(2), negated);
            o.option[1] = negated ? -1 : 0;
        }
        o.execute = root == "or" ? predicate_binary<Or> : root == "xor" ? predicate_binary<Xor> : predicate_binary<And>;
        return;
    }
    o.r[0] = d.write(0, type);
    o.r[1] = d.read(1, type);
    if (!is_not) o.r[2] = d.read(2, type);
    const auto pick = [&](auto element) -> Execute {
        using T = decltype(element);
        if (is_not) return unary<T, Not>;
        return root == "and" ? binary<T, And> : root == "or" ? binary<T, Or> : binary<T, Xor>;
    };
    o.execute = type == Type::kB16 ? pick(uint16_t{}) : type == Type::kB32 ? pick(uint32_t{}) : pick(uint64_t{});
}

void decode_shift(Decoder& d) {
    const Type type = d.require_type();
    const bool is_left = d.root() == "shl";
    if (is_left ? !is_bits(type) || type == Type::kB8 : is_float(type) || width_of(type) < 2)
        d.fail("unknown for this type");
    d.require_operands(3, 3);
    Operation& o = d.operation();
    o.type = Class::kLogic;
    o.r[0] = d.write(0, type), o.r[1] = d.read(1, type), o.r[2] = d.read(2, Type::kU32);
    switch (type) {
        case Type::kS16:
            o.execute = shift<int16_t, false>;
            break;
        case Type::kS32:
            o.execute = shift<int32_t, false>;
            break;
        case Type::kS64:
            o.execute = shift<int64_t, false>;
            break;
        default:
            o.execute = width_of(type) == 2   ? (is_left ? shift<uint16_t, true> : shift<uint16_t, false>)
                        : width_of(type) == 4 ? (is_left ? shift<uint32_t, true> : shift<uint32_t, false>)
                                              : (is_left ? shift<uint64_t, true> : shift<uint64_t, false>);
    }
}

void decode_funnel_shift(Decoder& d) {
    const bool is_left = d.require_any({"l", "r"}) == 0, wraps = d.require_any({"wrap", "clamp"}) == 0;
    const Type type = d.require_type({Type::kB32});
    d.require_operands(4, 4);
    Operation& o = d.operation();
    o.type = Class::kLogic;
    o.r[0] = d.write(0, type);
    for (int i = 1; i < 4; ++i) o.r[i] = d.read(i, type);
    o.execute = is_left ? (wraps ? funnel_shift<true, true> : funnel_shift<true, false>)
                        : (wraps ? funnel_shift<false, true> : funnel_shift<false, false>);
}

void decode_lop3(Decoder& d) {
    const int op = d.accept_any({"and", "or"});
    const Type type = d.require_type({Type::kB32});
    d.require_operands(op < 0 ? 5 : 6, op < 0 ? 5 : 6);
    Operation& o = d.operation();
    o.type = Class::kLogic;
    const ptx::Operand& results = d.operand(0);
    if (op >= 0 && results.kind != ptx::Operand::Kind::kPair) d.fail("a predicate as second result is missing");
    o.r[0] = d.write(op < 0 ? results : results.elements[0], type);
    for (int i = 1; i < 4; ++i) o.r[i] = d.read(i, type);
    o.value = d.immediate(4);
    o.execute = lop3;
    if (op < 0) return;
    bool negated = false;
    o.r[4] = d.write_predicate(results.elements[1]), o.r[5] = d.read_predicate(d.operand(5), negated);
    o.option[0] = op, o.option[1] = negated ? -1 : 0;
    o.execute = lop3_predicate;
}

void decode_prmt(Decoder& d) {
    const int mode = d.accept_any({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
    const Type type = d.require_type({Type::kB32});
    d.require_operands(4, 4);
    Operation& o = d.operation();
    o.option[0] = mode + 1;
    o.type = Class::kLogic;
    o.r[0] = d.write(0, type);
    for (int i = 1; i < 4; ++i) o.r[i] = d.read(i, type);
    o.execute = prmt;
}

void decode_bit_field(Decoder& d) {
    Operation& o = d.operation();
    o.type = Class::kLogic;
    if (d.root() == "bfe") {
        const Type type = d.require_type({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
        d.require_operands(4, 4);
        o.r[0] = d.write(0, type), o.r[1] = d.read(1, type);
        o.r[2] = d.read(2, Type::kU32), o.r[3] = d.read(3, Type::kU32);
        o.execute = type == Type::kU32   ? bit_field_extract<uint32_t>
                    : type == Type::kS32 ? bit_field_extract<int32_t>
                    : type == Type::kU64 ? bit_field_extract<uint64_t>
                                         : bit_field_extract<int64_t>;
    } else {
        const Type type = d.require_type({Type::kB32, Type::kB64});
        d.require_operands(5, 5);
        o.r[0] = d.write(0, type), o.r[1] = d.read(1, type), o.r[2] = d.read(2, type);
        o.r[3] = d.read(3, Type::kU32), o.r[4] = d.read(4, Type::kU32);
        o.execute = type == Type::kB32 ? bit_field_insert<uint32_t> : bit_field_insert<uint64_t>;
    }
}

void decode_count_bits(Decoder& d) {
    Operation& o = d.operation();
    o.type = Class::kLogic;
    d.require_operands(2, 2);
    const std::string_view root = d.root();
    if (root == "bfind") {
        o.option[0] = d.accept("shiftamt");
        const Type type = d.require_type({Type::kU32, Type::kS32, Type::kU64, Type::kS64});
        o.r[0] = d.write(0, Type::kU32), o.r[1] = d.read(1, type);
        o.execute = type == Type::kU32   ? count_bits<uint32_t, Count::kHighest>
                    : type == Type::kS32 ? count_bits<int32_t, Count::kHighest>
                    : type == Type::kU64 ? count_bits<uint64_t, Count::kHighest>
                                         : count_bits<int64_t, Count::kHighest>;
        return;
    }
    const Type type = d.require_type({Type::kB32, Type::kB64});
    const bool is_narrow = type == Type::kB32;
    o.r[0] = d.write(0, root == "brev" ? type : Type::kU32), o.r[1] = d.read(1, type);
    if (root == "brev") o.execute = is_narrow ? unary<uint32_t, Reverse> : unary<uint64_t, Reverse>;
    if (root == "popc") o.execute = is_narrow ? count_bits<uint32_t, Count::kOnes> : count_bits<uint64_t, Count::kOnes>;
    if (root == "clz") {
        o.execute = is_narrow ? count_bits<uint32_t, Count::kLeadingZeros> : count_bits<uint64_t, Count::kLeadingZeros>;
    }
}

}  // namespace emulator
