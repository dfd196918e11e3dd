// ldmatrix and mma.sync. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".
//
// Sums of fp16, bf16 and tf32 products: products are exact; as many as one step of an sm_80 tensor core takes (8 of
// 16-bit operands, 4 of tf32) and the accumulator are added in double precision, which loses nothing but where
// exponents are far apart, and the result is truncated to fp32 (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical
// behavior of NVIDIA tensor cores"). Later steps start from that. With fp16 accumulators the sum of each step is
// rounded to nearest fp16. Integers wrap around, or saturate on request.
#include <cmath>

#include "addresses.h"
#include "families.h"
#include "floating.h"

namespace emulator {
namespace {

// option[0]: matrices; option[1]: transposed. r: results, then the address.
Next ldmatrix(Warp& warp, const Operation& o, uint32_t mask) {
    const int count = o.option[0];
    uint64_t addresses[kWarpSize];
    lane_addresses(warp, o, o.r[count], mask, addresses);
    uint16_t rows[kWarpSize][8];
    const uint32_t providers = count == 4 ? kAllLanes : (1u << (8 * count)) - 1;
    const auto space = static_cast<Space>(o.option[2]);
    each_lane(providers,
              [&](int lane) { std::memcpy(rows[lane], warp.access(space, addresses[lane], 16, lane, false), 16); });
    for (int m = 0; m < count; ++m) {
        uint32_t* d = warp.reg<uint32_t>(o.r[m]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const int major = lane / 4, minor = lane % 4 * 2;
            const uint16_t low = o.option[1] != 0 ? rows[8 * m + minor][major] : rows[8 * m + major][minor];
            const uint16_t high = o.option[1] != 0 ? rows[8 * m + minor + 1][major] : rows[8 * m + major][minor + 1];
            d[lane] = low | uint32_t{high} << 16;
        }
    }
    warp.count_memory(o, space, addresses, 16, providers);
    return Next::kContinue;
}

constexpr int kM = 16, kN = 8;

struct Fp16 {
    static constexpr int kPerRegister = 2, kStep = 8;
    static double get(uint32_t bits, int i) { return from_half(static_cast<uint16_t>(bits >> (16 * i))); }
};
struct Bf16 {
    static constexpr int kPerRegister = 2, kStep = 8;
    static double get(uint32_t bits, int i) { return from_bfloat(static_cast<uint16_t>(bits >> (16 * i))); }
};
struct Tf32 {
    static constexpr int kPerRegister = 1, kStep = 4;
    static double get(uint32_t bits, int) {
        return bit_cast<float>(bits & ~0x1fffu);
    }  // the low bits are not looked at
};
struct Signed8 {
    static constexpr int kPerRegister = 4;
    static int32_t get(uint32_t bits, int i) { return static_cast<int8_t>(bits >> (8 * i)); }
};
struct Unsigned8 {
    static constexpr int kPerRegister = 4;
    static int32_t get(uint32_t bits, int i) { return static_cast<uint8_t>(bits >> (8 * i)); }
};

// A is 16 x K by rows: lane 4g + t holds, in register r, row g + 8 (r % 2) from column (t + 4 (r / 2)) · kPerRegister
// on.
template <typename A, int kK, typename T>
void gather_a(Warp& warp, const Slot* slots, T (&a)[kM][kK]) {
    constexpr int kEach = A::kPerRegister;
    for (int r = 0; r < kM * kK / kWarpSize / kEach; ++r) {
        const uint32_t* bits = warp.reg<uint32_t>(slots[r]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            for (int i = 0; i < kEach; ++i) {
                a[lane / 4 + 8 * (r % 2)][(lane % 4 + 4 * (r / 2)) * kEach + i] = A::get(bits[lane], i);
            }
        }
    }
}

// B is K x 8 by columns: lane 4g + t holds, in register r, column g from row (t + 4 r) · kPerRegister on.
template <typename B, int kK, typename T>
void gather_b(Warp& warp, const Slot* slots, T (&b)[kK][kN]) {
    constexpr int kEach = B::kPerRegister;
    for (int r = 0; r < kN * kK / kWarpSize / kEach; ++r) {
        const uint32_t* bits = warp.reg<uint32_t>(slots[r]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            for (int i = 0; i < kEach; ++i) b[(lane % 4 + 4 * r) * kEach + i][lane / 4] = B::get(bits[lane], i);
        }
    }
}

float truncate(double x) {
    const float nearest = static_cast<float>(x);
    if (std::fabs(static_cast<double>(nearest)) <= std::fabs(x) || !std::isfinite(nearest)) return canonical(nearest);
    return bit_cast<float>(bit_cast<uint32_t>(nearest) - 1);
}

// C and D are 16 x 8: lane 4g + t holds rows g and g + 8, columns 2t and 2t + 1; in fp32 one to a register, in fp16
// two.
template <typename A, int kK, bool kHalfSums>
Next mma_float(Warp& warp, const Operation& o, uint32_t) {
    constexpr int kRegistersC = kHalfSums ? 2 : 4, kRegistersA = kM * kK / kWarpSize / A::kPerRegister;
    const Slot *d_slots = o.r, *a_slots = o.r + kRegistersC, *b_slots = a_slots + kRegistersA;
    const Slot* c_slots = b_slots + kRegistersA / 2;
    double a[kM][kK], b[kK][kN], c[kM][kN];
    gather_a<A, kK>(warp, a_slots, a);
    gather_b<A, kK>(warp, b_slots, b);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < 4; ++i) {
            double& element = c[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
            if (kHalfSums) {
                element = from_half(static_cast<uint16_t>(warp.reg<uint32_t>(c_slots[i / 2])[lane] >> (16 * (i % 2))));
            } else {
                element = warp.reg<float>(c_slots[i])[lane];
            }
        }
    }
    for (int row = 0; row < kM; ++row) {
        for (int start = 0; start < kK; start += A::kStep) {
            double sums[kN];
            for (int n = 0; n < kN; ++n) sums[n] = c[row][n];
            for (int k = start; k < start + A::kStep && k < kK; ++k) {
                for (int n = 0; n < kN; ++n) sums[n] += a[row][k] * b[k][n];
            }
            for (int n = 0; n < kN; ++n) c[row][n] = kHalfSums ? from_half(to_half(sums[n])) : truncate(sums[n]);
        }
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < kRegistersC; ++i) {
            if (kHalfSums) {
                const double* pair = &c[lane / 4 + 8 * i][lane % 4 * 2];
                warp.reg<uint32_t>(d_slots[i])[lane] = to_half(pair[0]) | uint32_t{to_half(pair[1])} << 16;
            } else {
                warp.reg<float>(d_slots[i])[lane] =
                    canonical(static_cast<float>(c[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2]));
            }
        }
    }
    return Next::kContinue;
}

template <typename A, typename B, int kK>
Next mma_integer(Warp& warp, const Operation& o, uint32_t) {
    constexpr int kRegistersA = kM * kK / kWarpSize / 4;
    const Slot *a_slots = o.r + 4, *b_slots = a_slots + kRegistersA, *c_slots = b_slots + kRegistersA / 2;
    int32_t a[kM][kK], b[kK][kN];
    gather_a<A, kK>(warp, a_slots, a);
    gather_b<B, kK>(warp, b_slots, b);
    int32_t products[kM][kN] = {};  // no sum of 32 products of 8-bit numbers overflows
    for (int row = 0; row < kM; ++row) {
        for (int k = 0; k < kK; ++k) {
            for (int n = 0; n < kN; ++n) products[row][n] += a[row][k] * b[k][n];
        }
    }
    for (int i = 0; i < 4; ++i) {
        const int32_t* c = warp.reg<int32_t>(c_slots[i]);
        int32_t* d = warp.reg<int32_t>(o.r[i]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            const int64_t sum = int64_t{c[lane]} + products[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
            const int64_t clamped = std::max<int64_t>(INT32_MIN, std::min<int64_t>(INT32_MAX, sum));
            d[lane] = static_cast<int32_t>(o.option[0] != 0 ? clamped : sum);
        }
    }
    return Next::kContinue;
}

// Reads the elements of operand i into r from `next` on.
void read_fragment(Decoder& d, size_t i, size_t count, Type type, size_t& next) {
    const auto elements = d.elements(i);
    if (elements.size() != count) d.fail("a fragment with this number of registers is unknown");
    for (const ptx::Operand* element : elements)
        d.operation().r[next++] = i == 0 ? d.write(*element, type) : d.read(*element, type);
}

template <typename A>
Execute pick_integer(Type b, int k) {
    if (b == Type::kS8) return k == 32 ? mma_integer<A, Signed8, 32> : mma_integer<A, Signed8, 16>;
    return k == 32 ? mma_integer<A, Unsigned8, 32> : mma_integer<A, Unsigned8, 16>;
}

}  // namespace

void decode_ldmatrix(Decoder& d) {
    Operation& o = d.operation();
    d.require_any({"sync"});
    d.require_any({"aligned"});
    d.require_any({"m8n8"});
    const int count = 1 << d.require_any({"x1", "x2", "x4"});
    o.option[1] = d.accept("trans");
    Space space = d.accept_space();
    if (space != Space::kShared && space != Space::kGeneric) d.fail("unknown state space");
    d.require_type({Type::kB16});
    d.require_operands(2, 2);
    size_t next = 0;
    read_fragment(d, 0, count, Type::kB32, next);
    set_address(o, o.r[count], d.address(1, space));
    o.option[0] = count;
    o.option[2] = static_cast<int>(space);
    o.is_aligned = true;
    o.type = Class::kMatrixLoad;
    o.execute = ldmatrix;
}

void decode_mma(Decoder& d) {
    Operation& o = d.operation();
    d.require_any({"sync"});
    d.require_any({"aligned"});
    constexpr int kDepths[] = {4, 8, 16, 32};
    const int k = kDepths[d.require_any({"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"})];
    d.require_any({"row"});
    d.require_any({"col"});
    const bool saturates = d.accept("satfinite");
    Type types[4];  // of D, A, B, C
    for (Type& type : types) {
        const auto found = d.accept_type();
        if (!found) d.fail("types are missing, or unknown");
        type = *found;
    }
    const auto [to, a, b, c] = types;
    d.require_operands(4, 4);
    o.is_aligned = true;
    o.type = Class::kTensorCore;
    const bool half_sums = to == Type::kF16;
    if (to != c) d.fail("unknown for these types");
    if (to == Type::kS32) {
        o.option[0] = saturates;
        const bool known =
            (a == Type::kS8 || a == Type::kU8) && (b == Type::kS8 || b == Type::kU8) && (k == 16 || k == 32);
        if (known) o.execute = a == Type::kS8 ? pick_integer<Signed8>(b, k) : pick_integer<Unsigned8>(b, k);
    } else if ((to == Type::kF32 || half_sums) && a == b && !saturates) {
        if (a == Type::kF16 && k == 16) o.execute = half_sums ? mma_float<Fp16, 16, true> : mma_float<Fp16, 16, false>;
        if (a == Type::kF16 && k == 8) o.execute = half_sums ? mma_float<Fp16, 8, true> : mma_float<Fp16, 8, false>;
        if (a == Type::kBF16 && !half_sums && k == 16) o.execute = mma_float<Bf16, 16, false>;
        if (a == Type::kBF16 && !half_sums && k == 8) o.execute = mma_float<Bf16, 8, false>;
        if (a == Type::kTF32 && !half_sums && k == 8) o.execute = mma_float<Tf32, 8, false>;
        if (a == Type::kTF32 && !half_sums && k == 4) o.execute = mma_float<Tf32, 4, false>;
    }
    if (o.execute == nullptr) d.fail("unknown shape for these types");
    const int per_register = 4 / width_of(a);
    const size_t sums = half_sums ? 2 : 4, of_a = kM * k / kWarpSize / per_register;
    const Type sum = to == Type::kF16 ? Type::kB32 : to;
    size_t next = 0;
    read_fragment(d, 0, sums, sum, next);
    read_fragment(d, 1, of_a, Type::kB32, next);
    read_fragment(d, 2, of_a / 2, Type::kB32, next);
    read_fragment(d, 3, sums, sum, next);
}

}  // namespace emulator
