// Attention backward on large key tiles: computes dK and dV, and adds dQ to fp32 sums. The algorithm is
// FlashAttention-2's (Dao 2023, algorithm 2).
//
//   P = exp(S - lse),  dV = Pᵀ·dO,  dP = dO·Vᵀ,  dS = P∘(dP - delta),  dK = dSᵀ·Q,  dQ = dS·K
//
// One CTA owns kBlockN keys of one KV head and walks over the query rows that see these keys, for each query head of
// the KV head. Each of four value warps computes dV of 32 keys, and each of four key warps computes dK of 32 keys,
// because the registers of one warp do not hold both dV and dK. A step has kBlockM rows. All warps meet at a barrier
// (|) between steps. Q, dO, row terms and dSᵀ have one buffer for even steps and one for odd steps.
//
//   value warps  |  step i, 32 rows at a time:  Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ → Pᵀ in registers → dV;  dSᵀ → shared memory  |
//   key warps    |  copy dO of step i + 1;  dK of step i - 1;  copy Q of step i + 1;  dQ of step i - 1 → global sums  |
//
// Row tiles in which no row sees a key are skipped. Row tiles in which some row does not see every key are masked.
// Preconditions: those of HeadsView; head dims are multiples of 8 and at most kHeadDim; query_sums is zero, and so
// are semaphores and num_claimed if a launch uses them.
#pragma once

#include "attention/backward.h"
#include "attention/backward_config_sm80.cuh"
#include "attention/backward_work_sm80.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/named_barrier.cuh"
#include "device/ptx/red.cuh"
#include "device/shared_memory.h"
#include "device/tile_copy.cuh"
#include "device/warp_gemm.cuh"
#include "device/warp_transposed_scores.cuh"
#include "host/launch.h"
#include "scheduler/semaphore.cuh"

namespace fastattn {

template <int kHeadDim_>
struct BackwardLargeConfigSm80 : BackwardLargeTileSm80<kHeadDim_> {
    using Tile = BackwardLargeTileSm80<kHeadDim_>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kRoleWarps = Tile::kNumWarps / 2;  // key warps come first
    static constexpr int kKeyThreads = kRoleWarps * kWarpSize, kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kRowElements = Swizzle<kHeadDim>::kRowElements;         // of Q, dO, K, V
    static constexpr int kScoreElements = Swizzle<Tile::kBlockM>::kRowElements;  // of dSᵀ

    static constexpr int kWarpN = Tile::kBlockN / kRoleWarps;  // keys of a warp
    static constexpr int kSliceM = 32;                         // rows of S that a value warp computes at a time
    static constexpr int kTilesM = kWarpN / kMmaM, kTilesN = kSliceM / kMmaN;
    static_assert(Tile::kBlockM % kSliceM == 0, "a tile of rows consists of whole slices");

    using KeyGrid = HeadDimGrid<Tile::kBlockN, kHeadDim, kRoleWarps, kRoleWarps>;  // dK, dV
    using QueryGrid = HeadDimGrid<Tile::kBlockM, kHeadDim, 2, kRoleWarps>;         // dQ
    static constexpr int kQuerySums = Tile::kBlockM * kHeadDim;  // numbers in a tile of params.query_sums
    static_assert(int{Tile::kBlockM} == int{BackwardTileSm80<kHeadDim>::kBlockM},
                  "the kernel that reads the sums goes by that tile");
};

template <typename Config>
struct alignas(128) BackwardLargeStorageSm80 {
    uint16_t sK[Config::kBlockN * Config::kRowElements];         // swizzled; holds dK at the end
    uint16_t sV[Config::kBlockN * Config::kRowElements];         // swizzled; holds dV at the end
    uint16_t sQ[2][Config::kBlockM * Config::kRowElements];      // swizzled
    uint16_t sdO[2][Config::kBlockM * Config::kRowElements];     // dO, swizzled
    uint16_t sdSt[2][Config::kBlockN * Config::kScoreElements];  // dSᵀ, swizzled
    ColumnTerms<Config::kBlockM> terms[2];
    KeyWorkTileSm80<Config::kBlockM, Config::kBlockN> tile;  // in shared memory, as registers are scarce
    uint32_t cta;                                            // see cta_in_order()
    int some_nonfinite;                                      // 1: K has NaN or infinity
};

// Ids of named barriers; __syncthreads() uses 0.
inline constexpr int kStepBarrier = 1;     // all warps
inline constexpr int kKeyWarpBarrier = 2;  // key warps

template <int kHeadDim, DataType kDataType>
struct BackwardLargeSm80 {
    using Config = BackwardLargeConfigSm80<kHeadDim>;
    using Storage = BackwardLargeStorageSm80<Config>;
    using KeyGrid = typename Config::KeyGrid;
    using QueryGrid = typename Config::QueryGrid;
    static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kRowElements = Config::kRowElements;
    using WorkTile = KeyWorkTileSm80<kBlockM, kBlockN>;

    const AttentionBackwardParams& params;
    Storage& shared;
    const WorkTile& tile;
    int role_warp, lane;

    FASTATTN_DEVICE int32_t num_tiles() const { return max(tile.end_tile - tile.begin_tile, 0); }
    FASTATTN_DEVICE int32_t num_steps() const { return num_tiles() * (tile.end_head - tile.first_head); }

    FASTATTN_DEVICE static void meet_all() { ptx::bar_sync(kStepBarrier, Config::kNumThreads); }
    FASTATTN_DEVICE static void meet_key_warps() { ptx::bar_sync(kKeyWarpBarrier, Config::kKeyThreads); }

    // Stores a warp's 32 rows of dK or dV, staged in the shared memory of K or V. If `sums` has data, adds the rows to
    // it instead.
    FASTATTN_DEVICE void store(const HeadsView<uint16_t>& view, const HeadsView<float>& sums, uint16_t* sTile,
                               const typename KeyGrid::Accumulators& rC, float factor) const {
        const int32_t first_in_memory = tile.keys.begin + tile.first_key;
        if (sums.data != nullptr) {
            const auto row_at = [&](int row) -> float* {
                if (row >= tile.tile_keys) return nullptr;
                return row_pointer(sums, tile.batch, tile.key_head, first_in_memory + row);
            };
            KeyGrid::add_to(row_at, rC, factor, view.head_dim, role_warp, lane);
            return;
        }
        KeyGrid::template stage<kDataType>(sTile, rC, factor, role_warp, lane);
        __syncwarp();  // waits until every lane has stored its values
        const int32_t row = KeyGrid::first_row(role_warp);
        store_rows<Config::kWarpN, kHeadDim>(row_pointer(view, tile.batch, tile.key_head, first_in_memory + row),
                                             view.row_stride, tile.tile_keys - row, sTile + row * kRowElements, lane,
                                             view.head_dim);
    }

    FASTATTN_DEVICE void run_value_warp() const {
        using Scores = TransposedScores<Config::kTilesM, Config::kTilesN>;
        const int warp_key = role_warp * Config::kWarpN;
        const SwizzledBlocks<kHeadDim> sK(shared.sK + warp_key * kRowElements, ldmatrix_lane(lane));
        const SwizzledBlocks<kHeadDim> sV(shared.sV + warp_key * kRowElements, ldmatrix_lane(lane));
        const SwizzledBlocks<kHeadDim> sQ(shared.sQ[0], ldmatrix_lane_b(lane));
        const SwizzledBlocks<kHeadDim> sdO(shared.sdO[0], ldmatrix_lane_b(lane));
        const SwizzledBlocks<kHeadDim> sdOd(shared.sdO[0], ldmatrix_lane(lane));
        const uint32_t dS_offset = accumulator_offset<kBlockM>(warp_key, 0, lane);
        const float scale_log2 = params.scores.scale * kLog2E;
        typename KeyGrid::Accumulators rdV = {};  // dV, [kWarpN, kHeadDim] of a warp

        int num_meetings = 1;
        const auto meet = [&] {
#pragma unroll 1
            for (int i = 0; i < num_meetings; ++i) meet_all();
        };
        int32_t row_tile = tile.begin_tile;
#pragma unroll 1
        for (int32_t steps_left = num_steps(); steps_left > 0; --steps_left) {
            meet();  // waits for Q, dO and terms, and until the key warps have read dS of two steps ago
            const int buffer = steps_left % 2;
            const bool is_full = tile.is_full(row_tile);
            const auto sQ_here = sQ.below(buffer * kBlockM), sdO_here = sdO.below(buffer * kBlockM);
            const auto sdOd_here = sdOd.below(buffer * kBlockM);
            const uint32_t dS_here = dS_offset + buffer * sizeof(shared.sdSt[0]);
            for_constant<kBlockM / Config::kSliceM>([&](auto slice) {
                constexpr int kRow = slice.value * Config::kSliceM;
                typename Scores::Accumulators rS, rdP;
                gemm_qk<kDataType>(rS, sK, sQ_here.at_row(kRow));
                Scores::init_dp(rdP, shared.terms[buffer].minus_delta + kRow / 2, lane);
                accumulate_qk<kDataType>(rdP, sV, sdO_here.at_row(kRow));
                Scores::to_probabilities(rS, shared.terms[buffer].minus_shift_log2 + kRow, scale_log2, lane);
                if (!is_full) {
                    const KeyBand seen(tile.window, tile.rows.length, row_tile * kBlockM + kRow,
                                       tile.first_key + warp_key);
                    Scores::mask(rS, rdP, seen, lane);
                }
                gemm_pv<kDataType>(rdV, rS, sdOd_here.at_row(kRow));
                Scores::to_score_gradients(rdP, rS);
                stage_scores_at<kDataType, kBlockM>(shared.sdSt[0], dS_here, rdP, kRow / kMmaN);
            });
            num_meetings = 1 + shared.some_nonfinite;  // two if the key warps zero NaN and infinity in K
            if (++row_tile == tile.end_tile) row_tile = tile.begin_tile;
        }
        meet();
        if (num_meetings > 1) meet_all();
        store(params.grad_value, params.sum_value, shared.sV, rdV, 1.0f);
    }

    FASTATTN_DEVICE void run_key_warp() const {
        using KeyLoader = TileLoader<kBlockN, kHeadDim, Config::kKeyThreads>;
        using RowLoader = TileLoader<kBlockM, kHeadDim, Config::kKeyThreads, /*kDirection=*/1>;
        const auto load_keys = [&](const HeadsView<const uint16_t>& view, uint16_t* sTile) {
            const uint16_t* gTile = row_pointer(view, tile.batch, tile.key_head, tile.keys.begin + tile.first_key);
            KeyLoader loader(sTile, gTile, view.row_stride, ptx::opaque(threadIdx.x), view.head_dim);
            loader.template load<true>(tile.tile_keys);
            return loader;
        };

        // Copies rows one step ahead of the value warps. Of each tile, dO comes first, then Q.
        const int32_t begin_row = tile.rows.begin + tile.begin_tile * kBlockM;
        const auto rows_of = [&](const HeadsView<const uint16_t>& view, uint16_t* sTiles) {
            const uint16_t* gTile = row_pointer(view, tile.batch, tile.first_head, begin_row);
            return RowLoader(sTiles, gTile, view.row_stride, threadIdx.x, view.head_dim);
        };
        RowLoader load_q = rows_of(params.query, shared.sQ[0]), load_do = rows_of(params.grad_out, shared.sdO[0]);
        ColumnTermsLoader<kBlockM> load_terms(params, tile.batch, tile.first_head, begin_row);
        const int32_t most_left = tile.rows.length - tile.begin_tile * kBlockM;
        const int32_t least_left = tile.rows.length - tile.end_tile * kBlockM;
        int32_t rows_left = most_left;  // rows of the sequence from the next tile to copy to the end
        const auto load_tile = [&](RowLoader& loader, int buffer) {
            const uint32_t behind = buffer * sizeof(shared.sQ[0]);
            if (rows_left >= kBlockM) {
                loader.template load<false>(kBlockM, behind);
            } else {
                loader.template load<true>(rows_left, behind);
            }
        };
        const auto start_do = [&](int buffer) {
            load_terms.load(rows_left);
            load_tile(load_do, buffer);
        };
        const auto start_q = [&](int buffer) {
            load_tile(load_q, buffer);
            rows_left -= kBlockM;
            if (rows_left == least_left) {  // go on to the next head
                rows_left = most_left;
                const int64_t walked = num_tiles() * kBlockM;
                load_q.skip(params.query.head_stride - walked * params.query.row_stride);
                load_do.skip(params.grad_out.head_stride - walked * params.grad_out.row_stride);
                load_terms.skip(params.shift.head_stride - walked);
            }
            ptx::cp_async_commit_group();
        };
        const auto finish = [&](int buffer) {
            load_terms.store(shared.terms[buffer]);
            ptx::cp_async_wait_group<0>();
        };

        const SwizzledBlocks<kBlockM> sdSt(shared.sdSt[0] + KeyGrid::first_row(role_warp) * Config::kScoreElements,
                                           ldmatrix_lane(lane));
        const SwizzledBlocks<kHeadDim> sQd(shared.sQ[0], ldmatrix_lane(lane));
        const SwizzledBlocks<kBlockM> sdS(shared.sdSt[0],
                                          at_column(ldmatrix_lane_b(lane), QueryGrid::first_row(role_warp)));
        const SwizzledBlocks<kHeadDim> sKd(shared.sK,
                                           at_column(ldmatrix_lane(lane), QueryGrid::first_column(role_warp)));
        const int32_t first_sums_tile = tile.first_sums_tile(params);
        const auto sums_tile = [&](int32_t head, int32_t row_tile) {
            return int64_t{first_sums_tile + row_tile} * params.query.heads + head;
        };
        typename KeyGrid::Accumulators rdK = {};  // dK, [kWarpN, kHeadDim] of a warp

        int32_t steps_left = num_steps();
        bool some_nonfinite = false;
        if (steps_left > 0) {
            const KeyLoader own_keys = load_keys(params.key, shared.sK);
            load_keys(params.value, shared.sV);
            start_do(steps_left % 2);
            start_q(steps_left % 2);
            finish(steps_left % 2);  // waits for this thread's copies, in which it then looks for NaN and infinity
            some_nonfinite = ptx::bar_red_or(kKeyWarpBarrier, Config::kKeyThreads, has_nonfinite<kDataType>(own_keys));
            if (threadIdx.x == 0) shared.some_nonfinite = some_nonfinite;
        }
        meet_all();                      // lets the value warps start the first step
        if (some_nonfinite) meet_all();  // the second barrier of a step, as below
        if (steps_left > 1) {
            start_do((steps_left - 1) % 2);
            start_q((steps_left - 1) % 2);
            finish((steps_left - 1) % 2);
        }
        int32_t head = tile.first_head, row_tile = tile.begin_tile;
        float* sums = params.query_sums + sums_tile(head, row_tile) * Config::kQuerySums;
#pragma unroll 1
        for (; steps_left > 0; --steps_left) {
            meet_all();  // waits until the value warps have stored dS, and have read dO and terms of this step
            const int buffer = steps_left % 2;
            const bool loads = steps_left > 2;
            if (loads) start_do(buffer);
            gemm_accumulate<kDataType, /*kTransposeA=*/false, kBlockM, KeyGrid::kColumnStep>(
                rdK, sdSt.below(buffer * kBlockN), sQd.below(buffer * kBlockM));
            meet_key_warps();  // waits until every key warp has read Q
            if (loads) start_q(buffer);

            // NaN and infinity in K count as zero in this step's dQ: see device/nonfinite.cuh.
            const bool cleans = some_nonfinite && !tile.is_full(row_tile);
            if (some_nonfinite) {
                meet_all();  // waits until the value warps have read K in their current step
                if (cleans) {
                    KeyLoader(shared.sK, nullptr, 0, ptx::opaque(threadIdx.x)).for_own_pairs([](uint32_t& pair, int) {
                        pair &= ~nonfinite_mask<kDataType>(pair);
                    });
                }
                meet_key_warps();  // waits until all of K is finite
            }
            typename QueryGrid::Accumulators rdQ = {};
            gemm_accumulate<kDataType, /*kTransposeA=*/true, kBlockN, QueryGrid::kColumnStep>(
                rdQ, sdS.below(buffer * kBlockN), sKd);
            const Semaphore semaphore{params.semaphores != nullptr ? params.semaphores + sums_tile(head, row_tile)
                                                                   : nullptr};
            semaphore.wait(tile.key_tile - tile.window.keys_of(row_tile * kBlockM).begin / kBlockN, meet_key_warps);
            QueryGrid::template for_each_sum<0>(sums, rdQ, role_warp, lane, ptx::red_add_f32);
            semaphore.release(meet_key_warps);
            if (cleans) {
                meet_key_warps();  // waits until every key warp has read the K that has zeros
                load_keys(params.key, shared.sK);
                ptx::cp_async_commit_group();
            }

            if (loads) load_terms.store(shared.terms[buffer]);
            ptx::cp_async_wait_group<0>();  // waits for Q, dO and, if it was loaded again, K
            sums += params.query.heads * Config::kQuerySums;
            if (++row_tile == tile.end_tile) {
                row_tile = tile.begin_tile;
                ++head;
                sums = params.query_sums + sums_tile(head, row_tile) * Config::kQuerySums;
            }
        }
        meet_key_warps();  // waits until every key warp has read K
        store(params.grad_key, params.sum_key, shared.sK, rdK, params.scores.scale);
    }
};

template <int kHeadDim, DataType kDataType>
__global__ void __launch_bounds__(BackwardLargeConfigSm80<kHeadDim>::kNumThreads,
                                  BackwardLargeConfigSm80<kHeadDim>::kMinCtasPerSm)
    attention_backward_key_value_large_sm80(const __grid_constant__ AttentionBackwardParams params) {
    using Kernel = BackwardLargeSm80<kHeadDim, kDataType>;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<typename Kernel::Storage*>(shared_bytes);
    using Tile = BackwardLargeTileSm80<kHeadDim>;
    static_assert(Tile::kFitsEverywhere ? has_room_for(Tile::kMinCtasPerSm, sizeof(shared))
                                        : sizeof(shared) <= kSharedBytesPerCtaSm80);

    const typename Kernel::WorkTile tile(params, cta_in_order(params, shared.cta));
    if (tile.tile_keys <= 0) return;
    if (threadIdx.x == 0) shared.tile = tile;
    __syncthreads();  // waits until the work tile is in shared memory
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    constexpr int kRoleWarps = Kernel::Config::kRoleWarps;
    const Kernel kernel{params, shared, shared.tile, warp % kRoleWarps, lane};
    if (warp < kRoleWarps) {
        kernel.run_key_warp();
    } else {
        kernel.run_value_warp();
    }
}

template <int kHeadDim, DataType kDataType>
void launch_attention_backward_key_value_large_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                                    Stream stream) {
    using Config = BackwardLargeConfigSm80<kHeadDim>;
    const int64_t num_ctas = int64_t{ceil_div(params.key.rows, Config::kBlockN)} * params.key.heads * params.key.batch;
    const Launch launch{num_ctas, Config::kNumThreads, sizeof(BackwardLargeStorageSm80<Config>)};
    kernel.launch(attention_backward_key_value_large_sm80<kHeadDim, kDataType>, launch, params, stream);
}

}  // namespace fastattn
