// RoPE on 16-byte chunks of a row: Su et al., "RoFormer" (2021), section 3.4.2.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/swizzle.cuh"
#include "host/decode_params.h"

namespace fastattn {

__device__ __forceinline__ float load_angle(const void* table, RotaryParams::Kind kind, int64_t index) {
    switch (kind) {
        case RotaryParams::Kind::kFloat16:
            return unpack<DataType::kFloat16>(static_cast<const uint16_t*>(table)[index]);
        case RotaryParams::Kind::kBFloat16:
            return unpack<DataType::kBFloat16>(static_cast<const uint16_t*>(table)[index]);
        case RotaryParams::Kind::kFloat64:
            return static_cast<float>(static_cast<const double*>(table)[index]);
        default:
            return static_cast<const float*>(table)[index];
    }
}

// Chunk `chunk` of the row at gRow, whose token stands at `position`: the first 2 * half_dim dims turn in pairs,
// (a, b) -> (a cos - b sin, a sin + b cos), rounded to fp32 after each operation and to 16 bits at the end. Positions
// outside of the table are clamped to it.
template <DataType kDataType>
__device__ __forceinline__ uint4 load_rotated(const RotaryParams& rotary, const uint16_t* gRow, int chunk,
                                              int32_t position) {
    const uint4 own = *reinterpret_cast<const uint4*>(gRow + chunk * kChunkElements);
    const int first_dim = chunk * kChunkElements, half_dim = rotary.half_dim;
    if (rotary.kind == RotaryParams::Kind::kNone || first_dim >= 2 * half_dim) return own;
    const int64_t table_row = int64_t{min(max(position, 0), rotary.num_positions - 1)} * half_dim;
    const uint32_t pairs[4] = {own.x, own.y, own.z, own.w};
    uint32_t turned[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        float results[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int dim = first_dim + 2 * pair + e;
            const float x = unpack<kDataType>(static_cast<uint16_t>(pairs[pair] >> 16 * e));
            results[e] = x;
            if (dim >= 2 * half_dim) continue;
            const bool is_first = rotary.interleaved ? e == 0 : dim < half_dim;
            const int partner = rotary.interleaved ? dim ^ 1 : is_first ? dim + half_dim : dim - half_dim;
            const int64_t angle = table_row + (rotary.interleaved ? dim / 2 : is_first ? dim : partner);
            const float x_cos = __fmul_rn(x, load_angle(rotary.cos, rotary.kind, angle));
            const float y_sin = __fmul_rn(unpack<kDataType>(gRow[partner]), load_angle(rotary.sin, rotary.kind, angle));
            results[e] = is_first ? __fsub_rn(x_cos, y_sin) : __fadd_rn(y_sin, x_cos);
        }
        turned[pair] = pack<kDataType>(results[0], results[1]);
    }
    return {turned[0], turned[1], turned[2], turned[3]};
}

}  // namespace fastattn
