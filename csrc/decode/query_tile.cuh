// Stages the query rows of a tile in swizzled shared memory, rotated if the call has RoPE.
//
// fp8 keys are multiplied as fp16, so bfloat16 queries are converted to fp16 too. Before the conversion, each row is
// divided by a power of two that brings the row's largest element close to the largest fp16 number. Only elements below
// 2^-32 times the row's largest are rounded, by at most 2^-39 times the largest.
#pragma once

#include <cstdint>

#include "decode/packed_rows.cuh"
#include "decode/rotary.cuh"
#include "device/power_of_two.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// A row's chunk as fp16, and the power of two by which the row is divided.
struct DividedChunk {
    uint4 bits;
    float power;
};

// Converts a chunk of bfloat16. kLanesOfRow neighbouring lanes pass a chunk of a row each.
template <int kLanesOfRow>
FASTATTN_DEVICE DividedChunk divided_to_float16(const uint4& bits) {
    constexpr uint32_t kBelow = 14 * kExponentStep;  // the row's largest element is then 2^14 to 2^15
    constexpr uint32_t kLeast = kBelow + kExponentStep, kMost = 0x7f000000;  // so that powers are normal numbers
    float values[kChunkElements], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkElements; ++i) {
        values[i] = element_of<DataType::kBFloat16>(bits, i);
        largest = fmaxf(largest, fabsf(values[i]));  // ignores NaN
    }
#pragma unroll
    for (int distance = 1; distance < kLanesOfRow; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    const uint32_t exponent = min(max(__float_as_uint(largest) & kExponentBits, kLeast), kMost);
    const float power = __uint_as_float(exponent - kBelow), inverse = inverse_of_power(power);
    const auto pair = [&](int i) { return pack<DataType::kFloat16>(values[i] * inverse, values[i + 1] * inverse); };
    return {{pair(0), pair(2), pair(4), pair(6)}, power};
}

// Writes sQ [kRows, kHeadDim] in Decoding's dtype, with zeros for rows and dims that do not exist. Writes the rows'
// powers of two, sPowers [kRows], if Decoding's dtype is not kDataType. With k8BitCache, dims are in the order of
// eight_bit_gemm.cuh. Called by all kThreads threads.
template <int kRows, int kHeadDim, DataType kDataType, typename Decoding, bool k8BitCache, int kThreads>
FASTATTN_DEVICE void stage_queries(uint16_t* sQ, float* sPowers, const DecodeParams& params, int32_t num_tokens,
                                   int32_t batch, int32_t kv_head, int32_t first_row) {
    using Layout = Swizzle<kHeadDim>;
    constexpr int kChunks = kHeadDim / kChunkElements;
    static_assert(kRows * kChunks % kThreads == 0, "lanes stay together");
    const HeadsView<const uint16_t>& query = params.query;
    const int32_t num_rows = params.sequence.num_queries * params.group;
#pragma unroll 1
    for (int index = threadIdx.x; index < kRows * kChunks; index += kThreads) {
        const int row_in_tile = index / kChunks, chunk = index % kChunks;
        const QueryRow row(params, kv_head, first_row + row_in_tile);
        uint4 bits = {0, 0, 0, 0};
        if (first_row + row_in_tile < num_rows && chunk * kChunkElements < query.head_dim) {
            const uint16_t* gRow = row_pointer(query, batch, row.head, row.query);
            bits = load_rotated<kDataType>(&params.rotary, gRow, chunk,
                                           num_tokens - params.sequence.num_queries + row.query);
        }
        if constexpr (Decoding::kDataType != kDataType) {
            const DividedChunk divided = divided_to_float16<kChunks>(bits);
            bits = divided.bits;
            if (chunk == 0) sPowers[row_in_tile] = divided.power;
        }
        if constexpr (k8BitCache) {
            // Two neighbouring lanes hold 16 dims. The even lane takes the even pairs of dims, and the odd lane the odd
            // pairs.
            const bool is_odd = chunk % 2 != 0;
            const uint32_t taken0 = __shfl_xor_sync(0xffffffff, is_odd ? bits.x : bits.y, 1);
            const uint32_t taken1 = __shfl_xor_sync(0xffffffff, is_odd ? bits.z : bits.w, 1);
            bits = is_odd ? uint4{taken0, taken1, bits.y, bits.w} : uint4{bits.x, bits.z, taken0, taken1};
        }
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(sQ) + Layout::offset(row_in_tile, chunk)) = bits;
    }
}

}  // namespace fastattn
