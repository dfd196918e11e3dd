// Applies RoPE to 16-byte chunks of a row: Su et al., "RoFormer" (2021), section 3.4.2.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/swizzle.cuh"
#include "host/decode_params.h"

namespace fastattn {

// Returns what (a, b) -> (a cos - b sin, a sin + b cos), rounded to fp32 after each operation, makes of x, whose
// partner is y. is_first: whether x is a.
FASTATTN_DEVICE float turned(float x, float y, float cos, float sin, bool is_first) {
    const float x_cos = __fmul_rn(x, cos), y_sin = __fmul_rn(y, sin);
    return is_first ? __fsub_rn(x_cos, y_sin) : __fadd_rn(y_sin, x_cos);
}

// The cosines or the sines of one token.
template <RotaryParams::Kind kKind>
struct Angles {
    using Kind = RotaryParams::Kind;
    static constexpr bool kIs16Bit = kKind == Kind::kFloat16 || kKind == Kind::kBFloat16;
    static constexpr int kBytes = kIs16Bit ? 2 : kKind == Kind::kFloat64 ? 8 : 4;

    const char* first;

    FASTATTN_DEVICE Angles(const void* table, int64_t row, int half_dim)
        : first(static_cast<const char*>(table) + row * half_dim * kBytes) {}

    FASTATTN_DEVICE float operator[](int index) const {
        if constexpr (kKind == Kind::kFloat32) return reinterpret_cast<const float*>(first)[index];
        if constexpr (kKind == Kind::kFloat64) return static_cast<float>(reinterpret_cast<const double*>(first)[index]);
        if constexpr (kIs16Bit) return value(reinterpret_cast<const uint16_t*>(first)[index]);
    }

    // Four neighbouring angles, from one load.
    struct Four {
        uint32_t words[kIs16Bit ? 2 : 4];

        FASTATTN_DEVICE float operator[](int i) const {
            if constexpr (kIs16Bit) return value(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2)));
            if constexpr (!kIs16Bit) return __uint_as_float(words[i]);
        }
    };

    FASTATTN_DEVICE Four four(int index) const {
        if constexpr (kIs16Bit) {
            const uint2 loaded = *reinterpret_cast<const uint2*>(first + index * kBytes);
            return {{loaded.x, loaded.y}};
        } else {
            const uint4 loaded = *reinterpret_cast<const uint4*>(first + index * kBytes);
            return {{loaded.x, loaded.y, loaded.z, loaded.w}};
        }
    }

  private:
    FASTATTN_DEVICE static float value(uint16_t bits) {
        constexpr DataType kStored = kKind == Kind::kFloat16 ? DataType::kFloat16 : DataType::kBFloat16;
        return unpack<kStored>(bits);
    }
};

template <DataType kDataType>
FASTATTN_DEVICE uint4 packed(const float (&chunk)[kChunkElements]) {
    return {pack<kDataType>(chunk[0], chunk[1]), pack<kDataType>(chunk[2], chunk[3]),
            pack<kDataType>(chunk[4], chunk[5]), pack<kDataType>(chunk[6], chunk[7])};
}

// Returns the rotated chunk that starts at first_dim of the row at gRow; `own` holds its elements, and table_row is its
// token's row of the tables. If a chunk's angles are neighbours, in tables that begin at a multiple of 16 bytes, all
// loads take 16 bytes and none waits for another. Other chunks, and float64 tables, are loaded element by element.
template <DataType kDataType, RotaryParams::Kind kKind>
FASTATTN_DEVICE uint4 rotated(const RotaryParams& rotary, const uint16_t* gRow, const uint4& own, int first_dim,
                              int64_t table_row) {
    const int half_dim = rotary.half_dim;
    const Angles<kKind> cos(rotary.cos, table_row, half_dim), sin(rotary.sin, table_row, half_dim);
    float results[kChunkElements];
    if constexpr (kKind != RotaryParams::Kind::kFloat64) {
        const bool is_aligned =
            (reinterpret_cast<uint64_t>(rotary.cos) | reinterpret_cast<uint64_t>(rotary.sin)) % sizeof(uint4) == 0;
        if (is_aligned && !rotary.interleaved && half_dim % kChunkElements == 0) {
            const bool is_first = first_dim < half_dim;
            const int partner_dim = is_first ? first_dim + half_dim : first_dim - half_dim;
            const int angle = min(first_dim, partner_dim);
            const uint4 partner = *reinterpret_cast<const uint4*>(gRow + partner_dim);
            const auto cos0 = cos.four(angle), cos1 = cos.four(angle + 4);
            const auto sin0 = sin.four(angle), sin1 = sin.four(angle + 4);
#pragma unroll
            for (int i = 0; i < kChunkElements; ++i) {
                results[i] = turned(element_of<kDataType>(own, i), element_of<kDataType>(partner, i),
                                    i < 4 ? cos0[i] : cos1[i - 4], i < 4 ? sin0[i] : sin1[i - 4], is_first);
            }
            return packed<kDataType>(results);
        }
        if (is_aligned && rotary.interleaved && half_dim % (kChunkElements / 2) == 0) {
            const auto cos_of_pairs = cos.four(first_dim / 2), sin_of_pairs = sin.four(first_dim / 2);
#pragma unroll
            for (int i = 0; i < kChunkElements; ++i) {
                results[i] = turned(element_of<kDataType>(own, i), element_of<kDataType>(own, i ^ 1),
                                    cos_of_pairs[i / 2], sin_of_pairs[i / 2], i % 2 == 0);
            }
            return packed<kDataType>(results);
        }
    }
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
        const int dim = first_dim + i;
        results[i] = element_of<kDataType>(own, i);
        if (dim >= 2 * half_dim) continue;
        const bool is_first = rotary.interleaved ? i % 2 == 0 : dim < half_dim;
        const int partner = rotary.interleaved ? dim ^ 1 : is_first ? dim + half_dim : dim - half_dim;
        const int angle = rotary.interleaved ? dim / 2 : min(dim, partner);
        results[i] = turned(results[i], unpack<kDataType>(gRow[partner]), cos[angle], sin[angle], is_first);
    }
    return packed<kDataType>(results);
}

// Loads chunk `chunk` of the row at gRow, whose token has the given position. The first 2 * half_dim dims are rotated
// in pairs, and rounded to 16 bits. Positions outside of the tables are clamped to them.
template <DataType kDataType>
FASTATTN_DEVICE uint4 load_rotated(const RotaryParams& rotary, const uint16_t* gRow, int chunk, int32_t position) {
    using Kind = RotaryParams::Kind;
    const uint4 own = *reinterpret_cast<const uint4*>(gRow + chunk * kChunkElements);
    const int first_dim = chunk * kChunkElements;
    if (rotary.kind == Kind::kNone || first_dim >= 2 * rotary.half_dim) return own;
    const int64_t row = min(max(position, 0), rotary.num_positions - 1);
    switch (rotary.kind) {
        case Kind::kFloat16:
            return rotated<kDataType, Kind::kFloat16>(rotary, gRow, own, first_dim, row);
        case Kind::kBFloat16:
            return rotated<kDataType, Kind::kBFloat16>(rotary, gRow, own, first_dim, row);
        case Kind::kFloat64:
            return rotated<kDataType, Kind::kFloat64>(rotary, gRow, own, first_dim, row);
        default:
            return rotated<kDataType, Kind::kFloat32>(rotary, gRow, own, first_dim, row);
    }
}

}  // namespace fastattn
