// The query rows of a tile, rotated by RoPE if there is any, in swizzled shared memory.
#pragma once

#include <cstdint>

#include "decode/packed_rows.cuh"
#include "decode/rotary.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// sQ [kRows, kHeadDim]; rows that do not exist, and dims that queries do not have, become zero. k8BitCache: dims in the
// order of eight_bit_gemm.cuh. All kThreads take part.
template <int kRows, int kHeadDim, DataType kDataType, bool k8BitCache, int kThreads>
__device__ __forceinline__ void stage_queries(uint16_t* sQ, const DecodeParams& params, const CachedSequence& tokens,
                                              int32_t batch, int32_t kv_head, int32_t first_row) {
    using Layout = Swizzle<kHeadDim>;
    constexpr int kChunks = kHeadDim / kChunkElements;
    static_assert(kRows * kChunks % kThreads == 0, "lanes stay together");
    const HeadsView<const uint16_t>& query = params.query;
    const int32_t num_rows = params.sequence.num_queries * params.group;
#pragma unroll 1
    for (int item = threadIdx.x; item < kRows * kChunks; item += kThreads) {
        const int row_in_tile = item / kChunks, chunk = item % kChunks;
        const QueryRow row(params, kv_head, first_row + row_in_tile);
        uint4 bits = {0, 0, 0, 0};
        if (first_row + row_in_tile < num_rows && chunk * kChunkElements < query.head_dim) {
            const uint16_t* gRow = row_pointer(query, batch, row.head, row.query);
            bits = load_rotated<kDataType>(params.rotary, gRow, chunk,
                                           tokens.total - params.sequence.num_queries + row.query);
        }
        if constexpr (k8BitCache) {
            // Of the 16 dims that two lanes hold, one takes the even pairs of dims, the other the odd ones.
            const bool is_odd = chunk % 2 != 0;
            const uint32_t taken0 = __shfl_xor_sync(0xffffffff, is_odd ? bits.x : bits.y, 1);
            const uint32_t taken1 = __shfl_xor_sync(0xffffffff, is_odd ? bits.z : bits.w, 1);
            bits = is_odd ? uint4{taken0, taken1, bits.y, bits.w} : uint4{bits.x, bits.z, taken0, taken1};
        }
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(sQ) + Layout::offset(row_in_tile, chunk)) = bits;
    }
}

}  // namespace fastattn
