// Attention backward for Hopper: computes dK and dV, and adds dQ to fp32 sums. The algorithm is FlashAttention-2's (Dao
// 2023, algorithm 2), with the warp specialisation of FlashAttention-3 (Shah et al. 2024). CTAs are persistent and
// claim work tiles. A work tile is kBlockN keys and all query rows that see these keys, or a split of the rows
// (row_splits.h). Each of two consumer warpgroups takes half of the keys. A third warpgroup is the producer.
//
//   P = exp(scale·Q·Kᵀ - lse),  dV = Pᵀ·dO,  dP = dO·Vᵀ,  dS = P∘(dP - delta),  dK = scale·dSᵀ·Q,  dQ = scale·dS·K
//
//   ring     stages    a full stage holds                     a stage becomes empty
//   work     2         a work tile                            after the work tile's gradients
//   keys     1         K, V of a work tile                    after the work tile's last product
//   rows     kStages   Q, dO and row terms of a step          after the step's dV, dK and dQ
//   panels   1         a panel of a consumer's dQ or,         when the addition has read the panel
//                      for split key tiles, of dK or dV
//
//   tensor cores   dK  dQ  S'      | dV' dP'      | dK' dQ' S''     …   (gaps: products of the other consumer)
//   other pipes            dQ → P' →        dS' → |             …   (no prime: this step; ' and '': the next two steps)
#pragma once

#include <cstdint>

#include "attention/backward_config_sm90.cuh"
#include "attention/backward_panels_sm90.cuh"
#include "attention/backward_producer_sm90.cuh"
#include "attention/backward_scores_sm90.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/red.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/shared_memory.h"
#include "device/tma_nonfinite.cuh"
#include "device/warpgroup_gemm.cuh"

namespace fastattn {

// A consumer warpgroup: starts products, each as one wgmma group, and passes their results on. S and dP are computed
// transposed, [keys, rows], so that P and dS in registers are the A operands of dV and dK.
template <typename Config, DataType kDataType>
struct BackwardConsumerSm90 {
    static constexpr int kTilesK = Config::kTilesK, kTilesD = Config::kTilesD;
    static constexpr int kHeadDim = Config::kHeadDim;
    using RowTile = typename Config::RowTile;
    using KeyTile = typename Config::KeyTile;
    using ScoreTile = typename Config::ScoreTile;
    using BlockScores = BackwardScoresSm90<Config, kDataType, Config::kOptions>;
    using Scores = typename BlockScores::Scores;
    using ScoresAsA = typename BlockScores::ScoresAsA;
    using Gradient = float[1][kTilesD][4];  // [64 keys, kHeadDim]
    using QueryPanel = float[1][kPanelDims / kMmaN][4];

    BackwardStorageSm90<Config>& shared;
    int warpgroup, warp, lane;
    bool dq_takes_panels;
    uint32_t num_steps = 0;  // steps that this consumer has finished
    uint32_t num_tiles = 0;  // key tiles that this consumer has begun

    FASTATTN_DEVICE BackwardConsumerSm90(BackwardStorageSm90<Config>& shared, const AttentionBackwardParams& params,
                                         int warpgroup, int warp, int lane)
        : shared(shared),
          warpgroup(warpgroup),
          warp(warp),
          lane(lane),
          dq_takes_panels(fastattn::dq_takes_panels<Config>(params)) {}

    // Returns this warp's first key in a block of 64 keys, counted from the first key of the CTA's tile.
    FASTATTN_DEVICE int first_key(int block) const {
        return warpgroup * Config::kConsumerKeys + block * kWarpgroupM + warp * kMmaM;
    }

    // Starts rC = K·Qᵀ or rC = V·dOᵀ of one of this consumer's blocks of keys. With kAdds, adds the product to rC.
    template <typename OwnTile, bool kAdds = false>
    FASTATTN_DEVICE void start_scores(Scores& rC, const uint16_t* sKeys, int block, const uint16_t* sRows) const {
        const int first_own_key = warpgroup * Config::kConsumerKeys + block * kWarpgroupM;
        ptx::wgmma_fence();
        start_gemm_rows<kDataType, kHeadDim, OwnTile, RowTile, kAdds>(
            rC, OperandDescriptor::k_major(opaque_shared_address(sKeys) + first_own_key * OwnTile::kRowBytes),
            OperandDescriptor::k_major(opaque_shared_address(sRows)));
        ptx::wgmma_commit_group();
    }

    // Starts rC += A·Q or A·dO.
    FASTATTN_DEVICE void start_gradient(Gradient& rC, const ScoresAsA& rA, const uint16_t* sRows) const {
        ptx::wgmma_fence();
        start_gemm_pv<kDataType>(rC, rA,
                                 OperandDescriptor::mn_major(opaque_shared_address(sRows), RowTile::kBlockBytes));
        ptx::wgmma_commit_group();
    }

    // Returns the ring of rows at the current step, or `ahead` steps later.
    FASTATTN_DEVICE Ring<Config::kStages> row_ring(int ahead = 0) const {
        return Ring<Config::kStages>(shared.rows, num_steps + ahead);
    }

    FASTATTN_DEVICE int stage() const { return row_ring().stage; }

    FASTATTN_DEVICE void release_rows() {
        row_ring().release(lane);
        ++num_steps;
    }

    // Returns the buffer through which dS passes: with kSharesDs that of all consumers, else this consumer's own. A
    // buffer has one stage for even and one for odd steps. A stage was last read by dQ of two steps ago. No barrier has
    // to say that this dQ is finished: every warp waited for it before storing dS of the previous step, and start_dq()
    // waited until every warp had stored that dS.
    FASTATTN_DEVICE int ds_buffer() const { return Config::kSharesDs ? 0 : warpgroup; }
    FASTATTN_DEVICE uint16_t* step_ds() const { return shared.sdS[ds_buffer()][num_steps % kDsStages]; }
    FASTATTN_DEVICE uint32_t ds_barrier() const {
        return shared_address(&shared.ds_stored[ds_buffer()][num_steps % kDsStages]);
    }

    // Stores dSᵀ of a block of keys in the step's stage.
    FASTATTN_DEVICE void store_ds(const ScoresAsA& rdS, int block) const {
        const int key = first_key(block) - ds_buffer() * Config::kKeysPerDsBuffer + lane % 16;
        const uint32_t sdS = shared_address(step_ds());
#pragma unroll
        for (int k = 0; k < kTilesK; ++k) ptx::stmatrix_x4(sdS + ScoreTile::offset(key, 2 * k + lane / 16), rdS[k]);
    }

    FASTATTN_DEVICE void pass_ds() const {
        ptx::fence_proxy_async_shared();  // makes dS visible to wgmma
        __syncwarp();                     // waits until every lane has stored its dS
        if (lane == 0) ptx::mbarrier_arrive(ds_barrier());
    }

    // Waits until every warp that writes this buffer of dS has stored its dS: the warps of all consumers with
    // kSharesDs, else those of this consumer. Then starts this consumer's panel of dQ = dS·K.
    FASTATTN_DEVICE void start_dq(QueryPanel& rdQ, const uint16_t* sK) {
        ptx::mbarrier_wait_parity(ds_barrier(), num_steps / kDsStages % 2);
        const int first_byte = Config::kSharesDs ? warpgroup * KeyTile::kBlockBytes
                                                 : warpgroup * Config::kConsumerKeys * KeyTile::kRowBytes;
        ptx::wgmma_fence();
        start_gemm_columns<kDataType, Config::kKeysPerDsBuffer>(
            rdQ, OperandDescriptor::mn_major(opaque_shared_address(step_ds()), ScoreTile::kBlockBytes),
            OperandDescriptor::mn_major(opaque_shared_address(sK) + first_byte, KeyTile::kBlockBytes));
        ptx::wgmma_commit_group();
    }

    // Passes 64 columns of a gradient to the reduction warp. num_before: how many panels this consumer has
    // passed before; only the parity counts.
    template <int kFirstTile, int kNumTiles>
    FASTATTN_DEVICE void store_own_panel(const float (&rC)[1][kNumTiles][4], uint32_t num_before) const {
        const Ring<1> ring(shared.panels[warpgroup], num_before);
        // Opaque: with options, the main loop has no register left for values that the compiler derives from lane.
        const int own_lane = Config::kOptions ? ptx::opaque(lane) : lane;
        store_panel<kFirstTile>(ring, &shared.sPanel[warpgroup], rC, warp, own_lane);
    }

    // Adds this consumer's panel of dQ to the sums, or passes the panel to the reduction warp.
    FASTATTN_DEVICE void add_dq(const QueryPanel& rdQ) const {
        if (dq_takes_panels) {
            store_own_panel<0>(rdQ, num_steps);
            return;
        }
        float* sums = shared.steps[stage()].query_sums + warpgroup % Config::kQueryPanels * kPanelElements;
        sums += (warp * kWarpSize + ptx::opaque(lane)) * 4;
#pragma unroll
        for (int block = 0; block < kPanelDims / kMmaN; ++block) {
            ptx::red_add_v4_f32(rdQ[0][block], sums + block * kPanelBlockElements);
        }
        __syncwarp();  // waits until every lane has read the address, as the step is released next
    }

    // Skips `count` steps in which no row sees this consumer's keys. Arrives at the barriers of these steps, so that
    // their phases complete. reduce_panels() adds nothing for these steps.
    FASTATTN_DEVICE void skip(int32_t count) {
#pragma unroll 1
        for (; count > 0; --count) {
            row_ring().wait_full();  // otherwise the release could count for the stage's previous rows
            const Ring<1> ring(shared.panels[warpgroup], num_steps);
            if (dq_takes_panels) ring.wait_empty();
            __syncwarp();  // waits until every lane has passed both waits: the barriers may complete again after this
            if (lane == 0) {
                ptx::mbarrier_arrive(ds_barrier());
                if (dq_takes_panels) ring.arrive_full();
            }
            release_rows();
        }
    }

    // Passes dK and dV of a block of keys to the reduction warp, after the last step of a split tile.
    FASTATTN_DEVICE void store_key_panels(const Gradient& rdK, const Gradient& rdV) const {
        // Only the parity of num_before counts. Earlier key tiles and blocks have passed an even number of panels of dK
        // and dV, so only panels of dQ matter.
        const uint32_t num_before = dq_takes_panels ? num_steps : 0;
        for_constant<Config::kQueryPanels>(
            [&](auto panel) { store_own_panel<panel.value * kPanelDims / kMmaN>(rdK, num_before + panel.value); });
        for_constant<Config::kQueryPanels>([&](auto panel) {
            store_own_panel<panel.value * kPanelDims / kMmaN>(rdV, num_before + Config::kQueryPanels + panel.value);
        });
    }

    // Returns the K for dQ = dS·K of a tile in which masks hide keys from rows: K itself or, if K has NaN or infinity,
    // a copy with zeros instead of these (device/nonfinite.cuh). Called by all consumers.
    FASTATTN_DEVICE const uint16_t* finite_keys() const {
        const int thread = threadIdx.x;
        const bool has_nonfinite = tile_has_nonfinite<kDataType, KeyTile, Config::kConsumerThreads>(shared.sK, thread);
        const bool some = ptx::bar_red_or(kAllBackwardConsumers, Config::kConsumerThreads, has_nonfinite);
        if (warp_uniform(some) == 0) return shared.sK;
        for (int i = thread; i < KeyTile::kElements / 2; i += Config::kConsumerThreads) {
            const uint32_t pair = reinterpret_cast<const uint32_t*>(shared.sK)[i];
            reinterpret_cast<uint32_t*>(shared.sFiniteK)[i] = pair & ~nonfinite_mask<kDataType>(pair);
        }
        ptx::fence_proxy_async_shared();                                 // makes the zeros visible to wgmma
        ptx::bar_sync(kAllBackwardConsumers, Config::kConsumerThreads);  // waits until the whole copy is written
        return shared.sFiniteK;
    }
};

// Preconditions: those of HeadsView; head dims are multiples of 8 and at most kHeadDim; sums, semaphores and
// num_claimed are zero. Sequences can have any length, packed or not. backward_scores_sm90.cuh describes which options
// scores go through.
template <int kHeadDim, DataType kDataType, bool kOptions>
__global__ void __launch_bounds__(BackwardConfigSm90<kHeadDim, kOptions>::kNumThreads, 1)
    attention_backward_key_value_sm90(const __grid_constant__ AttentionBackwardParamsSm90 all_params) {
    using Config = BackwardConfigSm90<kHeadDim, kOptions>;
    using Consumer = BackwardConsumerSm90<Config, kDataType>;
    using BlockScores = typename Consumer::BlockScores;
    using Scores = typename Consumer::Scores;
    using ScoresAsA = typename Consumer::ScoresAsA;
    using KeyTile = typename Config::KeyTile;
    using ValueTile = typename Config::ValueTile;
    constexpr int kKeyBlocks = Config::kKeyBlocks;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<BackwardStorageSm90<Config>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);

    // Prologue.
    const AttentionBackwardParams& params = all_params.attention;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    start_backward(shared, params);

    // Producer: one warp claims work tiles, one copies by TMA, and each consumer has a reduction warp.
    if (warpgroup == Config::kNumConsumers) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (warp == 0) {
            claim(shared, params, lane);
        } else if (warp == 1) {
            produce(shared, all_params, lane);
        } else if (warp < 2 + Config::kReductionWarps) {
            const int own = warp - 2;
            reduce_panels(shared, params, shared.panels[own], &shared.sPanel[own], own, lane);
        }
        return;
    }

    // Consumers.
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Consumer consumer(shared, params, warpgroup, warp, lane);
    const bool has_bias = kOptions && params.scores.bias.kind != BiasView::Kind::kNone;

    // Always inlined: if the lambda were a function of its own, ptxas would serialise its wgmma instructions.
    for_work(shared, lane, [&](const KeyWorkTile<Config>& keys) __attribute__((always_inline)) {
        typename Consumer::Gradient rdK[kKeyBlocks], rdV[kKeyBlocks];  // dK, dV
#pragma unroll
        for (int block = 0; block < kKeyBlocks; ++block) {
            set_zero(rdK[block]);
            set_zero(rdV[block]);
            // Otherwise the compiler could write the zeros after the first product's fence, and wgmma might miss them.
            ptx::written_by_wgmma(rdK[block]);
            ptx::written_by_wgmma(rdV[block]);
        }
        // Computes one row tile. rS: S of the first block of keys, already computed. Leaves dS of the last block in
        // rdS16; the caller computes dK of this block, and dQ.
        const auto finish_step = [&](Scores& rS, ScoresAsA& rdS16, BlockScores& scores) {
            const auto& terms = shared.terms[consumer.stage()];
            const uint16_t *sQ = shared.sQ[consumer.stage()], *sdO = shared.sdO[consumer.stage()];
            for_constant<kKeyBlocks>([&](auto block_constant) {
                constexpr int kBlock = block_constant.value;
                Scores rdP;
                ScoresAsA rP16;
                if constexpr (kBlock > 0) {
                    consumer.start_gradient(rdK[kBlock - 1], rdS16, sQ);
                    consumer.template start_scores<KeyTile>(rS, shared.sK, kBlock, sQ);
                    scores.go_to_next_block();
                    scores.prepare();
                    wait_gemm<0>(rS);  // leaves no product in flight
                }
                scores.probabilities(rP16, rS, terms);
                scores.init_dp(rdP, terms);
                consumer.start_gradient(rdV[kBlock], rP16, sdO);
                consumer.template start_scores<ValueTile, true>(rdP, shared.sV, kBlock, sdO);
                wait_gemm<0>(rdP);  // leaves no product in flight
                scores.to_ds(rdP, rS, terms);
                BlockScores::to_operand(rdS16, rdP);
                consumer.store_ds(rdS16, kBlock);
            });
            consumer.pass_ds();
        };

        Ring<1> key_ring(shared.keys, consumer.num_tiles++);
        key_ring.wait_full();
        const uint16_t* sKForDq = shared.sK;
        if (keys.num_steps > 0 && (!keys.are_all_full() || has_bias)) sKForDq = consumer.finite_keys();
        int32_t num_left = warp_uniform(keys.num_steps), begin_row_tile = warp_uniform(keys.begin_row_tile);
        if constexpr (Config::kSkipsHidden) {
            const auto steps = keys.seen_steps(warpgroup);
            consumer.skip(warp_uniform(steps.before));
            num_left = warp_uniform(steps.seen);
            begin_row_tile -= warp_uniform(steps.before / keys.num_heads);
        }
        if (num_left > 0) {
            const int32_t begin_full = warp_uniform(keys.begin_full[warpgroup]);
            const uint32_t num_full = max(warp_uniform(keys.end_full[warpgroup]) - begin_full, 0);
            const int32_t first_key = keys.first_key + consumer.first_key(0);
            const auto look_at_ranges = [&](int stage) -> typename BlockScores::SeenThroughRanges {
                if constexpr (kOptions) {
                    return {params, keys, shared.steps[stage], first_key, lane};
                } else {
                    return {};
                }
            };
            // With options, RowStep has the head and row tile of the step. Without options, the arguments have them.
            // is_first: the first step is always computed as a masked tile, which is right for every tile.
            const auto block_scores = [&](int stage, int32_t head, int32_t row_tile, bool is_first,
                                          const typename BlockScores::SeenThroughRanges& ranges) -> BlockScores {
                if constexpr (kOptions) {
                    const RowStep& step = shared.steps[stage];
                    const bool is_full = !is_first && (step.full_for >> warpgroup & 1) != 0;
                    return {{params, keys, first_key, step, is_full, lane, shared.dropout_seed}, ranges};
                } else {
                    const bool is_full = !is_first && static_cast<uint32_t>(row_tile - begin_full) < num_full;
                    return {{params, keys, first_key, {head, row_tile}, is_full, lane, 0}, ranges};
                }
            };
            ScoresAsA rdS16;  // dS of the step whose dK and dQ come next
            const int32_t num_heads = warp_uniform(keys.num_heads);
            int32_t row_tile = begin_row_tile, heads_left = num_heads;
            {
                Scores rS;
                consumer.row_ring().wait_full();
                BlockScores scores = block_scores(consumer.stage(), keys.begin_head, row_tile, /*is_first=*/true,
                                                  look_at_ranges(consumer.stage()));
                consumer.template start_scores<KeyTile>(rS, shared.sK, 0, shared.sQ[consumer.stage()]);
                scores.prepare();
                wait_gemm<0>(rS);  // leaves no product in flight
                finish_step(rS, rdS16, scores);
            }
            while (--num_left > 0) {
                Scores rS;
                typename Consumer::QueryPanel rdQ;
                consumer.start_gradient(rdK[kKeyBlocks - 1], rdS16, shared.sQ[consumer.stage()]);
                const Ring<Config::kStages> next = consumer.row_ring(/*ahead=*/1);
                next.wait_full();
                const auto ranges = look_at_ranges(next.stage);
                consumer.start_dq(rdQ, sKForDq);
                consumer.template start_scores<KeyTile>(rS, shared.sK, 0, shared.sQ[next.stage]);
                if (--heads_left == 0) {
                    --row_tile;
                    heads_left = num_heads;
                }
                BlockScores scores = block_scores(next.stage, keys.begin_head + num_heads - heads_left, row_tile,
                                                  /*is_first=*/false, ranges);
                wait_gemm<1>(rdQ);  // leaves S in flight
                consumer.add_dq(rdQ);
                scores.prepare();
                wait_gemm<0>(rS);  // leaves no product in flight
                consumer.release_rows();
                finish_step(rS, rdS16, scores);
            }
            typename Consumer::QueryPanel rdQ;
            consumer.start_gradient(rdK[kKeyBlocks - 1], rdS16, shared.sQ[consumer.stage()]);
            consumer.start_dq(rdQ, sKForDq);
            wait_gemm<0>(rdQ);  // leaves no product in flight
            consumer.add_dq(rdQ);
            consumer.release_rows();
        }
        if constexpr (Config::kSkipsHidden) consumer.skip(warp_uniform(keys.seen_steps(warpgroup).after));
        key_ring.release(lane);

        // Epilogue.
        const float value_factor = kOptions ? params.scores.dropout_factor : 1.0f;
#pragma unroll
        for (int block = 0; block < kKeyBlocks; ++block) {
            ptx::written_by_wgmma(rdK[block]);
            ptx::written_by_wgmma(rdV[block]);
            if (keys.is_split()) {
                consumer.store_key_panels(rdK[block], rdV[block]);
            } else {
                store_key_rows<kDataType>(params.grad_key, params.sum_key, keys, rdK[block], consumer.first_key(block),
                                          lane, params.scores.scale);
                store_key_rows<kDataType>(params.grad_value, params.sum_value, keys, rdV[block],
                                          consumer.first_key(block), lane, value_factor);
            }
        }
    });
}

template <int kHeadDim, DataType kDataType, bool kOptions>
void launch_attention_backward_key_value_sm90(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                              Stream stream) {
    launch_backward_sm90<BackwardConfigSm90<kHeadDim, kOptions>, kDataType>(
        kernel, attention_backward_key_value_sm90<kHeadDim, kDataType, kOptions>, params, stream);
}

}  // namespace fastattn
