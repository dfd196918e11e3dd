// mma.sync. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions". The sums are those of tensor_core.h.
#include "addresses.h"
#include "families.h"
#include "tensor_core.h"

namespace emulator {
namespace {

constexpr int kM = 16, kN = 8;

// Gathers A, [16, K] row-major. Register r of lane 4g + t holds kEach elements of row g + 8 (r % 2), from column
// (t + 4 (r / 2)) · kEach on.
template <typename A, int kK, typename T>
void gather_a(Warp& warp, const Slot* slots, T (&a)[kM * kK]) {
    constexpr int kEach = 4 / A::kBytes;
    for (int r = 0; r < kM * kK / kWarpSize / kEach; ++r) {
        const uint32_t* bits = warp.reg<uint32_t>(slots[r]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            T* row = a + (lane / 4 + 8 * (r % 2)) * kK + (lane % 4 + 4 * (r / 2)) * kEach;
            for (int i = 0; i < kEach; ++i) row[i] = A::get(bits + lane, i);
        }
    }
}

// Gathers B, [K, 8]. Register r of lane 4g + t holds kEach elements of column g, from row (t + 4 r) · kEach on.
template <typename B, int kK, typename T>
void gather_b(Warp& warp, const Slot* slots, T (&b)[kK * kN]) {
    constexpr int kEach = 4 / B::kBytes;
    for (int r = 0; r < kN * kK / kWarpSize / kEach; ++r) {
        const uint32_t* bits = warp.reg<uint32_t>(slots[r]);
        for (int lane = 0; lane < kWarpSize; ++lane) {
            T* column = b + (lane % 4 + 4 * r) * kEach * kN + lane / 4;
            for (int i = 0; i < kEach; ++i) column[i * kN] = B::get(bits + lane, i);
        }
    }
}

// Returns the row-major index in C or D, [16, 8], of a lane's element i: rows g and g + 8 of columns 2t and 2t + 1.
constexpr int place(int lane, int i) {
    return (lane / 4 + 8 * (i / 2)) * kN + lane % 4 * 2 + i % 2;
}

// r: registers of D, A, B, C. Those of C and D hold one fp32 or two fp16 elements.
template <typename A, typename B, int kK, bool kHalfSums>
Next mma_float(Warp& warp, const Operation& o, uint32_t) {
    constexpr int kRegistersC = kHalfSums ? 2 : 4, kRegistersA = kM * kK * A::kBytes / 4 / kWarpSize;
    // The number of products that a tensor core adds at a time. mma.sync computes fp8 as fp16.
    constexpr int kStep = A::kBytes == 4 ? 4 : 8;
    const Slot *d_slots = o.r, *a_slots = o.r + kRegistersC, *b_slots = a_slots + kRegistersA;
    const Slot* c_slots = b_slots + kRegistersA / 2;
    double a[kM * kK], b[kK * kN];
    float c[kM * kN];
    gather_a<A, kK>(warp, a_slots, a);
    gather_b<B, kK>(warp, b_slots, b);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < 4; ++i) {
            if (kHalfSums) {
                const uint32_t pair = warp.reg<uint32_t>(c_slots[i / 2])[lane];
                c[place(lane, i)] = from_half(static_cast<uint16_t>(pair >> (16 * (i % 2))));
            } else {
                c[place(lane, i)] = warp.reg<float>(c_slots[i])[lane];
            }
        }
    }
    add_products(a, b, c, kM, kN, kK, kStep, kHalfSums ? SumFormat::kHalf : SumFormat::kSingle);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < kRegistersC; ++i) {
            if (kHalfSums) {
                const float* pair = c + place(lane, 2 * i);
                warp.reg<uint32_t>(d_slots[i])[lane] = to_half(pair[0]) | uint32_t{to_half(pair[1])} << 16;
            } else {
                warp.reg<float>(d_slots[i])[lane] = c[place(lane, i)];
            }
        }
    }
    return Next::kContinue;
}

// r: registers of D, A, B, C. option[0]: 1 saturates.
template <typename A, typename B, int kK>
Next mma_integer(Warp& warp, const Operation& o, uint32_t) {
    constexpr int kRegistersA = kM * kK / kWarpSize / 4;
    const Slot *a_slots = o.r + 4, *b_slots = a_slots + kRegistersA, *c_slots = b_slots + kRegistersA / 2;
    int32_t a[kM * kK], b[kK * kN], c[kM * kN];
    gather_a<A, kK>(warp, a_slots, a);
    gather_b<B, kK>(warp, b_slots, b);
    for (int i = 0; i < 4; ++i) {
        for (int lane = 0; lane < kWarpSize; ++lane) c[place(lane, i)] = warp.reg<int32_t>(c_slots[i])[lane];
    }
    add_products(a, b, c, kM, kN, kK, o.option[0] != 0);
    for (int i = 0; i < 4; ++i) {
        for (int lane = 0; lane < kWarpSize; ++lane) warp.reg<int32_t>(o.r[i])[lane] = c[place(lane, i)];
    }
    return Next::kContinue;
}

// Decodes the registers of operand i into r, from index `next` on.
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

template <typename A, typename B, int kK>
Execute pick_sums(bool half_sums) {
    return half_sums ? mma_float<A, B, kK, true> : mma_float<A, B, kK, false>;
}

template <typename A>
Execute pick_fp8(Type b, int k, bool half_sums) {
    if (b == Type::kE4M3) return k == 32 ? pick_sums<A, E4m3, 32>(half_sums) : pick_sums<A, E4m3, 16>(half_sums);
    return k == 32 ? pick_sums<A, E5m2, 32>(half_sums) : pick_sums<A, E5m2, 16>(half_sums);
}

bool is_fp8(Type type) {
    return type == Type::kE4M3 || type == Type::kE5M2;
}

// Returns nullptr if there is no such instruction.
Execute pick(Type sum, Type a, Type b, int k) {
    const bool half_sums = sum == Type::kF16;
    if (sum == Type::kS32) {
        const bool known =
            (a == Type::kS8 || a == Type::kU8) && (b == Type::kS8 || b == Type::kU8) && (k == 16 || k == 32);
        if (!known) return nullptr;
        return a == Type::kS8 ? pick_integer<Signed8>(b, k) : pick_integer<Unsigned8>(b, k);
    }
    if (sum != Type::kF32 && !half_sums) return nullptr;
    if (is_fp8(a) && is_fp8(b) && (k == 16 || k == 32)) {
        return a == Type::kE4M3 ? pick_fp8<E4m3>(b, k, half_sums) : pick_fp8<E5m2>(b, k, half_sums);
    }
    if (a != b) return nullptr;
    if (a == Type::kF16 && k == 16) return pick_sums<Fp16, Fp16, 16>(half_sums);
    if (a == Type::kF16 && k == 8) return pick_sums<Fp16, Fp16, 8>(half_sums);
    if (half_sums) return nullptr;
    if (a == Type::kBF16 && k == 16) return mma_float<Bf16, Bf16, 16, false>;
    if (a == Type::kBF16 && k == 8) return mma_float<Bf16, Bf16, 8, false>;
    if (a == Type::kTF32 && k == 8) return mma_float<Tf32, Tf32, 8, false>;
    if (a == Type::kTF32 && k == 4) return mma_float<Tf32, Tf32, 4, false>;
    return nullptr;
}

}  // namespace

void decode_mma(Decoder& d) {
    if (decode_other_mma(d)) return;
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
    o.option[0] = saturates;
    if (to == c && (to == Type::kS32 || !saturates)) o.execute = pick(to, a, b, k);
    if (is_fp8(a)) d.require_target(89);
    if (o.execute == nullptr) d.fail("unknown shape for these types");
    const int per_register = 4 / width_of(a);
    const size_t sums = to == Type::kF16 ? 2 : 4, of_a = kM * k / kWarpSize / per_register;
    const Type sum = to == Type::kF16 ? Type::kB32 : to;
    size_t next = 0;
    read_fragment(d, 0, sums, sum, next);
    read_fragment(d, 1, of_a, Type::kB32, next);
    read_fragment(d, 2, of_a / 2, Type::kB32, next);
    read_fragment(d, 3, sums, sum, next);
}

}  // namespace emulator
