// dQ = scale · (what the CTAs of all keys have added up), rounded: the end of the backward pass on Hopper.
//
// One CTA takes one tile of query rows of one head. Its parts (attention/query_gradient.h) are read in order, 16 bytes a lane, and
// its rows are written 8 bytes a lane. Memory bandwidth binds.
#pragma once

#include <cstdint>

#include "attention/backward.h"
#include "attention/query_gradient.h"
#include "attention/tiles_sm90.h"
#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/tile_copy.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kQueryThreadsSm90 = 256;

template <int kHeadDim, DataType kDataType>
__global__ void __launch_bounds__(kQueryThreadsSm90)
    attention_backward_query_sm90(const __grid_constant__ AttentionBackwardParams params) {
    constexpr int kBlockM = BackwardTileSm90<kHeadDim>::kBlockM;
    static_assert(kBlockM == kQueryPartRows, "a part has all rows of a tile");
    constexpr int kQuad = 4, kQuadsPerRow = kQueryPartDims / kQuad;
    constexpr int kElements = query_tile_elements(/*in_parts=*/true, kBlockM, kHeadDim);
    const int32_t num_tiles = ceil_div(params.query.rows, kBlockM);
    const int32_t tile = blockIdx.x % num_tiles, head = blockIdx.x / num_tiles % params.query.heads;
    const int32_t batch = blockIdx.x / num_tiles / params.query.heads;
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
    const int32_t first_row = tile * kBlockM;
    if (first_row >= rows.length) return;

    const int64_t sums_tile = first_query_tile(batch, params.query.rows, is_packed, rows.begin, kBlockM) + tile;
    const float* sums = params.query_sums + (sums_tile * params.query.heads + head) * kElements;
    const float scale = params.scores.scale;
#pragma unroll 4
    for (int i = threadIdx.x; i < kElements / kQuad; i += kQueryThreadsSm90) {
        const int part = i / (kQueryPartElements / kQuad), row = i / kQuadsPerRow % kQueryPartRows;
        const int column_of_part = i % kQuadsPerRow * kQuad;
        const int column = part * kQueryPartDims + column_of_part;
        if (first_row + row >= rows.length || column >= params.grad_query.head_dim) continue;
        const float* numbers =
            sums + part * kQueryPartElements + query_part_offset(row, column_of_part / kMmaN) + column_of_part % kMmaN;
        const float4 quad = *reinterpret_cast<const float4*>(numbers);
        *reinterpret_cast<uint2*>(row_pointer(params.grad_query, batch, head, rows.begin + first_row + row) + column) =
            uint2{pack<kDataType>(quad.x * scale, quad.y * scale), pack<kDataType>(quad.z * scale, quad.w * scale)};
    }
}

template <int kHeadDim, DataType kDataType>
void launch_attention_backward_query_sm90(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                          Stream stream) {
    const int64_t num_ctas = int64_t{ceil_div(params.query.rows, BackwardTileSm90<kHeadDim>::kBlockM)} *
                             params.query.heads * params.query.batch;
    kernel.launch(attention_backward_query_sm90<kHeadDim, kDataType>, {num_ctas, kQueryThreadsSm90, 0}, params, stream);
}

}  // namespace fastattn
