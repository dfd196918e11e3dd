// Attention forward for Hopper: O = softmax(scale · Q·Kᵀ + mask) · V, and the lse. FlashAttention-2 (Dao 2023,
// algorithm 1) with the roles and overlaps of FlashAttention-3 (Shah et al. 2024). CTAs are persistent and take one
// work tile after another. A work tile has kBlockM rows: of one head, or of all heads that share a key head. If there
// are few work tiles, CTAs split the keys of each (key_splits.h). One warpgroup is the producer, and gives up registers
// to the others. Each of the others is a consumer and computes 64 rows of O.
//
//   ring, stages    consumers wait for `full`         consumers arrive at `empty`
//   work   2        before a work tile                after its output is stored
//   Q      1        before its first Q·Kᵀ             after its last Q·Kᵀ
//   K, V   kStages  before Q·Kᵀ, before P·V           after Q·Kᵀ, after P·V
//
// A consumer has up to two products in flight, each in a wgmma group of its own: Q·Kᵀ of a key tile, and P·V of the key
// tile before. key_tiles.cuh has the order of key tiles.
//
//   tensor cores   Q·K0ᵀ |           Q·K1ᵀ | P0·V0 |           Q·K2ᵀ | P1·V1 | …   (gaps: products of other consumers)
//   other pipes          | softmax → P0    |       softmax → P1      |       softmax → P2
#pragma once

#include <cstdint>

#include "attention/forward.h"
#include "attention/forward_consumer_sm90.cuh"
#include "attention/paged_tiles_sm90.cuh"
#include "device/mask.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/sequence.cuh"
#include "device/shared_memory.h"
#include "device/softmax.cuh"
#include "device/variants.h"

namespace fastattn {

// Preconditions: those of HeadsView; head dims are multiples of 8, and at most kHeadDim and kValueDim. Takes any
// lengths, packed or not, any window, sinks, and any finite scale. The CTAs of a cluster of two need the same key
// tiles: each CTA copies one half of every key tile into the shared memory of both.
template <int kHeadDim, int kValueDim, DataType kDataType>
__global__ void __launch_bounds__(ForwardConfigSm90<kHeadDim, kValueDim>::kNumThreads, 1)
    attention_forward_sm90(const __grid_constant__ AttentionForwardParamsSm90 all_params) {
    using Config = ForwardConfigSm90<kHeadDim, kValueDim>;
    using QueryTile = typename Config::QueryTile;
    constexpr int kBlockN = Config::kBlockN;
    constexpr int kTilesN = Config::kTilesN, kTilesD = Config::kTilesD, kTilesK = kBlockN / kMmaK;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardStorageSm90<Config>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);

    // Prologue.
    const AttentionForwardParams& params = all_params.attention;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    const int cluster_size = all_params.schedule.cluster_size();
    start_cta(shared, all_params);

    // Producer.
    if (warpgroup == Config::kNumConsumers) {
        produce<kDataType>(shared, all_params, cluster_size, [](const RowsOfCta&, int32_t) {});
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    ForwardConsumerSm90<Config, kDataType> consumer(shared, warpgroup, lane, cluster_size);
    const float scale = params.scores.scale, sign = scale > 0 ? 1.0f : scale < 0 ? -1.0f : scale;

    for (const CtaWorkTile* next; (next = consumer.next_tile()) != nullptr; consumer.release_tile()) {
        const CtaWorkTile& tile = *next;
        consumer.wait_query();
        const RowsOfCta& rows = tile.rows;
        const KeyTiles& tiles = tile.key_tiles;
        const int32_t num_tiles = warp_uniform(tiles.num_tiles());
        const int32_t own_row = rows.first_row + warpgroup * kWarpgroupM + warp * kMmaM;
        OnlineSoftmax<1> softmax(params.scale_log2);
        if (params.scores.sinks != nullptr && tile.is_first_split()) {  // only one split may count the sink
            const int32_t row = own_row + accumulator_row(lane);
            softmax.set_sinks(params.scores.sinks[rows.head_of(row)], params.scores.sinks[rows.head_of(row + 8)],
                              lane % kLanesPerRow == 0);
        }
        float rO[1][kTilesD][4];     // [64, kValueDim] of the warpgroup
        float rS[1][kTilesN][4];     // [64, kBlockN]
        uint32_t rP[2][kTilesK][4];  // operands A of P·V of two key tiles: [64, kBlockN] 16-bit each
        set_zero(rO);

        // The keys that this lane's upper and lower row see.
        const SeenColumns<kTilesN> seen(rows.keys_of(own_row + accumulator_row(lane)),
                                        rows.keys_of(own_row + accumulator_row(lane) + 8), lane);

        const MissingPages<Config> missing(shared, params, rows, tiles, warpgroup);
        // Computed before the loops, because inside them the computation would take uniform registers that they need.
        const int32_t num_left_unmasked = warp_uniform(missing.num_unmasked());
        if (params.max_logits != nullptr) shared.largest_scores.start(rows.num_rows() - own_row);
        // How many of the last tiles need neither masks nor maxima.
        const int32_t num_left_fast = params.max_logits == nullptr ? num_left_unmasked : 0;

        const auto mask = [&](int32_t num_left, int32_t first_bit) {
            if (num_left <= num_left_unmasked) return;
            mask_warpgroup_scores(rS, seen, missing.present(first_bit, lane), first_bit);
        };
        // Gives rows that have no softmax reference their first one, and tracks the largest scores if they are wanted.
        // Called only for the first tile and for tiles that may be masked, because a row has its first score in one of
        // them.
        const auto start_softmax = [&] {
            const bool wants_maxima = params.max_logits != nullptr;
            if (!wants_maxima && !softmax.lacks_references()) return;
            const auto max = maxima_of_lane(rS);
            if (wants_maxima) shared.largest_scores.update(max);
            softmax.start(max);
        };
        // Turns S into P. Computes maxima only if the sums of P show that a softmax reference is outgrown. P is then
        // computed again from S, which is still in registers. Leaves no product in flight.
        const auto to_probabilities = [&](uint32_t (&rNextP)[kTilesK][4]) {
            auto sums = softmax.template exponentiate_to<kDataType, FASTATTN_EXP2_ON_FMA>(rNextP, rS);
            RowValues<1> factor{{{1.0f, 1.0f}}};
            bool is_outgrown;
            const auto follow_sums = [&] {
                is_outgrown = softmax.is_outgrown_by_sums(sums);
                if (is_outgrown) factor = softmax.follow(maxima_of_lane(rS));
            };
            // The branch of follow_sums() before the wait makes all exponentials overlap P·V: without the branch, ptxas
            // moves the wait up among the exponentials. With kMasksInPlace the branch follows the wait, because
            // registers are scarce: if `factor` were computed before the wait, ptxas would serialise the products.
            constexpr bool kWaitsEarly = Config::kMasksInPlace || FASTATTN_WAITS_EARLY;
            if constexpr (!kWaitsEarly) follow_sums();
            consumer.wait_pv(rO);  // leaves no product in flight
            if constexpr (kWaitsEarly) follow_sums();
            if (is_outgrown) {
                rescale(rO, factor);
                sums = softmax.template exponentiate_to<kDataType, FASTATTN_EXP2_ON_FMA>(rNextP, rS);
            }
            softmax.add(sums);
        };
        // Turns S into P with only one rP, because no registers are left for a second. P overwrites S, and is packed
        // into rP[0] after the wait for the previous P·V, which reads rP[0]. Maxima are computed before the
        // exponentials, because the exponentials overwrite S.
        const auto to_probabilities_in_place = [&] {
            const auto max = maxima_of_lane(rS);
            if (params.max_logits != nullptr) shared.largest_scores.update(max);
            const bool grows = softmax.is_outgrown_by(max);
            RowValues<1> factor{{{1.0f, 1.0f}}};
            if (grows) factor = softmax.follow(max);
            softmax.exponentiate(rS);
            consumer.wait_pv(rO);  // leaves no product in flight
            if (grows) rescale(rO, factor);
#pragma unroll
            for (int k = 0; k < kTilesK; ++k) accumulators_to_a<kDataType>(rP[0][k], rS[0][2 * k], rS[0][2 * k + 1]);
        };
        // Computes one key tile: Q·Kᵀ overlaps P·V of the tile before.
        const auto full_step = [&](const uint32_t (&rThisP)[kTilesK][4], uint32_t (&rNextP)[kTilesK][4]) {
            consumer.start_qk(rS);
            consumer.start_pv(rO, rThisP);
            consumer.template wait_qk<1>(rS);  // leaves P·V in flight
            to_probabilities(rNextP);
            consumer.release_value();
        };
        // Computes one key tile that may be masked. With kMasksInPlace, rThisP and rNextP are both rP[0].
        const auto masked_step = [&](const uint32_t (&rThisP)[kTilesK][4], uint32_t (&rNextP)[kTilesK][4],
                                     int32_t num_left) {
            consumer.start_qk(rS);
            const int32_t first_bit = consumer.first_bit();
            consumer.start_pv(rO, rThisP);
            consumer.template wait_qk<1>(rS);  // leaves P·V in flight
            mask(num_left, first_bit);
            if constexpr (Config::kMasksInPlace) {
                to_probabilities_in_place();
            } else {
                start_softmax();
                to_probabilities(rNextP);
            }
            consumer.release_value();
            consumer.wait_finite_value();
        };

        if (num_tiles > 0) {
            int32_t num_left = num_tiles;
            if (sign != 1.0f) {  // the softmax takes maxima of Q·Kᵀ, so scores must increase with Q·Kᵀ
                QueryTile::for_pairs_of(shared.sQ[warpgroup], threadIdx.x % kWarpgroupSize, kWarpgroupSize,
                                        [&](uint32_t& pair) { pair = multiply<kDataType>(pair, sign); });
                ptx::fence_proxy_async_shared();
                ptx::bar_sync(kOneConsumer + warpgroup, kWarpgroupSize);  // waits until all of Q is changed
            }
            consumer.start_qk(rS);
            const int32_t first_bit = consumer.first_bit();
            consumer.template wait_qk<0>(rS);  // leaves no product in flight
            mask(num_left, first_bit);
            start_softmax();
            to_probabilities(rP[0]);
            consumer.wait_finite_value();
            --num_left;
            // Tiles that need masks or maxima. If an odd number of tiles is left after them, one more tile, because the
            // loop of full steps takes two at a time.
            if constexpr (Config::kMasksInPlace) {
                for (; num_left > num_left_fast || num_left % 2 != 0; --num_left) masked_step(rP[0], rP[0], num_left);
            } else {
                if (num_left % 2 != 0) {
#pragma unroll
                    for (int k = 0; k < kTilesK; ++k) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) rP[1][k][e] = rP[0][k][e];
                    }
                }
                // Each round has two steps, so that P alternates between rP[0] and rP[1] and ends in rP[0]. If num_left
                // is odd, the first round has only its second step, which reads the copy in rP[1]. If rP were copied
                // after this loop instead, ptxas would serialise the products.
                for (; num_left > num_left_fast || num_left % 2 != 0; --num_left) {
                    if (num_left % 2 == 0) masked_step(rP[0], rP[1], num_left--);
                    masked_step(rP[1], rP[0], num_left);
                }
            }
            for (; num_left > 0; num_left -= 2) {
                full_step(rP[0], rP[1]);
                full_step(rP[1], rP[0]);
            }
            consumer.release_query();
            consumer.start_pv(rO, rP[0]);
            consumer.wait_pv(rO);  // leaves no product in flight
            consumer.release_value();
        } else {
            consumer.release_query();
        }

        // Epilogue.
        consumer.add_nonfinite_values(params, tile, rO,
                                      [&](int32_t row, int32_t key) { return rows.keys_of(row).has(key); });
        if (params.max_logits != nullptr)
            shared.largest_scores.reduce_into(params.max_logits + rows.head, fabsf(scale));
        consumer.write_rows(params, tile, own_row, rO, softmax);
    }
    consumer.combine_split_tiles(params);
    wait_for_cluster(cluster_size);  // waits until no CTA will arrive at this CTA's barriers any more
}

template <int kHeadDim, int kValueDim, DataType kDataType>
void launch_attention_forward_sm90(LaunchedKernel& kernel, const AttentionForwardParams& params, Stream stream) {
    launch_forward_sm90<ForwardConfigSm90<kHeadDim, kValueDim>, kDataType>(
        kernel, attention_forward_sm90<kHeadDim, kValueDim, kDataType>, params, /*packs_heads=*/true, stream);
}

}  // namespace fastattn
