// Attention backward for Hopper with more than 128 dims. Computes the same as backward_key_value_sm90.cuh, but divides
// the work between warpgroups by gradient, because dK and dV of only 64 keys take half of an SM's registers. CTAs are
// persistent and claim work tiles. A work tile is 64 keys and all query rows that see these keys, or a split of the
// rows (row_splits.h). A step has 64 rows. Each of three warpgroups computes one gradient:
//
//   dV   Sᵀ = K·Qᵀ,  Pᵀ = exp(scale·Sᵀ - lse) → shared memory;  dV += Pᵀ·dO
//   dK   dPᵀ = V·dOᵀ,  Pᵀ ← shared memory,  dSᵀ = Pᵀ∘(dPᵀ - delta) → shared memory;  dK += dSᵀ·Q
//   dQ   dSᵀ ← shared memory,  dQ = dS·K, 64 dims at a time → shared memory
//
//   ring            stages         a full stage holds                  a stage becomes empty
//   work            2              a work tile                         after the work tile's gradients
//   keys            1              K, V of a work tile                 after the work tile's last product
//   rows            kStages        Q, dO and row terms of a step       after the step's dV and dK
//   probabilities   kPassStages    Pᵀ of a step                        when the warpgroup of dK has read Pᵀ
//   ds              kPassStages    dSᵀ of a step                       when the products of dQ have read dSᵀ
//   panels          kPanelStages   64 dims of dQ or, for split key     when the addition has read the panel
//                                  tiles, of dK or dV
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward_config_wide_sm90.cuh"
#include "attention/backward_panels_sm90.cuh"
#include "attention/backward_producer_sm90.cuh"
#include "attention/backward_scores_sm90.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/fence.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/setmaxnreg.cuh"
#include "device/ptx/stmatrix.cuh"
#include "device/shared_memory.h"
#include "device/tma_nonfinite.cuh"
#include "device/warpgroup_gemm.cuh"

namespace fastattn {

// The warpgroup of dV (kIsDv) or of dK. It computes Sᵀ or dPᵀ, [keys, rows], so that Pᵀ or dSᵀ in registers is
// the A operand of its gradient. A warpgroup runs ahead of the others until it waits at a ring. So while one warpgroup
// computes exponentials or stores results, the tensor cores execute products of the other warpgroups.
template <typename Config, DataType kDataType, bool kIsDv>
struct BackwardKeyValueGradientSm90 {
    using ScoreKeyTile = std::conditional_t<kIsDv, typename Config::KeyTile, typename Config::ValueTile>;
    using ScoreRowTile = std::conditional_t<kIsDv, typename Config::RowTile, typename Config::GradOutTile>;
    using GradientRowTile = std::conditional_t<kIsDv, typename Config::GradOutTile, typename Config::RowTile>;
    static constexpr int kContractedDims = kIsDv ? Config::kHeadDim : Config::kValueDim;
    static constexpr int kTilesD = (kIsDv ? Config::kValueDim : Config::kHeadDim) / kMmaN;
    static constexpr int kTilesM = Config::kTilesM, kTilesK = Config::kTilesK;
    using BlockScores = BackwardScoresSm90<Config, kDataType, Config::kOptions>;
    using Scores = typename BlockScores::Scores;        // Sᵀ or dPᵀ: [64 keys, 64 rows]
    using ScoresAsA = typename BlockScores::ScoresAsA;  // Pᵀ or dSᵀ in 16 bits
    using Gradient = float[1][kTilesD][4];              // dV or dK: [64 keys, dims]

    BackwardStorageSm90<Config>& shared;
    const AttentionBackwardParams& params;
    int warp, lane;
    uint32_t num_steps = 0;       // steps that this warpgroup has finished
    uint32_t num_key_panels = 0;  // panels of dK and dV of earlier tiles, from all warpgroups

    // Returns the ring of rows at the current step, or `ahead` steps later.
    FASTATTN_DEVICE Ring<Config::kStages> row_ring(int ahead = 0) const {
        return Ring<Config::kStages>(shared.rows, num_steps + ahead);
    }

    // Starts Sᵀ = K·Qᵀ, or dPᵀ - delta = V·dOᵀ - delta. With dropout starts only dPᵀ: see start_dp().
    FASTATTN_DEVICE void start_scores(Scores& rX, int stage) const {
        if constexpr (!kIsDv) start_dp<Config::kOptions>(rX, shared.terms[stage].minus_delta, params.scores, lane);
        ptx::wgmma_fence();
        start_gemm_rows<kDataType, kContractedDims, ScoreKeyTile, ScoreRowTile, /*kAdds=*/!kIsDv>(
            rX, OperandDescriptor::k_major(opaque_shared_address(kIsDv ? shared.sK : shared.sV)),
            OperandDescriptor::k_major(opaque_shared_address(kIsDv ? shared.sQ[stage] : shared.sdO[stage])));
        ptx::wgmma_commit_group();
    }

    // Starts dV += Pᵀ·dO, or dK += dSᵀ·Q.
    FASTATTN_DEVICE void start_gradient(Gradient& rG, const ScoresAsA& rA) const {
        // 256 dims in one instruction would take 128 accumulators and 4 registers of A. With 512 threads in a CTA, an
        // instruction can have at most 65536 / 512 = 128 registers.
        constexpr int kTilesN = kTilesD > 24 ? kTilesD / 2 : kTilesD;
        const int stage = row_ring().stage;
        const uint32_t sRows = opaque_shared_address(kIsDv ? shared.sdO[stage] : shared.sQ[stage]);
        ptx::wgmma_fence();
#pragma unroll
        for (int n = 0; n < kTilesD; n += kTilesN) {
            const int first_byte = n * kMmaN / GradientRowTile::kBlockColumns * GradientRowTile::kBlockBytes;
            start_gemm_pv<kDataType>(reinterpret_cast<float (&)[1][kTilesN][4]>(rG[0][n]), rA,
                                     OperandDescriptor::mn_major(sRows + first_byte, GradientRowTile::kBlockBytes));
        }
        ptx::wgmma_commit_group();
    }

    FASTATTN_DEVICE Ring<Config::kPassStages> ring_at_step(const RingBarriers<Config::kPassStages>& ring) const {
        return Ring<Config::kPassStages>(ring, num_steps);
    }

    FASTATTN_DEVICE BlockScores scores_of(const KeyWorkTile<Config>& keys, int32_t row_tile, bool is_full) const {
        const int32_t first_key = keys.first_key + warp * kMmaM;
        if constexpr (Config::kOptions) {
            const RowStep& step = shared.steps[row_ring().stage];
            return {{params, keys, first_key, step, is_full, lane, shared.dropout_seed},
                    {params, keys, step, first_key, lane}};
        } else {
            return {{params, keys, first_key, {0, row_tile}, is_full, lane, 0}, {}};
        }
    }

    // Turns Sᵀ into Pᵀ, rounds Pᵀ to 16 bits, and passes it to the warpgroup of dK.
    FASTATTN_DEVICE void finish_p(BlockScores& scores, Scores& rS, ScoresAsA& rP) const {
        scores.probabilities(rP, rS, shared.terms[row_ring().stage]);
        const Ring<Config::kPassStages> ring = ring_at_step(shared.probabilities);
        ring.wait_empty();
        uint4* const sP = &shared.sP[ring.stage][0][warp * kWarpSize + lane];
#pragma unroll
        for (int k = 0; k < kTilesK; ++k) sP[k * kWarpgroupSize] = scores.passed_probabilities(rP, rS, k);
        __syncwarp();  // waits until every lane has stored its Pᵀ
        if (lane == 0) ring.arrive_full();
    }

    // Turns dPᵀ - delta into dSᵀ with the Pᵀ of the warpgroup of dV, rounds dSᵀ to 16 bits, and passes it to the
    // warpgroup of dQ.
    FASTATTN_DEVICE void finish_ds(const KeyWorkTile<Config>& keys, Scores& rdP, ScoresAsA& rdS, int32_t row_tile,
                                   bool is_full) const {
        Ring<Config::kPassStages> from = ring_at_step(shared.probabilities);
        from.wait_full();
        const uint4* const sP = &shared.sP[from.stage][0][warp * kWarpSize + lane];
        if constexpr (Config::kOptions) {
            passed_to_score_gradients<kDataType>(rdP, shared.terms[row_ring().stage].minus_delta, params.scores,
                                                 is_full, lane, [&](int k) { return sP[k * kWarpgroupSize]; });
        } else {
            Scores rP;
#pragma unroll
            for (int k = 0; k < kTilesK; ++k) {
                const uint4 packed = sP[k * kWarpgroupSize];
                a_to_accumulators<kDataType>(rP[0][2 * k], rP[0][2 * k + 1], {packed.x, packed.y, packed.z, packed.w});
            }
            if (is_full) {
                to_score_gradients<false>(rdP, rP, SeenRows{});
            } else {
                to_score_gradients<true>(rdP, rP, keys.seen_rows(keys.first_key + warp * kMmaM, row_tile, lane));
            }
        }
        __syncwarp();  // waits until every lane has read Pᵀ
        from.release(lane);
#pragma unroll
        for (int k = 0; k < kTilesK; ++k) accumulators_to_a<kDataType>(rdS[k], rdP[0][2 * k], rdP[0][2 * k + 1]);

        const Ring<Config::kPassStages> to = ring_at_step(shared.ds);
        to.wait_empty();
        const uint32_t sdS = shared_address(shared.sdS[to.stage]);
#pragma unroll
        for (int k = 0; k < kTilesK; ++k) {
            ptx::stmatrix_x4(sdS + Config::ScoreTile::offset(warp * kMmaM + lane % 16, 2 * k + lane / 16), rdS[k]);
        }
        ptx::fence_proxy_async_shared();  // makes dSᵀ visible to wgmma
        __syncwarp();                     // waits until every lane has stored its dSᵀ
        if (lane == 0) to.arrive_full();
    }

    // Waits for Sᵀ or dPᵀ, and turns it into Pᵀ or dSᵀ. With options, row_tile is not used.
    FASTATTN_DEVICE void finish_step(const KeyWorkTile<Config>& keys, Scores& rX, ScoresAsA& rA, int32_t row_tile,
                                     bool is_full) const {
        if constexpr (kIsDv) {
            BlockScores scores = scores_of(keys, row_tile, is_full);
            scores.prepare();
            wait_gemm<0>(rX);  // leaves no product in flight
            finish_p(scores, rX, rA);
        } else {
            wait_gemm<0>(rX);  // leaves no product in flight
            finish_ds(keys, rX, rA, row_tile, is_full);
        }
    }

    FASTATTN_DEVICE void run() {
        Ring<1> key_ring(shared.keys);
        for_work(shared, lane, [&](const KeyWorkTile<Config>& keys) {
            Gradient rG;
            set_zero(rG);
            ptx::written_by_wgmma(rG);  // otherwise the zeros could be written after the first product's fence
            const int32_t begin_full = warp_uniform(keys.begin_full[0]), end_full = warp_uniform(keys.end_full[0]);
            const auto is_full = [&](int32_t row_tile) {
                if constexpr (Config::kOptions) return (shared.steps[row_ring().stage].full_for & 1) != 0;
                return row_tile >= begin_full && row_tile < end_full;
            };
            const int32_t num_heads = warp_uniform(keys.num_heads);
            int32_t num_left = warp_uniform(keys.num_steps);
            key_ring.wait_full();
            if (num_left > 0) {
                ScoresAsA rA;  // Pᵀ or dSᵀ of the step whose gradient comes next
                int32_t row_tile = warp_uniform(keys.begin_row_tile), heads_left = num_heads;
                {
                    Scores rX;
                    row_ring().wait_full();
                    start_scores(rX, row_ring().stage);
                    // The code for masked tiles is right for every tile.
                    finish_step(keys, rX, rA, row_tile, /*is_full=*/false);
                }
                while (--num_left > 0) {
                    Scores rX;
                    start_gradient(rG, rA);
                    const Ring<Config::kStages> next = row_ring(/*ahead=*/1);
                    next.wait_full();
                    start_scores(rX, next.stage);
                    if (--heads_left == 0) {
                        --row_tile;
                        heads_left = num_heads;
                    }
                    ptx::wgmma_wait_group<1>();  // leaves Sᵀ or dPᵀ in flight
                    row_ring().release(lane);
                    ++num_steps;
                    finish_step(keys, rX, rA, row_tile, is_full(row_tile));
                }
                start_gradient(rG, rA);
                ptx::wgmma_wait_group<0>();  // leaves no product in flight
                row_ring().release(lane);
                ++num_steps;
            }
            key_ring.release(lane);

            // Epilogue.
            ptx::written_by_wgmma(rG);
            if (warp_uniform(keys.is_split()) != 0) {
                store_panels(rG);
            } else {
                const float value_factor = Config::kOptions ? params.scores.dropout_factor : 1.0f;
                store_key_rows<kDataType>(kIsDv ? params.grad_value : params.grad_key,
                                          kIsDv ? params.sum_value : params.sum_key, keys, rG, warp * kMmaM, lane,
                                          kIsDv ? value_factor : params.scores.scale);
            }
        });
    }

    // Passes the panels of dK or dV to the reduction warp. The order is: the tile's dQ, then dK, then dV.
    FASTATTN_DEVICE void store_panels(const Gradient& rG) {
        constexpr int kBefore = kIsDv ? Config::kQueryPanels : 0;
        constexpr int kPanels = kIsDv ? Config::kValuePanels : Config::kQueryPanels;
        // Waits until the warpgroup of dQ (before dK) or of dK (before dV) has stored its last panel.
        ptx::bar_sync(kIsDv ? kDkStored : kDqStored, 2 * kWarpgroupSize);
        for_constant<kPanels>([&](auto panel) {
            const Ring<Config::kPanelStages> ring(
                shared.panels, num_steps * Config::kQueryPanels + num_key_panels + kBefore + panel.value);
            store_panel<panel.value * kPanelDims / kMmaN>(ring, shared.sPanel, rG, warp, lane);
        });
        num_key_panels += Config::kQueryPanels + Config::kValuePanels;
        // dV is stored last, and needs no barrier after it: the next panels are the next tile's dQ, which depends on a
        // P that the warpgroup of dV computes only after this.
        if constexpr (!kIsDv) ptx::bar_sync(kDkStored, 2 * kWarpgroupSize);
    }
};

// The warpgroup of dQ: computes dQ of each step, one panel of 64 dims at a time.
template <typename Config, DataType kDataType>
struct BackwardQueryGradientSm90 {
    using KeyTile = typename Config::KeyTile;
    using QueryPanel = float[1][kPanelDims / kMmaN][4];

    BackwardStorageSm90<Config>& shared;
    const AttentionBackwardParams& params;
    int warp, lane;

    // Returns whether masks may hide keys from rows, and K has NaN or infinity.
    FASTATTN_DEVICE bool has_nonfinite(const KeyWorkTile<Config>& keys) const {
        const bool has_bias = Config::kOptions && params.scores.bias.kind != BiasView::Kind::kNone;
        if (keys.are_all_full() && !has_bias) return false;
        const int thread = warp * kWarpSize + lane;
        const bool is_own = tile_has_nonfinite<kDataType, KeyTile, kWarpgroupSize>(shared.sK, thread);
        return warp_uniform(ptx::bar_red_or(kQueryWarpgroup, kWarpgroupSize, is_own)) != 0;
    }

    // Copies a block of K, with zeros instead of NaN and infinity (device/nonfinite.cuh), to sPanel, which dQ
    // overwrites later. Returns the copy.
    FASTATTN_DEVICE const uint16_t* finite_block(const uint16_t* sBlock, float* sPanel) const {
        static_assert(KeyTile::kBlockBytes <= kPanelElements * sizeof(float), "it fits");
#pragma unroll 1
        for (int i = warp * kWarpSize + lane; i < KeyTile::kBlockBytes / 4; i += kWarpgroupSize) {
            const uint32_t pair = reinterpret_cast<const uint32_t*>(sBlock)[i];
            reinterpret_cast<uint32_t*>(sPanel)[i] = pair & ~nonfinite_mask<kDataType>(pair);
        }
        ptx::fence_proxy_async_shared();                 // makes the block visible to wgmma
        ptx::bar_sync(kQueryWarpgroup, kWarpgroupSize);  // waits until the whole block is written
        return reinterpret_cast<const uint16_t*>(sPanel);
    }

    FASTATTN_DEVICE void start_panel(QueryPanel& rdQ, const uint16_t* sdS, const uint16_t* sBlock) const {
        ptx::wgmma_fence();
        start_gemm_columns<kDataType, Config::kBlockN>(
            rdQ, OperandDescriptor::mn_major(shared_address(sdS), Config::ScoreTile::kBlockBytes),
            OperandDescriptor::mn_major(shared_address(sBlock), KeyTile::kBlockBytes));
        ptx::wgmma_commit_group();
    }

    FASTATTN_DEVICE void run() {
        Ring<1> key_ring(shared.keys);
        Ring<Config::kPassStages> ds_ring(shared.ds);
        uint32_t num_panels = 0;  // panels so far, from all warpgroups
        for_work(shared, lane, [&](const KeyWorkTile<Config>& keys) {
            int32_t num_left = warp_uniform(keys.num_steps);
            key_ring.wait_full();
            const bool takes_finite_keys = num_left > 0 && has_nonfinite(keys);
#pragma unroll 1
            for (; num_left > 0; --num_left) {
                ds_ring.wait_full();
#pragma unroll
                for (int panel = 0; panel < Config::kQueryPanels; ++panel) {
                    const Ring<Config::kPanelStages> ring(shared.panels, num_panels++);
                    float* const sPanel = shared.sPanel[ring.stage];
                    const uint16_t* sBlock = shared.sK + panel * (KeyTile::kBlockBytes / 2);
                    if (takes_finite_keys) {
                        ring.wait_empty();
                        sBlock = finite_block(sBlock, sPanel);
                    }
                    QueryPanel rdQ;
                    start_panel(rdQ, shared.sdS[ds_ring.stage], sBlock);
                    wait_gemm<0>(rdQ);  // leaves no product in flight
                    if (panel == Config::kQueryPanels - 1) ds_ring.release(lane);
                    // Waits until every warp's product has read the copy of K, which dQ overwrites.
                    if (takes_finite_keys) ptx::bar_sync(kQueryWarpgroup, kWarpgroupSize);
                    store_panel<0>(ring, shared.sPanel, rdQ, warp, lane);
                }
            }
            key_ring.release(lane);
            if (warp_uniform(keys.is_split()) != 0) {
                ptx::bar_sync(kDqStored, 2 * kWarpgroupSize);  // waits until the warpgroup of dK is here
                num_panels += Config::kQueryPanels + Config::kValuePanels;
            }
        });
    }
};

// Preconditions: those of HeadsView; head dims are multiples of 8 and at most kHeadDim and kValueDim; sums, semaphores
// and num_claimed are zero. Sequences can have any length, packed or not. With options, the warpgroup of dV applies
// masks, bias and dropout. In the P that it passes to the warpgroup of dK, it marks what is hidden or dropped
// (kHiddenProbability).
template <int kHeadDim, int kValueDim, DataType kDataType, bool kOptions>
__global__ void __launch_bounds__(BackwardWideConfigSm90<kHeadDim, kValueDim, kOptions>::kNumThreads, 1)
    attention_backward_key_value_wide_sm90(const __grid_constant__ AttentionBackwardParamsSm90 all_params) {
    using Config = BackwardWideConfigSm90<kHeadDim, kValueDim, kOptions>;
    extern __shared__ __align__(1024) char shared_bytes[];
    auto& shared = *reinterpret_cast<BackwardStorageSm90<Config>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm90);

    // Prologue.
    const AttentionBackwardParams& params = all_params.attention;
    const int warpgroup = warp_in_cta() / 4, warp = warp_in_cta() % 4, lane = threadIdx.x % kWarpSize;
    start_backward(shared, params);

    // Producer: one warp claims work tiles, one copies by TMA, and one is the reduction warp.
    if (warpgroup == 3) {
        ptx::setmaxnreg_dec<Config::kProducerRegisters>();
        if (warp == 0) claim(shared, params, lane);
        if (warp == 1) produce(shared, all_params, lane);
        if (warp == 2) reduce_panels(shared, params, shared.panels, shared.sPanel, /*own=*/0, lane);
    } else if (warpgroup == 2) {
        ptx::setmaxnreg_dec<Config::kQueryRegisters>();
        BackwardQueryGradientSm90<Config, kDataType>{shared, params, warp, lane}.run();
    } else if (warpgroup == 1) {
        ptx::setmaxnreg_inc<Config::kScoreRegisters>();
        BackwardKeyValueGradientSm90<Config, kDataType, /*kIsDv=*/false>{shared, params, warp, lane}.run();
    } else {
        ptx::setmaxnreg_inc<Config::kScoreRegisters>();
        BackwardKeyValueGradientSm90<Config, kDataType, /*kIsDv=*/true>{shared, params, warp, lane}.run();
    }
}

template <int kHeadDim, int kValueDim, DataType kDataType, bool kOptions>
void launch_attention_backward_key_value_wide_sm90(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                                   Stream stream) {
    launch_backward_sm90<BackwardWideConfigSm90<kHeadDim, kValueDim, kOptions>, kDataType>(
        kernel, attention_backward_key_value_wide_sm90<kHeadDim, kValueDim, kDataType, kOptions>, params, stream);
}

}  // namespace fastattn
