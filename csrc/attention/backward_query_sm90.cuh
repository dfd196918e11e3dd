// The end of the backward pass on Hopper: multiplies dQ's sums over all keys by the scale, and rounds the products to
// dQ, or adds them to an fp32 gradient (sum_query). Does the same for dK and dV of split key tiles.
//
// One CTA owns one row tile of one head. CTAs with higher indices own 64 keys of dK or dV each. Memory bandwidth limits
// the kernel.
//
//   panels (query_sums.h), 16 bytes a lane → registers → exchange pairs of columns with the neighbouring lane →
//   scale, round → rows of the gradient, 8 bytes a lane
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward.h"
#include "attention/backward_config_wide_sm90.cuh"
#include "attention/backward_work_sm90.cuh"
#include "attention/query_sums.h"
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

// Rounds factor · sums into up to 64 rows of `gradient` or, if `total` has data, adds factor · sums to rows of `total`.
// The rows have gradient.head_dim columns in both cases. num_rows: how many rows exist from row first_in_memory on; can
// be more than 64, or <= 0.
template <int kHeadDim, DataType kDataType>
FASTATTN_DEVICE void finish_sums(const HeadsView<uint16_t>& gradient, const HeadsView<float>& total, int32_t batch,
                                 int32_t head, int32_t first_in_memory, int32_t num_rows, const float* sums,
                                 float factor) {
    if (num_rows <= 0) return;
    constexpr int kQuad = 4, kPairsAtOnce = 2;  // kPairsAtOnce loads of 32 bytes are in flight together
    constexpr int kPairs = query_tile_elements(/*in_panels=*/true, kPanelRows, kHeadDim) / (2 * kPanelBlockElements);
    constexpr int kPairsPerPass = kQueryThreadsSm90 / kWarpgroupSize;
    static_assert(kPairs % (kPairsAtOnce * kPairsPerPass) == 0, "all lanes exchange in every pass");
    const int thread = threadIdx.x % kWarpgroupSize, lane = thread % kWarpSize, warp_row = thread / kWarpSize * kMmaM;
    const bool is_odd = lane % 2 != 0;
    const auto exchange = [](float value) { return __shfl_xor_sync(0xffffffff, value, 1); };
#pragma unroll 1
    for (int pair = threadIdx.x / kWarpgroupSize; pair < kPairs; pair += kPairsAtOnce * kPairsPerPass) {
        float4 left[kPairsAtOnce], right[kPairsAtOnce];  // of two adjacent blocks of 8 columns
#pragma unroll
        for (int i = 0; i < kPairsAtOnce; ++i) {
            const float* own = sums + 2 * (pair + i * kPairsPerPass) * kPanelBlockElements + thread * kQuad;
            left[i] = *reinterpret_cast<const float4*>(own);
            right[i] = *reinterpret_cast<const float4*>(own + kPanelBlockElements);
        }
#pragma unroll
        for (int i = 0; i < kPairsAtOnce; ++i) {
            // In each block, a lane has two columns of two rows. Neighbouring lanes swap one block: an even lane then
            // has four columns of the left block, and its odd neighbour four columns of the right block. So each lane
            // stores four columns of a row at a time.
            const float4 sent = is_odd ? left[i] : right[i];
            const float4 received{exchange(sent.x), exchange(sent.y), exchange(sent.z), exchange(sent.w)};
            const float4 first = is_odd ? received : left[i], second = is_odd ? right[i] : received;
            const int column = (2 * (pair + i * kPairsPerPass) + is_odd) * kMmaN + lane % kLanesPerRow / 2 * kQuad;
            const auto finish = [&](int32_t row, float4 quad) {
                if (row >= num_rows || column >= gradient.head_dim) return;
                if (total.data != nullptr) {
                    float* gRow = row_pointer(total, batch, head, first_in_memory + row);
                    add_weighted(*reinterpret_cast<float4*>(gRow + column), factor, quad);
                } else {
                    uint16_t* gRow = row_pointer(gradient, batch, head, first_in_memory + row);
                    store_rounded<kDataType>(gRow + column, quad, factor);
                }
            };
            finish(warp_row + accumulator_row(lane), {first.x, first.y, second.x, second.y});
            finish(warp_row + accumulator_row(lane) + 8, {first.z, first.w, second.z, second.w});
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
    ptx::griddepcontrol_wait();  // waits until the previous kernel has written the sums
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
            params.grad_query, params.sum_query, batch, head, rows.begin + first_row, rows.length - first_row,
            params.query_sums + (sums_tile * params.query.heads + head) * kElements, params.scores.scale);
        return;
    }

    constexpr int kBlocks = Config::kBlockN / kPanelRows;
    const uint32_t block = blockIdx.x - num_query_ctas, split_tile = block / (2 * kBlocks);
    // Ranges of keys are ignored here: with ranges, key tiles are never split (scheduler/choose_row_splits.h).
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
        keys.head, keys.sequence_begin + first_key, keys.num_keys - first_key,
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
