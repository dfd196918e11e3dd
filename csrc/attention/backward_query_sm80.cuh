// The end of the backward pass: multiplies dQ's sums over all keys by the scale, and rounds the products to dQ, or adds
// them to an fp32 gradient (sum_query).
//
// One CTA owns one row tile of one head. It reads the sums, which are in the order of accumulators
// (attention/query_sums.h), and turns them into rows through shared memory:
//
//   sums in global memory → registers → scale, round → shared memory → rows of dQ
#pragma once

#include "attention/backward.h"
#include "attention/backward_config_sm80.cuh"
#include "attention/query_sums.h"
#include "device/sequence.cuh"
#include "device/tile_copy.cuh"
#include "host/launch.h"

namespace fastattn {

template <int kHeadDim, DataType kDataType>
__global__ void __launch_bounds__(BackwardConfigSm80<kHeadDim>::kNumThreads)
    attention_backward_query_sm80(const __grid_constant__ AttentionBackwardParams params) {
    using Config = BackwardConfigSm80<kHeadDim>;
    using Grid = typename Config::QueryGrid;
    constexpr int kBlockM = Config::kBlockM;
    constexpr int kWarpRows = kBlockM / Config::kNumWarps;                  // rows that a warp stores
    __shared__ __align__(128) uint16_t sQ[kBlockM * Config::kRowElements];  // swizzled

    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int32_t num_tiles = ceil_div(params.query.rows, kBlockM);
    const int32_t tile = blockIdx.x % num_tiles, head = blockIdx.x / num_tiles % params.query.heads;
    const int32_t batch = blockIdx.x / num_tiles / params.query.heads;
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
    const int32_t first_row = tile * kBlockM;
    if (first_row >= rows.length) return;

    const int64_t sums_tile = first_query_tile(batch, params.query.rows, is_packed, rows.begin, kBlockM) + tile;
    const float* sums = params.query_sums + (sums_tile * params.query.heads + head) * Config::kQuerySums;
    typename Grid::Accumulators rdQ;
    Grid::template for_each_sum<0>(sums, rdQ, warp, lane, [](float& sum, const float* address) { sum = *address; });
    if (params.sum_query.data != nullptr) {
        const auto row_at = [&](int row) -> float* {
            if (row >= rows.length - first_row) return nullptr;
            return row_pointer(params.sum_query, batch, head, rows.begin + first_row + row);
        };
        Grid::add_to(row_at, rdQ, params.scores.scale, params.query.head_dim, warp, lane);
        return;
    }
    Grid::template stage<kDataType>(sQ, rdQ, params.scores.scale, warp, lane);
    __syncthreads();  // waits until every warp's rows are in shared memory
    uint16_t* gQ = row_pointer(params.grad_query, batch, head, rows.begin + first_row + warp * kWarpRows);
    store_rows<kWarpRows, kHeadDim>(gQ, params.grad_query.row_stride, rows.length - first_row - warp * kWarpRows,
                                    sQ + warp * kWarpRows * Config::kRowElements, lane, params.grad_query.head_dim);
}

template <int kHeadDim, DataType kDataType>
void launch_attention_backward_query_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                          Stream stream) {
    using Config = BackwardConfigSm80<kHeadDim>;
    const int64_t num_ctas =
        int64_t{ceil_div(params.query.rows, Config::kBlockM)} * params.query.heads * params.query.batch;
    const Launch launch{num_ctas, Config::kNumThreads, 0};
    kernel.launch(attention_backward_query_sm80<kHeadDim, kDataType>, launch, params, stream);
}

}  // namespace fastattn
