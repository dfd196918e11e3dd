// Applies RoPE to 16-byte chunks of a row: Su et al., "RoFormer" (2021), section 3.4.2. Decoding rotates its queries
// (query_tile.cuh) and the new keys that it appends (new_tokens.cuh). append_sm80.cuh does not rotate.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/swizzle.cuh"
#include "host/decode_params.h"

namespace fastattn {

// Rotates the pair (a, b) to (a cos - b sin, a sin + b cos), rounding to fp32 after each operation. (x, y) is (a, b) if
// is_first, else (b, a). Returns the rotated x.
FASTATTN_DEVICE float rotated_element(float x, float y, float cos, float sin, bool is_first) {
    const float x_cos = __fmul_rn(x, cos), y_sin = __fmul_rn(y, sin);
    return is_first ? __fsub_rn(x_cos, y_sin) : __fadd_rn(y_sin, x_cos);
}

// The cosines or the sines of one token. Their dtype is known only at run time.
struct Angles {
    using Kind = RotaryParams::Kind;

    const char* first;
    Kind kind;

    FASTATTN_DEVICE Angles(const void* table, Kind kind, int64_t row, int half_dim)
        : first(static_cast<const char*>(table) + row * half_dim * bytes(kind)), kind(kind) {}

    FASTATTN_DEVICE float operator[](int index) const {
        const char* angle = first + index * bytes(kind);
        if (kind == Kind::kFloat32) return *reinterpret_cast<const float*>(angle);
        if (kind == Kind::kFloat64) return static_cast<float>(*reinterpret_cast<const double*>(angle));
        return from_16_bits(*reinterpret_cast<const uint16_t*>(angle));
    }

    // Returns four neighbouring angles, whose address must be a multiple of their size.
    FASTATTN_DEVICE float4 four(int index) const {
        const char* angles = first + index * bytes(kind);
        if (kind == Kind::kFloat32) return *reinterpret_cast<const float4*>(angles);
        if (kind == Kind::kFloat64) {
            const auto* pairs = reinterpret_cast<const double2*>(angles);
            const double2 low = pairs[0], high = pairs[1];
            return {static_cast<float>(low.x), static_cast<float>(low.y), static_cast<float>(high.x),
                    static_cast<float>(high.y)};
        }
        const uint2 bits = *reinterpret_cast<const uint2*>(angles);
        return {from_16_bits(bits.x), from_16_bits(bits.x >> 16), from_16_bits(bits.y), from_16_bits(bits.y >> 16)};
    }

  private:
    FASTATTN_DEVICE static int bytes(Kind kind) { return kind == Kind::kFloat64 ? 8 : kind == Kind::kFloat32 ? 4 : 2; }

    FASTATTN_DEVICE float from_16_bits(uint32_t low_bits) const {
        const auto bits = static_cast<uint16_t>(low_bits);
        return kind == Kind::kFloat16 ? unpack<DataType::kFloat16>(bits) : unpack<DataType::kBFloat16>(bits);
    }
};

// Returns the rotated chunk that starts at first_dim of the row at gRow. table_row: the row of the token in the tables
// of cosines and sines. If the angles of a chunk are adjacent and the tables are 16-byte aligned, each load takes 16
// bytes (8 bytes of 16-bit angles), and no load waits for another. Otherwise angles, and the other elements of the
// rotated pairs, are loaded one by one. The function is not inlined, because its copies would be a large fraction of
// every kernel.
template <DataType kDataType>
__device__ __noinline__ uint4 rotated(const RotaryParams& rotary, const uint16_t* gRow, int first_dim,
                                      int32_t table_row) {
    const uint4 own = *reinterpret_cast<const uint4*>(gRow + first_dim);
    const int half_dim = rotary.half_dim;
    const Angles cos(rotary.cos, rotary.kind, table_row, half_dim), sin(rotary.sin, rotary.kind, table_row, half_dim);
    const bool is_aligned =
        (reinterpret_cast<uint64_t>(rotary.cos) | reinterpret_cast<uint64_t>(rotary.sin)) % sizeof(uint4) == 0;
    const int angles_of_chunk = rotary.interleaved ? kChunkElements / 2 : kChunkElements;
    if (is_aligned && half_dim % angles_of_chunk == 0) {
        const bool is_first = first_dim < half_dim;
        uint4 partner;
        int angle, second_angle;  // of elements 0 and 4; interleaved: equal, the chunk has only four angles
        if (rotary.interleaved) {
            const auto swapped = [](uint32_t pair) { return __byte_perm(pair, 0, 0x1032); };
            partner = {swapped(own.x), swapped(own.y), swapped(own.z), swapped(own.w)};
            angle = second_angle = first_dim / 2;
        } else {
            const int partner_dim = is_first ? first_dim + half_dim : first_dim - half_dim;
            partner = *reinterpret_cast<const uint4*>(gRow + partner_dim);
            angle = min(first_dim, partner_dim);
            second_angle = angle + 4;
        }
        const float4 cos0 = cos.four(angle), cos1 = cos.four(second_angle);
        const float4 sin0 = sin.four(angle), sin1 = sin.four(second_angle);
        const float cos_of[] = {cos0.x, cos0.y, cos0.z, cos0.w, cos1.x, cos1.y, cos1.z, cos1.w};
        const float sin_of[] = {sin0.x, sin0.y, sin0.z, sin0.w, sin1.x, sin1.y, sin1.z, sin1.w};
        const auto element = [&](int i) {
            return rotated_element(element_of<kDataType>(own, i), element_of<kDataType>(partner, i),
                                   rotary.interleaved ? cos_of[i / 2] : cos_of[i],
                                   rotary.interleaved ? sin_of[i / 2] : sin_of[i],
                                   rotary.interleaved ? i % 2 == 0 : is_first);
        };
        const auto pair = [&](int i) { return pack<kDataType>(element(i), element(i + 1)); };
        return {pair(0), pair(2), pair(4), pair(6)};
    }
    uint64_t halves[2] = {own.x | uint64_t{own.y} << 32, own.z | uint64_t{own.w} << 32};
#pragma unroll
    for (uint64_t& half : halves) {
        const int half_first_dim = first_dim + (&half == halves ? 0 : kChunkElements / 2);
#pragma unroll 1
        for (int i = 0; i < kChunkElements / 2; ++i) {
            const int dim = half_first_dim + i;
            uint32_t bits = half & 0xffff;
            if (dim < 2 * half_dim) {
                const bool is_first = rotary.interleaved ? i % 2 == 0 : dim < half_dim;
                const int partner = rotary.interleaved ? dim ^ 1 : is_first ? dim + half_dim : dim - half_dim;
                const int angle = rotary.interleaved ? dim / 2 : min(dim, partner);
                const float x = unpack<kDataType>(static_cast<uint16_t>(bits));
                bits = pack<kDataType>(
                    rotated_element(x, unpack<kDataType>(gRow[partner]), cos[angle], sin[angle], is_first), 0.0f);
            }
            half = half >> 16 | uint64_t{bits} << 48;  // after four steps each element is back in its place
        }
    }
    return {static_cast<uint32_t>(halves[0]), static_cast<uint32_t>(halves[0] >> 32), static_cast<uint32_t>(halves[1]),
            static_cast<uint32_t>(halves[1] >> 32)};
}

// Loads chunk `chunk` of the row at gRow, whose token has the given position. The first 2 * half_dim dims are rotated
// in pairs, and rounded to 16 bits. Positions outside of the tables are clamped. Without RoPE (rotary is null or
// kNone), the chunk is returned unchanged.
template <DataType kDataType>
FASTATTN_DEVICE uint4 load_rotated(const RotaryParams* rotary, const uint16_t* gRow, int chunk, int32_t position) {
    const int first_dim = chunk * kChunkElements;
    if (rotary == nullptr || rotary->kind == RotaryParams::Kind::kNone || first_dim >= 2 * rotary->half_dim) {
        return *reinterpret_cast<const uint4*>(gRow + first_dim);
    }
    return rotated<kDataType>(*rotary, gRow, first_dim, min(max(position, 0), rotary->num_positions - 1));
}

}  // namespace fastattn
