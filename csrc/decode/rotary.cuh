// RoPE on 16-byte chunks of a row: Su et al., "RoFormer" (2021), section 3.4.2.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/swizzle.cuh"
#include "host/decode_params.h"

namespace fastattn {

// (a, b) -> (a cos - b sin, a sin + b cos), rounded to fp32 after each operation: what becomes of x, whose partner is y.
__device__ __forceinline__ float turned(float x, float y, float cos, float sin, bool is_first) {
    const float x_cos = __fmul_rn(x, cos), y_sin = __fmul_rn(y, sin);
    return is_first ? __fsub_rn(x_cos, y_sin) : __fadd_rn(y_sin, x_cos);
}

// The cosines or the sines of one token: [half_dim] of the kind that the caller has. All kinds share the code that
// turns, and differ where a load's bits become fp32.
struct Angles {
    using Kind = RotaryParams::Kind;

    const void* table;
    Kind kind;
    int64_t first;  // element of the table

    __device__ __forceinline__ float operator[](int index) const {
        const int64_t element = first + index;
        if (kind == Kind::kFloat32) return static_cast<const float*>(table)[element];
        if (kind == Kind::kFloat64) return static_cast<float>(static_cast<const double*>(table)[element]);
        return from_16_bits(static_cast<const uint16_t*>(table)[element]);
    }

    // Loads four neighbours at once, which lie at a multiple of four. Not for float64.
    __device__ __forceinline__ void load_four(float (&four)[4], int index) const {
        const int64_t element = first + index;
        if (kind == Kind::kFloat32) {
            const auto loaded = *reinterpret_cast<const float4*>(static_cast<const float*>(table) + element);
            four[0] = loaded.x, four[1] = loaded.y, four[2] = loaded.z, four[3] = loaded.w;
        } else {
            const auto loaded = *reinterpret_cast<const ushort4*>(static_cast<const uint16_t*>(table) + element);
            four[0] = from_16_bits(loaded.x), four[1] = from_16_bits(loaded.y);
            four[2] = from_16_bits(loaded.z), four[3] = from_16_bits(loaded.w);
        }
    }

  private:
    __device__ __forceinline__ float from_16_bits(uint16_t bits) const {
        return kind == Kind::kFloat16 ? unpack<DataType::kFloat16>(bits) : unpack<DataType::kBFloat16>(bits);
    }
};

// Turns a chunk that begins at first_dim, four elements at a time, for registers' sake. Its angles are neighbours in
// tables that begin at a multiple of 16 bytes: a load brings four.
template <DataType kDataType>
__device__ __forceinline__ uint4 turned_chunk(const RotaryParams& rotary, const uint16_t* gRow, uint4 chunk,
                                              int first_dim, const Angles& cos, const Angles& sin) {
    const bool interleaved = rotary.interleaved, is_first_half = first_dim < rotary.half_dim;
    const int partner_dim = is_first_half ? first_dim + rotary.half_dim : first_dim - rotary.half_dim;
    const int angle = interleaved ? first_dim / 2 : min(first_dim, partner_dim);
    // Two words of the chunk leave in front and come back turned, so that the loop needs no indices of registers.
#pragma unroll 1
    for (int i = 0; i < kChunkElements; i += 4) {
        float cosines[4], sines[4];
        cos.load_four(cosines, interleaved ? angle : angle + i), sin.load_four(sines, interleaved ? angle : angle + i);
        uint2 partner;
        if (interleaved) {
            // A word is a pair: each element is the other's partner, and both have one angle.
            partner = {__funnelshift_l(chunk.x, chunk.x, 16), __funnelshift_l(chunk.y, chunk.y, 16)};
            const bool is_left = i == 0;
            cosines[0] = is_left ? cosines[0] : cosines[2], sines[0] = is_left ? sines[0] : sines[2];
            cosines[2] = is_left ? cosines[1] : cosines[3], sines[2] = is_left ? sines[1] : sines[3];
            cosines[1] = cosines[0], sines[1] = sines[0], cosines[3] = cosines[2], sines[3] = sines[2];
        } else {
            partner = *reinterpret_cast<const uint2*>(gRow + partner_dim + i);
        }
        float results[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            results[j] = turned(element_of<kDataType>(chunk, j), element_of<kDataType>({partner.x, partner.y, 0, 0}, j),
                                cosines[j], sines[j], interleaved ? j % 2 == 0 : is_first_half);
        }
        chunk = {chunk.z, chunk.w, pack<kDataType>(results[0], results[1]), pack<kDataType>(results[2], results[3])};
    }
    return chunk;
}

// The same element by element, for all that turned_chunk does not take: pairs that end within the chunk, too.
template <DataType kDataType>
__device__ __forceinline__ uint4 turned_elements(const RotaryParams& rotary, const uint16_t* gRow, uint4 chunk,
                                                 int first_dim, const Angles& cos, const Angles& sin) {
    const auto element = [&](int dim) {
        const bool is_first = rotary.interleaved ? dim % 2 == 0 : dim < rotary.half_dim;
        const int partner = rotary.interleaved ? dim ^ 1 : is_first ? dim + rotary.half_dim : dim - rotary.half_dim;
        const int angle = rotary.interleaved ? dim / 2 : min(dim, partner);
        return turned(unpack<kDataType>(gRow[dim]), unpack<kDataType>(gRow[partner]), cos[angle], sin[angle], is_first);
    };
    // Each word of the chunk leaves in front and comes back turned, so that the loop needs no indices of registers.
#pragma unroll 1
    for (int dim = first_dim; dim < first_dim + kChunkElements; dim += 2) {
        const bool is_turned = dim < 2 * rotary.half_dim;
        const uint32_t word = is_turned ? pack<kDataType>(element(dim), element(dim + 1)) : chunk.x;
        chunk = {chunk.y, chunk.z, chunk.w, word};
    }
    return chunk;
}

// Chunk `chunk` of the row at gRow, whose token stands at `position`: the first 2 * half_dim dims turn in pairs, and are
// rounded to 16 bits. Positions outside of the tables are clamped to them.
template <DataType kDataType>
__device__ __forceinline__ uint4 load_rotated(const RotaryParams& rotary, const uint16_t* gRow, int chunk,
                                              int32_t position) {
    using Kind = RotaryParams::Kind;
    const uint4 own = *reinterpret_cast<const uint4*>(gRow + chunk * kChunkElements);
    const int first_dim = chunk * kChunkElements;
    if (rotary.kind == Kind::kNone || first_dim >= 2 * rotary.half_dim) return own;
    const int64_t first_angle = int64_t{min(max(position, 0), rotary.num_positions - 1)} * rotary.half_dim;
    const Angles cos{rotary.cos, rotary.kind, first_angle}, sin{rotary.sin, rotary.kind, first_angle};
    const bool is_aligned =
        (reinterpret_cast<uint64_t>(rotary.cos) | reinterpret_cast<uint64_t>(rotary.sin)) % sizeof(uint4) == 0;
    const bool are_neighbours = rotary.half_dim % (rotary.interleaved ? kChunkElements / 2 : kChunkElements) == 0;
    if (rotary.kind != Kind::kFloat64 && is_aligned && are_neighbours) {
        return turned_chunk<kDataType>(rotary, gRow, own, first_dim, cos, sin);
    }
    return turned_elements<kDataType>(rotary, gRow, own, first_dim, cos, sin);
}

}  // namespace fastattn
