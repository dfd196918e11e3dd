// Attention backward, the gradient of ALiBi slopes, summed over each row tile:
//
//   slope_sums[tile, head] = sum of -dS * |i + Sk - Sq - j|,  dS = P (dropout(dO·Vᵀ) - delta)
//
// One CTA owns 64 rows of a head and walks over the keys that these rows see, 64 at a time. The order is fixed and
// there are no atomics, so that the result has the same bits every time. Each of 4 warps owns 32 x 32 elements of a
// tile. device/chunked_gemm.cuh pipelines S and dO·Vᵀ:
//
//   copy     Q K | dO V    Q K of the next tile | dO V …
//   multiply     | Q·Kᵀ    dO·Vᵀ                | Q·Kᵀ …
//
// backward_slope_sums_sm80.cuh adds up the sums of row tiles. Preconditions: those of HeadsView; head dims are
// multiples of 8.
#pragma once

#include "attention/backward.h"
#include "attention/query_sums.h"
#include "attention/score_gradients_sm80.cuh"
#include "attention/seen_tiles.cuh"
#include "device/chunked_gemm.cuh"
#include "device/dropout.cuh"
#include "device/fragment.cuh"
#include "device/key_ranges.cuh"
#include "device/reduce.cuh"
#include "device/scores.cuh"
#include "device/shared_memory.h"
#include "device/tile_copy.cuh"
#include "host/launch.h"

namespace fastattn {

template <DataType kDataType>
struct BackwardSlopesConfigSm80 {
    static constexpr int kTilesM = 2, kTilesN = 4;  // of a warp
    using Gemm = ChunkedGemm<kDataType, /*kWarpsM=*/2, /*kWarpsN=*/2, kTilesM, kTilesN>;
    static constexpr int kBlockM = Gemm::kBlockM, kBlockN = Gemm::kBlockN, kNumThreads = Gemm::kNumThreads;
    // With 168 registers, so that three CTAs fit on an SM, 16 bytes spilled.
    static constexpr int kMinCtasPerSm = 2;
    static_assert(kBlockM == kSlopesBlockM, "the workspace has one sum for each tile of kSlopesBlockM rows");
};

template <typename Config>
struct BackwardSlopesStorageSm80 {
    typename Config::Gemm::Storage gemm;
    float sSums[Config::kNumThreads / kWarpSize];  // of each warp
};

template <DataType kDataType>
__global__ void __launch_bounds__(BackwardSlopesConfigSm80<kDataType>::kNumThreads,
                                  BackwardSlopesConfigSm80<kDataType>::kMinCtasPerSm)
    attention_backward_slopes_sm80(const __grid_constant__ AttentionBackwardParams params) {
    using Config = BackwardSlopesConfigSm80<kDataType>;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    constexpr int kTilesM = Config::kTilesM, kTilesN = Config::kTilesN;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<BackwardSlopesStorageSm80<Config>*>(shared_bytes);
    static_assert(ctas_with_room(sizeof(shared), kSharedBytesSm86) >= Config::kMinCtasPerSm,
                  "also with the shared memory of sm_86");

    // Prologue: finds the CTA's rows and the operands in memory. CTAs start with the last rows, because these see the
    // most keys under a causal mask.
    const ScoreParams& options = params.scores;
    const int lane = threadIdx.x % kWarpSize;
    const int32_t num_tiles = ceil_div(params.query.rows, kBlockM);
    const int32_t row_tile = num_tiles - 1 - blockIdx.x % num_tiles, head_idx = blockIdx.x / num_tiles;
    const int32_t head = head_idx % params.query.heads, batch = head_idx / params.query.heads;
    const int32_t key_head = head / (params.query.heads / params.key.heads), first_row = row_tile * kBlockM;
    const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
    const Sequence keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
    if (first_row >= rows.length) return;
    const HeadScores scores(options, batch, head, rows.length, keys.length);
    const int32_t num_rows = min(kBlockM, rows.length - first_row);
    const int32_t begin_tile = scores.window.keys_of(first_row).begin / kBlockN;
    const int32_t end_tile = ceil_div(scores.window.keys_of(first_row + num_rows - 1).end, kBlockN);
    const auto operands_of = [&](const HeadsView<const uint16_t>& a, const HeadsView<const uint16_t>& b,
                                 int32_t key_tile) -> GemmOperands {
        if (key_tile >= end_tile) return {};
        const int32_t key = key_tile * kBlockN;
        return {{row_pointer(a, batch, head, rows.begin + first_row), a.row_stride, num_rows},
                {row_pointer(b, batch, key_head, keys.begin + key), b.row_stride, keys.length - key},
                a.head_dim};
    };

    static_assert(kBlockM == kBlockN, "may_see() takes a square");
    const auto seen_from = [&](int32_t key_tile) {  // this tile, or the next in which some row may see some key
        while (options.ranges.data != nullptr && key_tile < end_tile &&
               !may_see(params.seen_tiles, batch, head, rows, keys.length, first_row, key_tile * kBlockN, kBlockN)) {
            ++key_tile;
        }
        return key_tile;
    };

    typename Config::Gemm gemm(shared.gemm, threadIdx.x);
    const int32_t first_tile = seen_from(begin_tile);
    gemm.start(operands_of(params.query, params.key, first_tile));
    const int32_t warp_row = first_row + gemm.warp_row;
    const RowTermsOfLane<kTilesM> terms(params, batch, head, rows, warp_row, lane);
    const int32_t position = warp_row + scores.window.offset + accumulator_row(lane) - accumulator_column(lane);
    float sum = 0.0f;
    for (int32_t key_tile = first_tile, next_tile; key_tile < end_tile; key_tile = next_tile) {
        next_tile = seen_from(key_tile + 1);
        const int32_t first_key = key_tile * kBlockN + gemm.warp_column;
        const GemmOperands grad_out_and_value = operands_of(params.grad_out, params.value, key_tile);
        float rS[kTilesM][kTilesN][4], rDP[kTilesM][kTilesN][4];

        gemm.multiply(rS, operands_of(params.query, params.key, key_tile), grad_out_and_value);
        gemm.multiply(rDP, grad_out_and_value, operands_of(params.query, params.key, next_tile));
        scores.to_scores(rS, warp_row, first_key, lane);
        scores.mask(rS, warp_row, first_key, lane, [&] { return RowRanges(options.ranges, batch, head, rows); });
        if (options.dropout_seed != nullptr) {
            const Dropout dropout(options, static_cast<uint32_t>(head_idx));
            dropout.drop(rDP, warp_row, first_key, lane);
        }
        const int32_t ahead = position - first_key;
        for_score_gradients(rS, rDP, terms, options.dropout_factor, rows.length - warp_row, lane,
                            [&](int m, int n, int e, float gradient) {
                                const int32_t distance = abs(ahead + m * kMmaM + 8 * (e / 2) - n * kMmaN - e % 2);
                                sum = fmaf(gradient, -static_cast<float>(distance), sum);
                            });
    }

    // Epilogue: adds up the sums of all lanes and warps.
    sum = warp_reduce_sum(sum);
    if (lane == 0) shared.sSums[threadIdx.x / kWarpSize] = sum;
    __syncthreads();  // waits until every warp's sum is in shared memory
    if (threadIdx.x != 0) return;
    float sum_of_tile = 0.0f;
    for (const float sum_of_warp : shared.sSums) sum_of_tile += sum_of_warp;
    const int32_t first_sums_tile =
        first_query_tile(batch, params.query.rows, params.packed.cu_seqlens_q != nullptr, rows.begin, kBlockM);
    params.slope_sums[int64_t{first_sums_tile + row_tile} * params.query.heads + head] = sum_of_tile;
}

template <DataType kDataType>
void launch_attention_backward_slopes_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                           Stream stream) {
    using Config = BackwardSlopesConfigSm80<kDataType>;
    const int64_t num_tiles = ceil_div(params.query.rows, Config::kBlockM);
    const Launch launch{num_tiles * params.query.heads * params.query.batch, Config::kNumThreads,
                        sizeof(BackwardSlopesStorageSm80<Config>)};
    kernel.launch(attention_backward_slopes_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
