// atom, red. PTX ISA, "Parallel Synchronization and Communication Instructions". CTAs run on several threads of the
// host, so these are atomic there too.
#include <cmath>

#include "addresses.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

enum Op : int { kAnd, kOr, kXor, kExch, kAdd, kInc, kDec, kMin, kMax, kCas };

template <typename T>
T update_integer(int op, T old, T b, T c) {
    using U = std::make_unsigned_t<T>;
    switch (op) {
        case kAnd:
            return old & b;
        case kOr:
            return old | b;
        case kXor:
            return old ^ b;
        case kExch:
            return b;
        case kAdd:
            return static_cast<T>(static_cast<U>(old) + static_cast<U>(b));
        case kInc:
            return old >= b ? T{0} : static_cast<T>(old + 1);
        case kDec:
            return old == 0 || old > b ? b : static_cast<T>(old - 1);
        case kMin:
            return std::min(old, b);
        case kMax:
            return std::max(old, b);
        default:
            return old == b ? c : old;
    }
}

template <typename T>
struct Integer {
    using Bits = std::make_unsigned_t<T>;
    static Bits apply(int op, Bits old, Bits b, Bits c) {
        return static_cast<Bits>(update_integer<T>(op, static_cast<T>(old), static_cast<T>(b), static_cast<T>(c)));
    }
};

struct Single {
    using Bits = uint32_t;
    static Bits apply(int, Bits old, Bits b, Bits) {
        return bit_cast<uint32_t>(canonical(bit_cast<float>(old) + bit_cast<float>(b)));
    }
};

struct Double {
    using Bits = uint64_t;
    static Bits apply(int, Bits old, Bits b, Bits) {
        return bit_cast<uint64_t>(bit_cast<double>(old) + bit_cast<double>(b));
    }
};

template <bool kIsFp16>
uint16_t update_half(int op, uint16_t old, uint16_t b) {
    const float x = kIsFp16 ? from_half(old) : from_bfloat(old), y = kIsFp16 ? from_half(b) : from_bfloat(b);
    float result = x + y;
    if (op == kMin) result = std::fmin(x, y);
    if (op == kMax) result = std::fmax(x, y);
    return kIsFp16 ? to_half(result) : to_bfloat(result);
}

template <bool kIsFp16>
struct Half {
    using Bits = uint16_t;
    static Bits apply(int op, Bits old, Bits b, Bits) { return update_half<kIsFp16>(op, old, b); }
};

template <bool kIsFp16>
struct HalfPair {
    using Bits = uint32_t;
    static Bits apply(int op, Bits old, Bits b, Bits) {
        const uint16_t low = update_half<kIsFp16>(op, static_cast<uint16_t>(old), static_cast<uint16_t>(b));
        const uint16_t high =
            update_half<kIsFp16>(op, static_cast<uint16_t>(old >> 16), static_cast<uint16_t>(b >> 16));
        return low | uint32_t{high} << 16;
    }
};

// r: result, address, b, c. Lanes follow each other; their order is not defined by PTX.
template <typename F>
Next atomic(Warp& warp, const Operation& o, uint32_t mask) {
    using Bits = typename F::Bits;
    const auto space = static_cast<Space>(o.option[0]);
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[1], mask, addresses);
    const Bits *b = warp.reg<Bits>(o.r[2]), *c = warp.reg<Bits>(o.r[3]);
    Bits* d = warp.reg<Bits>(o.r[0]);
    const uint32_t rotation = warp.cta.random.below(kWarpSize);
    for (uint32_t i = 0; i < kWarpSize; ++i) {
        const int lane = static_cast<int>((i + rotation) % kWarpSize);
        if ((mask >> lane & 1) == 0) continue;
        warp.access(space, addresses[lane], sizeof(Bits), lane, false);
        auto* at = reinterpret_cast<Bits*>(warp.access(space, addresses[lane], sizeof(Bits), lane, true));
        Bits old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
        while (!__atomic_compare_exchange_n(at, &old, F::apply(o.option[1], old, b[lane], c[lane]), false,
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
        d[lane] = old;
    }
    warp.count_memory(o, space, addresses, sizeof(Bits), mask);
    return Next::kContinue;
}

}  // namespace

void decode_atom(Decoder& d) {
    Operation& o = d.operation();
    const bool returns = d.root() == "atom";
    accept_order_and_scope(d);
    Space space = d.accept_space();
    const bool has_policy = d.accept("L2::cache_hint"), without_flush = d.accept("noftz");
    const int op = d.require_any({"and", "or", "xor", "exch", "add", "inc", "dec", "min", "max", "cas"});
    const Type type = d.require_type();
    if (without_flush != (width_of(type) == 2 || is_packed(type)) && is_float(type)) d.fail("unknown for this type");
    const size_t sources = op == kCas ? 2 : 1, first = returns ? 1 : 0;
    d.require_operands(first + 1 + sources + has_policy, first + 1 + sources + has_policy);
    if (!returns && (op == kCas || op == kExch)) d.fail("unknown operation");
    const Type bits = bits_of_width(width_of(type));
    o.r[0] = returns ? d.write(0, bits) : d.scratch(width_of(type));
    set_address(o, o.r[1], d.address(first, space));
    o.r[2] = d.read(first + 1, is_float(type) ? type : bits);
    o.r[3] = op == kCas ? d.read(first + 2, bits) : o.r[2];
    o.type = Class::kAtomic;
    o.option[0] = static_cast<int>(space), o.option[1] = op;
    const bool is_logic = op <= kExch || op == kCas, is_order = op == kMin || op == kMax;
    switch (type) {
        case Type::kB16:
            if (op == kCas) o.execute = atomic<Integer<uint16_t>>;
            break;
        case Type::kB32:
            if (is_logic) o.execute = atomic<Integer<uint32_t>>;
            break;
        case Type::kB64:
            if (is_logic) o.execute = atomic<Integer<uint64_t>>;
            break;
        case Type::kU32:
            if (!is_logic) o.execute = atomic<Integer<uint32_t>>;
            break;
        case Type::kS32:
            if (op == kAdd || is_order) o.execute = atomic<Integer<int32_t>>;
            break;
        case Type::kU64:
            if (op == kAdd || is_order) o.execute = atomic<Integer<uint64_t>>;
            break;
        case Type::kS64:
            if (is_order) o.execute = atomic<Integer<int64_t>>;
            break;
        case Type::kF32:
            if (op == kAdd) o.execute = atomic<Single>;
            break;
        case Type::kF64:
            if (op == kAdd) o.execute = atomic<Double>;
            break;
        case Type::kF16:
            if (op == kAdd) o.execute = atomic<Half<true>>;
            break;
        case Type::kBF16:
            if (op == kAdd) o.execute = atomic<Half<false>>;
            break;
        case Type::kF16x2:
            if (op == kAdd) o.execute = atomic<HalfPair<true>>;
            break;
        case Type::kBF16x2:
            if (op == kAdd) o.execute = atomic<HalfPair<false>>;
            break;
        default:
            break;
    }
    if (o.execute == nullptr) d.fail("unknown operation for this type");
}

}  // namespace emulator
