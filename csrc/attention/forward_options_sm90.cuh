// Attention forward for Hopper with every option: what forward_sm90.cuh computes, with softcap, ALiBi or a bias on the
// scores, dropout, and ranges of keys. Roles, rings, work tiles and shared memory are those of forward_sm90.cuh.
//
// A work tile has rows of one head. After Q·Kᵀ, a step computes the scores (scale, softcap, bias, mask), the softmax,
// and then dropout. Every step computes row maxima before the exponentials, because P overwrites the scores. The loop
// starts in the middle of a step, so that the code of all these passes exists only once:
//
//   tensor cores   Q·K0ᵀ |                    Q·K1ᵀ | P0·V0 |                    Q·K2ᵀ | P1·V1 | …
//   other pipes          | scores, P0, dropout       | scores, P1, dropout              | scores, P2, dropout
//
// Options are chosen at run time by branches, which all threads of a CTA take alike. A bias may hide keys in any tile,
// so every step waits until NaN and infinity in V are zeroed. With ranges of keys, key_ranges_sm80.cuh lists the key
// tiles to visit. Preconditions: those of HeadsView; head dims are multiples of 8, and at most kHeadDim and kValueDim.
// Takes any lengths, packed or not, any window, sinks, and any finite scale.
#pragma once

#include <cstdint>

#include "attention/forward.h"
#include "attention/forward_consumer_sm90.cuh"
#include "attention/paged_tiles_sm90.cuh"
#include "device/bias_tile.cuh"
#include "device/dropout.cuh"
#include "device/key_ranges.cuh"
#include "device/mask.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/scores.cuh"
#include "device/sequence.cuh"
#include "device/shared_memory.h"
#include "device/softmax.cuh"

namespace fastattn {

template <int kHeadDim, int kValueDim>
using ForwardOptionsConfigSm90 = ForwardConfigSm90<kHeadDim, kValueDim, ForwardOptionsTileSm90<kHeadDim, kValueDim>>;

template <int kHeadDim, int kValueDim, DataType kDataType>
__global__ void __launch_bounds__(ForwardOptionsConfigSm90<kHeadDim, kValueDim>::kNumThreads, 1)
    attention_forward_options_sm90(const __grid_constant__ AttentionForwardParamsSm90 all_params) {
    using Config = ForwardOptionsConfigSm90<kHeadDim, kValueDim>;
    constexpr int kBlockN = Config::kBlockN;
    constexpr int kTilesN = Config::kTilesN, kTilesD = Config::kTilesD, kTilesK = kBlockN / kMmaK;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardStorageSm90<Config>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);

    // Prologue.
    const AttentionForwardParams& params = all_params.attention;
    const ScoreParams& options = params.scores;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    const int cluster_size = all_params.schedule.cluster_size();
    start_cta(shared, all_params);

    // Producer.
    if (warpgroup == Config::kNumConsumers) {
        produce<kDataType>(shared, all_params, cluster_size, [&](const RowsOfCta& rows, int32_t first_key) {
            prefetch_bias(options.bias, rows.batch, rows.head, rows.first_row,
                          min(rows.num_rows() - rows.first_row, Config::kBlockM), first_key,
                          min(rows.keys.length - first_key, kBlockN), lane);
        });
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    ForwardConsumerSm90<Config, kDataType> consumer(shared, warpgroup, lane, cluster_size);

    const float output_factor = options.dropout_factor;
    for (const CtaWorkTile* next; (next = consumer.next_tile()) != nullptr; consumer.release_tile()) {
        const CtaWorkTile& tile = *next;
        consumer.wait_query();
        const RowsOfCta& rows = tile.rows;
        const KeyTiles& tiles = tile.key_tiles;
        const int32_t num_tiles = warp_uniform(tiles.num_tiles());
        const int32_t own_row = rows.first_row + warpgroup * kWarpgroupM + warp * kMmaM;
        const HeadScores scores(options, rows.batch, rows.head, rows.queries.length, rows.keys.length);
        BiasTile<kTilesN> bias(scores, own_row, lane);  // of the key tile of this step
        const Dropout dropout(options, rows.batch * params.query.heads + rows.head);
        OnlineSoftmax<1, /*kInNats=*/true> softmax(kLog2E);
        if (options.sinks != nullptr && tile.is_first_split()) {  // only one split may count the sink
            softmax.set_sink(options.sinks[rows.head], lane % kLanesPerRow == 0);
        }
        float rO[1][kTilesD][4];  // [64, kValueDim] of the warpgroup
        float rS[1][kTilesN][4];  // [64, kBlockN]: scores, then probabilities
        uint32_t rP[kTilesK][4];  // [64, kBlockN] 16-bit
        set_zero(rO);

        const MissingPages<Config> missing(shared, params, rows, tiles, warpgroup);

        if (params.max_logits != nullptr) shared.largest_scores.start(rows.num_rows() - own_row);

        // Turns Q·Kᵀ of a tile into scores in nats: -inf where a row does not see a key.
        const auto to_scores = [&](int32_t first_key, bool is_masked) {
            scores.to_unbiased_scores(rS, own_row, first_key, lane);
            bias.add_to(rS, first_key);
            if (is_masked) {
                const uint32_t present = missing.present_in_order(first_key, lane);
                const RowRanges ranges(options.ranges, rows.batch, rows.head, rows.queries);
                mask_scores(rS, lane, [&](int, int, int row) {
                    return present & scores.own_columns(own_row + row, first_key, lane, [&] { return ranges; });
                });
            }
        };

        const auto key_tile = [&](int32_t num_left) {
            return tile.template key_tile<Config::kTakesRanges>(params, num_left);
        };
        if (num_tiles > 0) {
            bias.load(key_tile(num_tiles) * kBlockN);
            consumer.start_qk(rS);
            consumer.template wait_qk<0>(rS);  // leaves no product in flight
            for (int32_t num_left = num_tiles;; --num_left) {
                // In flight: P·V of the tile before, if there is one.
                const int32_t first_key = key_tile(num_left) * kBlockN;
                const bool is_masked = num_left > missing.num_unmasked();
                to_scores(first_key, is_masked);
                const auto max = maxima_of_lane(rS);
                if (params.max_logits != nullptr) shared.largest_scores.update(max);
                const bool grows = softmax.is_outgrown_by(max);
                RowValues<1> factor{{{1.0f, 1.0f}}};
                if (grows) factor = softmax.follow(max);
                softmax.exponentiate(rS);
                if (options.dropout_seed != nullptr) dropout.drop(rS, own_row, first_key, lane);
                consumer.wait_pv(rO);  // leaves no product in flight
                if (num_left < num_tiles) consumer.release_value();
                if (grows) rescale(rO, factor);
#pragma unroll
                for (int k = 0; k < kTilesK; ++k) accumulators_to_a<kDataType>(rP[k], rS[0][2 * k], rS[0][2 * k + 1]);
                consumer.wait_finite_value();
                if (num_left == 1) break;
                consumer.start_qk(rS);
                consumer.start_pv(rO, rP);
                bias.load(key_tile(num_left - 1) * kBlockN);
                consumer.template wait_qk<1>(rS);  // leaves P·V in flight
            }
            consumer.release_query();
            consumer.start_pv(rO, rP);
            consumer.wait_pv(rO);  // leaves no product in flight
            consumer.release_value();
        } else {
            consumer.release_query();
        }

        // Epilogue.
        consumer.add_nonfinite_values(params, tile, rO, [&](int32_t row, int32_t key) {
            // Made here again, because keeping `scores` would take registers in the loop.
            const HeadScores late(options, rows.batch, rows.head, rows.queries.length, rows.keys.length);
            const bool is_in_range = options.ranges.data == nullptr ||
                                     RowRanges(options.ranges, rows.batch, rows.head, rows.queries).sees(row, key);
            return is_in_range && late.sees(row, key);
        });
        if (params.max_logits != nullptr) {
            shared.largest_scores.reduce_into(params.max_logits + rows.head, /*factor=*/1.0f);
        }
        consumer.write_rows(params, tile, own_row, rO, softmax, output_factor);
    }
    consumer.combine_split_tiles(params, output_factor);
    wait_for_cluster(cluster_size);  // waits until no CTA will arrive at this CTA's barriers any more
}

template <int kHeadDim, int kValueDim, DataType kDataType>
void launch_attention_forward_options_sm90(LaunchedKernel& kernel, const AttentionForwardParams& params,
                                           Stream stream) {
    launch_forward_sm90<ForwardOptionsConfigSm90<kHeadDim, kValueDim>, kDataType>(
        kernel, attention_forward_options_sm90<kHeadDim, kValueDim, kDataType>, params, /*packs_heads=*/false, stream);
}

}  // namespace fastattn
