// The arithmetic of atomics and reductions. Each value type has Bits, and apply(op, old, b, c) for the new value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "floating.h"

namespace emulator {

enum ReductionOp : int { kAnd, kOr, kXor, kExch, kAdd, kInc, kDec, kMin, kMax, kCas };

template <typename T>
inline T update_integer(int op, T old, T b, T c) {
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

// fp32 in global memory, where atomic additions flush subnormals.
struct FlushingSingle {
    using Bits = uint32_t;
    static Bits apply(int, Bits old, Bits b, Bits) {
        return bit_cast<uint32_t>(canonical(flush(flush(bit_cast<float>(old)) + flush(bit_cast<float>(b)))));
    }
};

struct Double {
    using Bits = uint64_t;
    static Bits apply(int, Bits old, Bits b, Bits) {
        return bit_cast<uint64_t>(bit_cast<double>(old) + bit_cast<double>(b));
    }
};

template <bool kIsFp16>
inline uint16_t update_half(int op, uint16_t old, uint16_t b) {
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

// Updates one number atomically on the host, and returns its previous bits.
template <typename F>
typename F::Bits update(std::byte* host, int op, typename F::Bits b, typename F::Bits c) {
    using Bits = typename F::Bits;
    auto* at = reinterpret_cast<Bits*>(host);
    Bits old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &old, F::apply(op, old, b, c), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return old;
}

}  // namespace emulator
