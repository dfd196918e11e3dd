// Attention backward, the gradient of an additive bias: dS, summed over the dims along which the bias is broadcast.
//
//   P = exp(S - shift) / 2^log2_sum,  dS = P (dropout(dO·Vᵀ) - delta)
//
// One CTA owns 64 x 64 elements of the bias (fewer if the bias has one row or one key). For every batch, head, row tile
// and key tile that reads these elements, it recomputes dS and adds it to sums in registers, in a fixed order and
// without atomics. Each of 4 warps owns 32 x 32 elements. device/chunked_gemm.cuh pipelines S and dO·Vᵀ:
//
//   copy     Q K | dO V    Q K of the next tile | dO V …
//   multiply     | Q·Kᵀ    dO·Vᵀ                | Q·Kᵀ …
//
// Skips tiles in which no row sees a key through the window or ranges of keys. Sequences must be dense, not packed.
// Preconditions: those of HeadsView, head dims multiples of 8.
#pragma once

#include "attention/backward.h"
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
struct BackwardBiasConfigSm80 {
    // For 64 dims of a 64 x 64 product, a warp executes 32 HMMA, 16 LDSM and 8 LDGSTS. The kernel takes 252 registers;
    // S, dP, the bias and the sums take 32 each. With 168 registers, so that three CTAs fit on an SM, the kernel
    // spilled 224 bytes.
    static constexpr int kTilesM = 2, kTilesN = 4;  // of a warp
    using Gemm = ChunkedGemm<kDataType, /*kWarpsM=*/2, /*kWarpsN=*/2, kTilesM, kTilesN>;
    static constexpr int kBlockM = Gemm::kBlockM, kBlockN = Gemm::kBlockN, kNumThreads = Gemm::kNumThreads;
    static constexpr int kMinCtasPerSm = 2;
    // Rows of the sums start 8 banks apart. So half a warp, which stores 8 bytes from each of 4 lanes in each of 4
    // rows, covers all 32 banks.
    static constexpr int kGradPitch = kBlockN + 8;
};

template <typename Config>
union BackwardBiasStorageSm80 {
    typename Config::Gemm::Storage gemm;
    float sSums[Config::kBlockM][Config::kGradPitch];  // the sums of all warps, at the end
};

struct BiasTileIndex {
    int32_t batch, head, row_tile, key_tile;
};

// The tiles that a CTA sums over, in order, with key tiles innermost. Along a dim in which the bias has size 1, the CTA
// sums over all tiles in which some row sees a key. Along any other dim, it sums over the one tile that it owns.
template <int kBlockM, int kBlockN>
class BiasTiles {
  public:
    BiasTileIndex owned;  // the CTA's tile of the bias; 0 along dims of size 1

    FASTATTN_DEVICE BiasTiles(const AttentionBackwardParams& params, uint32_t cta)
        : params_(params), window_(window_of(params.scores, params.query.rows, params.key.rows)) {
        const BiasGradientView& bias = params.grad_bias;
        owned.key_tile = take(cta, ceil_div(bias.keys, kBlockN));
        owned.row_tile = take(cta, ceil_div(bias.rows, kBlockM));
        owned.head = take(cta, bias.heads);
        owned.batch = take(cta, bias.batch);
        begin_row_tile_ = owned.row_tile;
        end_row_tile_ = bias.rows == 1 ? ceil_div(params.query.rows, kBlockM) : owned.row_tile + 1;
        if (bias.rows == 1 && bias.keys != 1) {
            const int32_t first_key = owned.key_tile * kBlockN;
            const int32_t last_key = min(first_key + kBlockN, params.key.rows) - 1;
            begin_row_tile_ = window_.rows_of(first_key, params.query.rows).begin / kBlockM;
            end_row_tile_ = ceil_div(window_.rows_of(last_key, params.query.rows).end, kBlockM);
        }
    }

    FASTATTN_DEVICE BiasTileIndex first() const {
        const bool is_empty = begin_row_tile_ >= end_row_tile_ || owned.head == end_head();
        return seen_from({is_empty ? end_batch() : owned.batch, owned.head, begin_row_tile_, 0});
    }

    // Returns the next tile; after the last tile, one that contains() rejects.
    FASTATTN_DEVICE BiasTileIndex after(BiasTileIndex tile) const {
        ++tile.key_tile;
        return seen_from(tile);
    }

    FASTATTN_DEVICE bool contains(const BiasTileIndex& tile) const { return tile.batch < end_batch(); }

  private:
    const AttentionBackwardParams& params_;
    const Window window_;
    int32_t begin_row_tile_, end_row_tile_;

    FASTATTN_DEVICE static int32_t take(uint32_t& cta, uint32_t num) {
        const auto index = static_cast<int32_t>(cta % num);
        cta /= num;
        return index;
    }

    // Returns the given tile if some of its rows sees some of its keys, else the next tile for which this is true.
    FASTATTN_DEVICE BiasTileIndex seen_from(BiasTileIndex tile) const {
        while (contains(tile)) {
            const int32_t first_row = tile.row_tile * kBlockM;
            const int32_t last_row = min(first_row + kBlockM, params_.query.rows) - 1;
            const bool is_owned = params_.grad_bias.keys != 1;
            const int32_t begin = window_.keys_of(first_row).begin / kBlockN;
            const int32_t end = ceil_div(window_.keys_of(last_row).end, kBlockN);
            tile.key_tile = max(tile.key_tile, is_owned ? max(begin, owned.key_tile) : begin);
            if (tile.key_tile < (is_owned ? min(end, owned.key_tile + 1) : end)) {
                if (may_see_through_ranges(tile)) break;
                ++tile.key_tile;
                continue;
            }
            tile.key_tile = 0;
            if (++tile.row_tile < end_row_tile_) continue;
            tile.row_tile = begin_row_tile_;
            if (++tile.head < end_head()) continue;
            tile.head = owned.head;
            ++tile.batch;
        }
        return tile;
    }

    FASTATTN_DEVICE bool may_see_through_ranges(const BiasTileIndex& tile) const {
        return params_.scores.ranges.data == nullptr ||
               may_see(params_.seen_tiles, tile.batch, tile.head, {0, params_.query.rows}, params_.key.rows,
                       tile.row_tile * kBlockM, tile.key_tile * kBlockN, kBlockN);
    }

    FASTATTN_DEVICE int32_t end_head() const {
        return params_.grad_bias.heads == 1 ? params_.query.heads : owned.head + 1;
    }
    FASTATTN_DEVICE int32_t end_batch() const {
        return params_.grad_bias.batch == 1 ? params_.query.batch : owned.batch + 1;
    }
};

// Sums over the rows or keys of the CTA's tile if the bias is broadcast along them, and stores the result. Called by
// all threads of the CTA.
template <typename Config>
FASTATTN_DEVICE void store_gradients(const BiasGradientView& view, const BiasTileIndex& owned,
                                     float (&sSums)[Config::kBlockM][Config::kGradPitch]) {
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kNumThreads = Config::kNumThreads;
    const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
    const bool sums_rows = view.rows == 1, sums_keys = view.keys == 1;
    if (sums_keys) {
        static_assert(kBlockN == 2 * kWarpSize, "two for each lane");
        for (int row = warp; row < kBlockM; row += kNumThreads / kWarpSize) {
            const float sum = warp_reduce_sum(sSums[row][lane] + sSums[row][lane + kWarpSize]);
            if (lane == 0) sSums[row][0] = sum;
        }
        __syncthreads();  // waits until every row's sum is in shared memory
    }
    const int num_columns = sums_keys ? 1 : kBlockN, num_rows = sums_rows ? 1 : kBlockM;
    if (sums_rows) {
        float sum = 0.0f;
        for (int row = 0; row < kBlockM && thread < num_columns; ++row) sum += sSums[row][thread];
        if (thread < num_columns) sSums[0][thread] = sum;
        __syncthreads();  // waits until every column's sum is in shared memory
    }
    float* gHead = view.data + owned.batch * view.batch_stride + owned.head * view.head_stride;
    for (int i = thread; i < num_rows * num_columns; i += kNumThreads) {
        const int row_in_tile = i / num_columns, column = i % num_columns;
        const int32_t row = owned.row_tile * kBlockM + row_in_tile;
        const int32_t key = owned.key_tile * kBlockN + column;
        if (row >= view.rows || key >= view.keys) continue;
        gHead[row * view.row_stride + key * view.key_stride] = sSums[row_in_tile][column];
    }
}

template <DataType kDataType>
__global__ void __launch_bounds__(BackwardBiasConfigSm80<kDataType>::kNumThreads,
                                  BackwardBiasConfigSm80<kDataType>::kMinCtasPerSm)
    attention_backward_bias_sm80(const __grid_constant__ AttentionBackwardParams params) {
    using Config = BackwardBiasConfigSm80<kDataType>;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
    constexpr int kTilesM = Config::kTilesM, kTilesN = Config::kTilesN;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<BackwardBiasStorageSm80<Config>*>(shared_bytes);
    static_assert(ctas_with_room(sizeof(shared), kSharedBytesSm86) >= Config::kMinCtasPerSm,
                  "also with the shared memory of sm_86");

    // Prologue: finds the CTA's tiles and their operands in memory.
    const ScoreParams& options = params.scores;
    const int lane = threadIdx.x % kWarpSize;
    const int32_t num_rows = params.query.rows, num_keys = params.key.rows;
    const int32_t group_size = params.query.heads / params.key.heads;
    static_assert(kBlockM == kBlockN, "may_see() takes a square");
    const BiasTiles<kBlockM, kBlockN> tiles(params, blockIdx.x);
    const auto rows_of = [&](const HeadsView<const uint16_t>& view, int32_t batch, int32_t head, int32_t first) {
        return GemmRows{row_pointer(view, batch, head, first), view.row_stride, view.rows - first};
    };
    const auto operands_of = [&](const BiasTileIndex& tile, const HeadsView<const uint16_t>& a,
                                 const HeadsView<const uint16_t>& b) -> GemmOperands {
        if (!tiles.contains(tile)) return {};
        return {rows_of(a, tile.batch, tile.head, tile.row_tile * kBlockM),
                rows_of(b, tile.batch, tile.head / group_size, tile.key_tile * kBlockN), a.head_dim};
    };

    float rG[kTilesM][kTilesN][4] = {};
    typename Config::Gemm gemm(shared.gemm, threadIdx.x);
    BiasTileIndex tile = tiles.first();
    gemm.start(operands_of(tile, params.query, params.key));
    while (tiles.contains(tile)) {
        const int32_t warp_row = tile.row_tile * kBlockM + gemm.warp_row;
        const int32_t first_key = tile.key_tile * kBlockN + gemm.warp_column;
        const BiasTileIndex next = tiles.after(tile);
        const GemmOperands grad_out_and_value = operands_of(tile, params.grad_out, params.value);
        const HeadScores scores(options, tile.batch, tile.head, num_rows, num_keys);
        uint32_t rB[kTilesM][kTilesN][4];
        float rS[kTilesM][kTilesN][4], rDP[kTilesM][kTilesN][4];
        scores.load_bias(rB, warp_row, first_key, lane);
        const RowTermsOfLane<kTilesM> rows(params, tile.batch, tile.head, {0, num_rows}, warp_row, lane);

        gemm.multiply(rS, operands_of(tile, params.query, params.key), grad_out_and_value);
        gemm.multiply(rDP, grad_out_and_value, operands_of(next, params.query, params.key));
        scores.to_scores_with(rB, rS, warp_row, first_key, lane);
        scores.mask(rS, warp_row, first_key, lane,
                    [&] { return RowRanges(options.ranges, tile.batch, tile.head, {0, num_rows}); });
        if (options.dropout_seed != nullptr) {
            const Dropout dropout(options, static_cast<uint32_t>(tile.batch * params.query.heads + tile.head));
            dropout.drop(rDP, warp_row, first_key, lane);
        }
        for_score_gradients(rS, rDP, rows, options.dropout_factor, num_rows - warp_row, lane,
                            [&](int m, int n, int e, float gradient) { rG[m][n][e] += gradient; });
        tile = next;
    }

    // Epilogue: puts the sums of all warps into shared memory.
    __syncthreads();  // waits until every warp has read the operands, which the sums overwrite
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            float* sum = &shared.sSums[gemm.warp_row + row][gemm.warp_column + n * kMmaN + accumulator_column(lane)];
            *reinterpret_cast<float2*>(sum) = {rG[m][n][2 * half], rG[m][n][2 * half + 1]};
        }
    });
    __syncthreads();  // waits until every warp's sums are in shared memory
    store_gradients<Config>(params.grad_bias, tiles.owned, shared.sSums);
}

template <DataType kDataType>
void launch_attention_backward_bias_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params, Stream stream) {
    using Config = BackwardBiasConfigSm80<kDataType>;
    const BiasGradientView& bias = params.grad_bias;
    const int64_t num_ctas =
        int64_t{bias.batch} * bias.heads * ceil_div(bias.rows, Config::kBlockM) * ceil_div(bias.keys, Config::kBlockN);
    const Launch launch{num_ctas, Config::kNumThreads, sizeof(BackwardBiasStorageSm80<Config>)};
    kernel.launch(attention_backward_bias_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
