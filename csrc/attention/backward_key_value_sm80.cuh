// Attention backward with every option: computes dK and dV, and adds dQ to fp32 sums. The algorithm is
// FlashAttention-2's (Dao 2023, algorithm 2).
//
//   P = exp(S - lse),  dV = dropout(P)ᵀ·dO,  dP = dropout(dO·Vᵀ),  dS = P∘(dP - delta)∘softcap'
//   dK = dSᵀ·Q,  dQ = dS·K
//
// One CTA owns kBlockN keys of one KV head and walks over the query rows that see these keys, for each query head of
// the KV head. K, V, P and dS are in shared memory, dK and dV in registers. A step of kBlockM rows, with its barriers
// (|):
//
//   cp.async         |                        |        | next Q, dO
//   tensor cores     | S = Q·Kᵀ   dP = dO·Vᵀ  | dV, dK | dQ → sums in global memory
//   shared memory    |        → P         → dS|        |
//
// Row tiles in which no row sees a key, through the window or ranges of keys, are skipped. With kOptions, every tile
// goes through all options. Without kOptions, scores are only scaled, and masked if some row does not see every key.
// Preconditions: those of HeadsView; head dims are multiples of 8 and at most kHeadDim; query_sums is zero, and so
// are semaphores and num_claimed if a launch uses them.
#pragma once

#include <type_traits>

#include "attention/backward.h"
#include "attention/backward_config_sm80.cuh"
#include "attention/backward_work_sm80.cuh"
#include "device/dropout.cuh"
#include "device/key_ranges.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/red.cuh"
#include "device/score_gradients.cuh"
#include "device/scores.cuh"
#include "device/shared_memory.h"
#include "device/tile_copy.cuh"
#include "device/warp_gemm.cuh"
#include "host/launch.h"
#include "scheduler/semaphore.cuh"

namespace fastattn {

// Where a CTA's keys are in memory. Kept in shared memory, because registers are scarce and few places read it.
struct KeysInMemory {
    int32_t batch, head;           // of K and V
    int32_t first_row, tile_keys;  // first row and number of rows in K and V
    int32_t first_sums_tile;       // of the keys' sequence, in dQ's sums
};

template <typename Config>
struct alignas(128) BackwardStorageSm80 {
    uint16_t sK[Config::kBlockN * Config::kRowElements];     // swizzled; holds dK at the end
    uint16_t sV[Config::kBlockN * Config::kRowElements];     // swizzled; holds dV at the end
    uint16_t sQ[Config::kBlockM * Config::kRowElements];     // swizzled
    uint16_t sdO[Config::kBlockM * Config::kRowElements];    // dO, swizzled
    uint16_t sP[Config::kBlockM * Config::kScoreElements];   // swizzled
    uint16_t sdS[Config::kBlockM * Config::kScoreElements];  // dS, swizzled
    RowTerms<Config::kBlockM> terms;
    KeysInMemory keys;
    uint32_t cta;         // see cta_in_order()
    bool some_nonfinite;  // K has NaN or infinity
};

template <int kHeadDim, DataType kDataType, bool kOptions>
__global__ void __launch_bounds__(BackwardConfigSm80<kHeadDim>::kNumThreads,
                                  BackwardConfigSm80<kHeadDim>::kMinCtasPerSm)
    attention_backward_key_value_sm80(const __grid_constant__ AttentionBackwardParams params) {
    using Config = BackwardConfigSm80<kHeadDim>;
    using KeyGrid = typename Config::KeyGrid;
    using QueryGrid = typename Config::QueryGrid;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kNumThreads = Config::kNumThreads;
    constexpr int kTilesM = Config::kTilesM, kTilesN = Config::kTilesN, kRowElements = Config::kRowElements;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<BackwardStorageSm80<Config>*>(shared_bytes);
    static_assert(has_room_for(Config::kMinCtasPerSm, sizeof(shared)));

    // Prologue: finds the CTA's keys and the rows that see them.
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    using WorkTile = KeyWorkTileSm80<kBlockM, kBlockN>;
    const bool has_ranges = kOptions && params.scores.ranges.data != nullptr;
    const WorkTile tile(params, cta_in_order(params, shared.cta), has_ranges);
    if (tile.tile_keys <= 0) return;
    const auto& [batch, key_head, key_tile, first_key, rows, keys, tile_keys, first_head, end_head, window, begin_tile,
                 end_tile, begin_full, end_full] = tile;
    RowTileWalk<WorkTile, kOptions> walk(params, tile);
    const KeysInMemory own_keys = {batch, key_head, keys.begin + first_key, tile_keys, tile.first_sums_tile(params)};
    if (threadIdx.x == 0) shared.keys = own_keys;

    typename KeyGrid::Accumulators rdK = {}, rdV = {};

    // Producer: every thread copies its chunks of each tile.
    using KeyLoader = TileLoader<kBlockN, kHeadDim, kNumThreads>;
    const auto keys_of = [&](const HeadsView<const uint16_t>& view, uint16_t* sTile, const KeysInMemory& own,
                             int thread) {
        const uint16_t* gTile = row_pointer(view, own.batch, own.head, own.first_row);
        return KeyLoader(sTile, gTile, view.row_stride, thread, view.head_dim);
    };
    const auto rows_of = [&](const HeadsView<const uint16_t>& view, uint16_t* sTile) {
        const uint16_t* gTile = row_pointer(view, batch, walk.head, rows.begin + walk.row_tile * kBlockM);
        return TileLoader<kBlockM, kHeadDim, kNumThreads, /*kDirection=*/1>(sTile, gTile, view.row_stride, threadIdx.x,
                                                                            view.head_dim);
    };
    auto load_q = rows_of(params.query, shared.sQ), load_do = rows_of(params.grad_out, shared.sdO);
    const auto load_rows = [&](int32_t head, int32_t row_tile) {
        const int64_t first = rows.begin + row_tile * kBlockM;
        shared.terms.template load<kNumThreads>(
            params, ptx::opaque(batch) * params.shift.batch_stride + head * params.shift.head_stride + first,
            rows.length - row_tile * kBlockM);
        load_q.template load<true>(rows.length - row_tile * kBlockM);
        load_do.template load<true>(rows.length - row_tile * kBlockM);
        ptx::cp_async_commit_group();
    };

    // The operands of all products, at this warp's position. For S and dP, the position is the warp's rows and keys.
    // For dK, dV and dQ, it is the warp's rows and columns in KeyGrid or QueryGrid.
    const int warp_m = warp % Config::kRowWarpsOfS * Config::kWarpM,
              warp_n = warp / Config::kRowWarpsOfS * Config::kWarpN;
    const SwizzledBlocks<kHeadDim> sQ(shared.sQ + warp_m * kRowElements, ldmatrix_lane(lane));
    const SwizzledBlocks<kHeadDim> sdO(shared.sdO + warp_m * kRowElements, ldmatrix_lane(lane));
    const SwizzledBlocks<kHeadDim> sK(shared.sK + warp_n * kRowElements, ldmatrix_lane_b(lane));
    const SwizzledBlocks<kHeadDim> sV(shared.sV + warp_n * kRowElements, ldmatrix_lane_b(lane));
    const LdmatrixLane key_columns = at_column(ldmatrix_lane_b(lane), KeyGrid::first_row(warp));
    const SwizzledBlocks<kBlockN> sPt(shared.sP, key_columns), sdSt(shared.sdS, key_columns);
    const LdmatrixLane dims_of_key = at_column(ldmatrix_lane(lane), KeyGrid::first_column(warp));
    const SwizzledBlocks<kHeadDim> sdOd(shared.sdO, dims_of_key), sQd(shared.sQ, dims_of_key);
    const SwizzledBlocks<kBlockN> sdS(shared.sdS + QueryGrid::first_row(warp) * Config::kScoreElements,
                                      ldmatrix_lane(lane));
    const SwizzledBlocks<kHeadDim> sKd(shared.sK, at_column(ldmatrix_lane(lane), QueryGrid::first_column(warp)));

    // Computes one step: the current row tile of `walk`.
    const auto step = [&](const HeadScores& scores) {
        const int32_t head = walk.head, row_tile = walk.row_tile;
        const bool is_full = walk.is_full();
        const Dropout dropout(params.scores, batch * params.query.heads + head);
        ScoreGradients<kTilesM, kTilesN, kBlockM, kBlockN, kOptions> gradients(
            scores, shared.terms, is_full, params.log2_sum.data != nullptr, row_tile * kBlockM, first_key, warp_m,
            warp_n, lane);
        float rS[kTilesM][kTilesN][4];  // [kWarpM, kWarpN]

        ptx::cp_async_wait_group<0>();  // waits for Q, dO and terms
        __syncthreads();  // waits for every thread's copies, and until every warp has read the previous P and dS
        gemm_qk<kDataType>(rS, sQ, sK);
        gradients.template probabilities<kDataType>(shared.sP, rS, dropout,
                                                    [&] { return RowRanges(params.scores.ranges, batch, head, rows); });
        for_constant<kTilesN / 2>([&](auto pair) {  // dP of 16 keys at a time: more would spill
            float rdP[kTilesM][2][4];
            gemm_qk<kDataType>(rdP, sdO, sV.at_row(pair.value * kMmaK));
            gradients.template from_scores<kDataType, 2 * pair.value>(shared.sdS, rS, rdP);
        });

        __syncthreads();  // waits until every warp has stored its P and dS
        gemm_accumulate<kDataType, /*kTransposeA=*/true, kBlockM, KeyGrid::kColumnStep>(rdV, sPt, sdOd);
        gemm_accumulate<kDataType, /*kTransposeA=*/true, kBlockM, KeyGrid::kColumnStep>(rdK, sdSt, sQd);

        // NaN and infinity in K count as zero in this step's dQ: see device/nonfinite.cuh.
        const bool clean = (kOptions || !is_full) && shared.some_nonfinite;
        KeyLoader load_k = keys_of(params.key, shared.sK, shared.keys, ptx::opaque(threadIdx.x));
        if (clean) load_k.for_own_pairs([](uint32_t& pair, int) { pair &= ~nonfinite_mask<kDataType>(pair); });
        __syncthreads();   // waits until every warp has read Q, dO and terms, so that they may be overwritten
        auto next = walk;  // found again after the step, because keeping it would take registers
        next.go_on();
        if (!next.is_over()) {
            const auto skip_to_next = [&](auto& loader, const HeadsView<const uint16_t>& view) {
                if (has_ranges) {
                    loader.skip((next.head - head) * view.head_stride +
                                (next.row_tile - row_tile - 1) * kBlockM * view.row_stride);
                } else if (next.head != head) {
                    loader.skip(view.head_stride - (ptx::opaque(end_tile) - begin_tile) * kBlockM * view.row_stride);
                }
            };
            skip_to_next(load_q, params.query);
            skip_to_next(load_do, params.grad_out);
            load_rows(next.head, next.row_tile);
        }
        const int64_t sums_tile = int64_t{shared.keys.first_sums_tile + row_tile} * params.query.heads + head;
        float* sums = params.query_sums + sums_tile * Config::kQuerySums;
        const Semaphore semaphore{params.semaphores != nullptr ? params.semaphores + sums_tile : nullptr};
        semaphore.wait(walk.num_before(scores.window), CtaBarrier{});
        constexpr int kTilesAtOnce = QueryGrid::kTilesD % 4 == 0 ? 4 : 2;
        for_constant<QueryGrid::kTilesD / kTilesAtOnce>([&](auto slice) {  // dQ in slices: the whole dQ would spill
            constexpr int kFirst = slice.value * kTilesAtOnce;
            float rdQ[QueryGrid::kTilesM][kTilesAtOnce][4] = {};
            gemm_accumulate<kDataType, /*kTransposeA=*/false, kBlockN, QueryGrid::kColumnStep,
                            kFirst / 2 * QueryGrid::kColumnStep>(rdQ, sdS, sKd);
            QueryGrid::template for_each_sum<kFirst>(sums, rdQ, warp, ptx::opaque(lane), ptx::red_add_f32);
        });
        semaphore.release(CtaBarrier{});
        if (clean) {
            __syncthreads();  // waits until every warp has read the K that has zeros
            load_k.template load<true>(shared.keys.tile_keys);
            ptx::cp_async_commit_group();
        }
    };

    if (!walk.is_over()) {
        KeyLoader load_k = keys_of(params.key, shared.sK, own_keys, threadIdx.x);
        KeyLoader load_v = keys_of(params.value, shared.sV, own_keys, threadIdx.x);
        load_k.template load<true>(tile_keys);
        load_v.template load<true>(tile_keys);
        load_rows(walk.head, walk.row_tile);
        ptx::cp_async_wait_group<0>();  // waits for this thread's copies, in which it then looks for NaN and infinity
        const bool some_nonfinite = __syncthreads_or(has_nonfinite<kDataType>(load_k));
        if (threadIdx.x == 0) shared.some_nonfinite = some_nonfinite;
    }
    for (; !walk.is_over(); walk.go_on()) {
        step(HeadScores(params.scores, batch, walk.head, rows.length, keys.length));
    }

    // Epilogue: stages dK and dV in the shared memory of K and V, and stores them. If sum_key is given, adds dK and dV
    // from registers to fp32 gradients instead.
    ptx::cp_async_wait_group<0>();  // waits for K, if the last step has copied it again
    __syncthreads();                // waits until every warp has read K and V
    const int thread = ptx::opaque(threadIdx.x), own_warp = thread / kWarpSize, own_lane = thread % kWarpSize;
    const float value_factor = params.scores.dropout_factor;
    if (params.sum_key.data != nullptr) {
        const auto add = [&](const HeadsView<float>& view, const typename KeyGrid::Accumulators& rC, float factor) {
            const auto [batch, head, first_row, tile_keys, first_sums] = shared.keys;
            const auto row_at = [&](int row) -> float* {
                return row < tile_keys ? row_pointer(view, batch, head, first_row + row) : nullptr;
            };
            KeyGrid::add_to(row_at, rC, factor, view.head_dim, own_warp, own_lane);
        };
        add(params.sum_key, rdK, params.scores.scale);
        add(params.sum_value, rdV, value_factor);
        return;
    }
    KeyGrid::template stage<kDataType>(shared.sK, rdK, params.scores.scale, own_warp, own_lane);
    KeyGrid::template stage<kDataType>(shared.sV, rdV, value_factor, own_warp, own_lane);
    __syncthreads();  // waits until every warp has stored its rows of both tiles
    constexpr int kStoredRows = kBlockN / Config::kNumWarps;
    const int32_t stored_row = own_warp * kStoredRows;
    const auto store = [&](const HeadsView<uint16_t>& view, const uint16_t* sTile) {
        const auto [batch, head, first_row, tile_keys, first_sums] = shared.keys;
        store_rows<kStoredRows, kHeadDim>(row_pointer(view, batch, head, first_row + stored_row), view.row_stride,
                                          tile_keys - stored_row, sTile + stored_row * kRowElements, own_lane,
                                          view.head_dim);
    };
    store(params.grad_key, shared.sK);
    store(params.grad_value, shared.sV);
}

template <int kHeadDim, DataType kDataType, bool kOptions>
void launch_attention_backward_key_value_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                              Stream stream) {
    using Config = BackwardConfigSm80<kHeadDim>;
    const int64_t num_ctas = int64_t{ceil_div(params.key.rows, Config::kBlockN)} * params.key.heads * params.key.batch;
    const Launch launch{num_ctas, Config::kNumThreads, sizeof(BackwardStorageSm80<Config>)};
    kernel.launch(attention_backward_key_value_sm80<kHeadDim, kDataType, kOptions>, launch, params, stream);
}

}  // namespace fastattn
