// The end of the backward pass on Hopper: dQ = scale · (the sums over all keys), rounded, or added to fp32; and
// likewise dK and dV of split key tiles.
//
// One CTA owns one row tile of one head or, after the row tiles, 64 keys of dK or dV. Memory bandwidth binds.
//
//   panels (query_gradient.h), 16 bytes a lane → registers → scale, round → rows of the gradient, 8 bytes a lane
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward.h"
#include "attention/backward_config_wide_sm90.cuh"
#include "attention/backward_work_sm90.cuh"
#include "attention/query_gradient.h"
#include "attention/tiles_sm90.h"
#include "device/finish_row.cuh"
#include "device/fragment.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/sequence.cuh"
#include "device/tile_copy.cuh"
#include "host/launch.h"
#include "scheduler/row_splits.h"

namespace fastattn {

inline constexpr int kQueryThreadsSm90 = 256;

// Rounds factor · sums into `gradient`, or adds it to `total`. The gradient has 64 rows from first_in_memory on, of
// which num_rows exist.
template <int kHeadDim, DataType kDataType>
FASTATTN_DEVICE void finish_sums(const HeadsView<uint16_t>& gradient, const HeadsView<float>& total, int32_t batch,
                                 int32_t head, int64_t first_in_memory, int32_t num_rows, const float* sums,
                                 float factor) {
    constexpr int kQuad = 4, kQuadsPerRow = kPanelDims / kQuad;
    constexpr int kElements = query_tile_elements(/*in_panels=*/true, kPanelRows, kHeadDim);
#pragma unroll 4
    for (int i = threadIdx.x; i < kElements / kQuad; i += kQueryThreadsSm90) {
        const int panel = i / (kPanelElements / kQuad), row = i / kQuadsPerRow % kPanelRows;
        const int panel_column = i % kQuadsPerRow * kQuad;
        const int column = panel * kPanelDims + panel_column;
        if (row >= num_rows || column >= gradient.head_dim) continue;
        const float* numbers =
            sums + panel * kPanelElements + panel_offset(row, panel_column / kMmaN) + panel_column % kMmaN;
        const float4 quad = *reinterpret_cast<const float4*>(numbers);
        if (total.data != nullptr) {
            auto& four = *reinterpret_cast<float4*>(row_pointer(total, batch, head, first_in_memory + row) + column);
            add_weighted(four, factor, quad);
        } else {
            store_rounded<kDataType>(row_pointer(gradient, batch, head, first_in_memory + row) + column, quad, factor);
        }
    }
}

// The config of the kernel that wrote the sums.
template <int kHeadDim>
using SummingConfigSm90 = std::conditional_t<(kHeadDim > kMostNarrowDims), BackwardWideConfigSm90<kHeadDim, kHeadDim>,
                                             BackwardConfigSm90<kHeadDim>>;

template <int kHeadDim, DataType kDataType>
__global__ void __launch_bounds__(kQueryThreadsSm90)
    attention_backward_query_sm90(const __grid_constant__ AttentionBackwardParams params) {
    using Config = SummingConfigSm90<kHeadDim>;
    constexpr int kBlockM = Config::kBlockM, kElements = query_tile_elements(/*in_panels=*/true, kBlockM, kHeadDim);
    static_assert(kBlockM == kPanelRows, "a panel has all rows of a tile");
    ptx::griddepcontrol_wait();  // waits until the kernel before has written the sums
    const bool is_packed = params.packed.cu_seqlens_q != nullptr;
    const int32_t num_tiles = ceil_div(params.query.rows, kBlockM);
    const uint32_t num_query_ctas = num_tiles * params.query.heads * params.query.batch;
    if (blockIdx.x < num_query_ctas) {
        const int32_t tile = blockIdx.x % num_tiles, head = blockIdx.x / num_tiles % params.query.heads;
        const int32_t batch = blockIdx.x / num_tiles / params.query.heads;
        const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        const int32_t first_row = tile * kBlockM;
        const int64_t sums_tile = first_query_tile(batch, params.query.rows, is_packed, rows.begin, kBlockM) + tile;
        finish_sums<kHeadDim, kDataType>(
            params.grad_query, params.sum_query, batch, head, int64_t{rows.begin} + first_row, rows.length - first_row,
            params.query_sums + (sums_tile * params.query.heads + head) * kElements, params.scores.scale);
        return;
    }

    constexpr int kBlocks = Config::kBlockN / kPanelRows;
    const uint32_t block = blockIdx.x - num_query_ctas, split_tile = block / (2 * kBlocks);
    const KeyTileOrder order(params, Config::kBlockN, threadIdx.x % kWarpSize);
    WorkTile found;
    KeyWorkTile<Config> keys;
    const RowSplit first_split{params.row_splits.first_tile + split_tile, 0};
    if (!order.find(found, params, first_split.tile, Config::kBlockN)) return;
    if (!keys.find(params, first_split, found) || !keys.is_split()) return;
    const bool is_value = block / kBlocks % 2 != 0;
    const int32_t first_key = keys.first_key + block % kBlocks * kPanelRows;
    finish_sums<kHeadDim, kDataType>(
        is_value ? params.grad_value : params.grad_key, is_value ? params.sum_value : params.sum_key, keys.batch,
        keys.head, int64_t{keys.sequence_begin} + first_key, keys.num_keys - first_key,
        params.key_sums + int64_t{block} * kElements, is_value ? params.scores.dropout_factor : params.scores.scale);
}

template <int kHeadDim, DataType kDataType>
void launch_attention_backward_query_sm90(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                          Stream stream) {
    using Config = SummingConfigSm90<kHeadDim>;
    const int64_t num_query_ctas =
        int64_t{ceil_div(params.query.rows, Config::kBlockM)} * params.query.heads * params.query.batch;
    const int64_t num_key_ctas = num_split_tiles(params, Config::kBlockN) * 2 * (Config::kBlockN / kPanelRows);
    kernel.launch(attention_backward_query_sm90<kHeadDim, kDataType>,
                  {num_query_ctas + num_key_ctas, kQueryThreadsSm90, 0, /*cluster_size=*/1, /*is_dependent=*/true},
                  params, stream);
}

}  // namespace fastattn
