// Attention forward, FlashAttention-2 (Dao 2023, algorithm 1): O = softmax(scale · Q·Kᵀ + mask) · V, and the lse.
//
// One CTA computes kBlockM query rows of one head. Each warp owns 32 of the rows (16 above 128 dims) from start to end,
// and all threads also copy. key_tiles.cuh has the order of key tiles. Masked tiles have a loop of their own. It finds
// the bounds of each row's keys again for every tile, because the bounds do not fit in registers. K and V have one
// buffer each: while one is multiplied, the other is copied.
//
//   cp.async      K2 |   V2   |         K1         |   V1   |         K0         |   V0   |
//   tensor cores     | Q·K2ᵀ  | softmax     P·V2   | Q·K1ᵀ  | softmax     P·V1   | Q·K0ᵀ  | softmax     P·V0
//
// S, P and O stay in registers (PTX ISA, mma.m16n8k16), and Q too if there are enough (kQueryInRegisters). If there are
// few row tiles, CTAs split the keys of each (key_splits.h). Preconditions: those of HeadsView; head dims are multiples
// of 8 and at most kHeadDim. Takes any lengths, packed or not, any window, sinks, and any finite scale;
// forward_options_sm80.cuh has the other options.
#pragma once

#include <type_traits>

#include "attention/forward.h"
#include "attention/forward_config_sm80.cuh"
#include "attention/forward_epilogue_sm80.cuh"
#include "attention/forward_work_sm80.h"
#include "attention/key_tiles.cuh"
#include "device/fragment.cuh"
#include "device/largest_score.cuh"
#include "device/mask.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "device/shared_memory.h"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"
#include "device/warp_gemm.cuh"
#include "host/launch.h"

namespace fastattn {

template <typename Config>
struct alignas(128) ForwardStorageSm80 {
    uint16_t sQ[Config::kBlockM * Config::kHeadDim];  // swizzled; holds the output at the end
    uint16_t sK[Config::kBlockN * Config::kHeadDim];  // swizzled
    uint16_t sV[Config::kBlockN * Config::kHeadDim];  // swizzled
    // Masked steps read `tiles` and `window` each time they need them, because they have no registers to hold them.
    KeyTiles tiles;
    Window window;  // of rows counted from the tile's first
    KeySplit split;
    LargestScores<Config::kNumWarps> largest_scores;
};

template <int kHeadDim, bool kFewKeys>
using PlainConfigSm80 = ForwardConfigSm80<kHeadDim, ForwardTileSm80<kHeadDim, kFewKeys>>;

template <int kHeadDim, DataType kDataType, bool kFewKeys>
__global__ void __launch_bounds__(PlainConfigSm80<kHeadDim, kFewKeys>::kNumThreads,
                                  PlainConfigSm80<kHeadDim, kFewKeys>::kMinCtasPerSm)
    attention_forward_sm80(const __grid_constant__ AttentionForwardParams params) {
    using Config = PlainConfigSm80<kHeadDim, kFewKeys>;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kWarpM = Config::kWarpM;
    constexpr int kTilesM = Config::kTilesM, kTilesN = Config::kTilesN, kTilesD = Config::kTilesD;
    constexpr bool kLoadsKeysLate = kHeadDim == 256;  // copies K after the softmax: copied earlier, the loops spill
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardStorageSm80<Config>*>(shared_bytes);
    constexpr size_t kSharedBytesOfSm = kHeadDim == 128 && !kFewKeys ? kSharedBytesSm80 : kSharedBytesSm86;
    static_assert(ctas_with_room(sizeof(shared), kSharedBytesOfSm) >= Config::kMinCtasPerSm);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm86);

    // Prologue: finds the CTA's query rows and the keys that they see.
    const int warp = warp_in_cta(), lane = threadIdx.x % kWarpSize;
    const KeySplit split = own_split<kBlockM, kBlockN, /*kPaged=*/false>(shared.split, params, warp);
    if (!split.exists) return;
    const QueryTile tile = query_tile(params, kBlockM, split.tile_idx, split.is_split);
    const Sequence rows = query_rows(params, tile.batch), keys = keys_of_sequence<false>(params, tile.batch);
    const int32_t kv_head = tile.head / (params.query.heads / params.key.heads);
    const int32_t first_row = tile.idx * kBlockM;
    if (first_row >= rows.length) return;
    const int32_t last_row = min(first_row + kBlockM, rows.length) - 1;
    const Window window = window_of(params.scores, rows.length, keys.length);
    const KeyRange first_sees = window.keys_of(first_row), last_sees = window.keys_of(last_row);
    const KeyTiles all_tiles(first_sees, last_sees, kBlockN);
    const KeyTiles tiles = all_tiles.slice(steps_of_split(split, all_tiles.num_tiles()));
    if (ptx::tid_x() == 0) {
        shared.tiles = tiles;
        shared.window = {window.num_keys, window.offset + first_row, window.left, window.right};
    }

    if (params.max_logits != nullptr) shared.largest_scores.start(rows.length - first_row - warp * kWarpM);

    // The softmax takes maxima of Q·Kᵀ, so scores must increase with Q·Kᵀ. So Q is multiplied by the sign of scale, or
    // by 0 if scale is 0, and Q·Kᵀ by |scale|.
    const float scale = params.scores.scale, sign = scale > 0 ? 1.0f : scale < 0 ? -1.0f : scale;
    OnlineSoftmax<kTilesM> softmax(params.scale_log2);
    if (params.scores.sinks != nullptr && split.idx == 0) {  // only one split may count the sink
        softmax.set_sink(params.scores.sinks[tile.head], lane % kLanesPerRow == 0);
    }
    float rO[kTilesM][kTilesD][4] = {};  // [kWarpM, kHeadDim]

    // Producer: every thread copies its chunks of each tile.
    const int32_t first_tile = tiles.tile(tiles.num_tiles());
    const uint16_t* gQ = row_pointer(params.query, tile.batch, tile.head, rows.begin + first_row);
    const uint16_t* gK = row_pointer(params.key, tile.batch, kv_head, keys.begin + first_tile * kBlockN);
    const uint16_t* gV = row_pointer(params.value, tile.batch, kv_head, keys.begin + first_tile * kBlockN);
    TileLoader<kBlockM, kHeadDim, Config::kNumThreads> load_q(shared.sQ, gQ, params.query.row_stride, threadIdx.x,
                                                              params.query.head_dim);
    TileLoader<kBlockN, kHeadDim, Config::kNumThreads> load_k(shared.sK, gK, params.key.row_stride, threadIdx.x,
                                                              params.key.head_dim);
    TileLoader<kBlockN, kHeadDim, Config::kNumThreads> load_v(shared.sV, gV, params.value.row_stride, threadIdx.x,
                                                              params.value.head_dim);

    const SwizzledBlocks<kHeadDim> sQ(shared.sQ + warp * kWarpM * kHeadDim, ldmatrix_lane(lane));  // [kWarpM, kHeadDim]
    const SwizzledBlocks<kHeadDim> sK(shared.sK, ldmatrix_lane_b(lane));  // [kBlockN, kHeadDim]
    const SwizzledBlocks<kHeadDim> sV(shared.sV, ldmatrix_lane(lane));    // [kBlockN, kHeadDim]
    uint32_t rQ[kTilesM][kHeadDim / kMmaK][4];                            // [kWarpM, kHeadDim], if Q stays in registers

    // Computes one key tile. A masked tile may reach past the last key, and its rows may see different keys. num_left:
    // how many tiles are left, with this one.
    const auto step = [&](int32_t num_left, auto masked) {
        constexpr bool kMasked = masked.value;
        float rS[kTilesM][kTilesN][4];  // [kWarpM, kBlockN]: scores, then probabilities

        ptx::cp_async_wait_group<0>();  // waits for K and, in the first step, Q
        __syncthreads();                // waits until K has landed and every warp has read the previous V
        if constexpr (kMasked) {
            load_v.template load<true>(shared.window.num_keys - shared.tiles.tile(num_left) * kBlockN);
            const int64_t rows_skipped = shared.tiles.tiles_skipped(num_left) * kBlockN;
            load_v.skip(rows_skipped * params.value.row_stride);
            load_k.skip(rows_skipped * params.key.row_stride);
        } else {
            load_v.template load<false>(kBlockN);
        }
        ptx::cp_async_commit_group();
        if constexpr (Config::kQueryInRegisters) {
            gemm_qk<kDataType>(rS, rQ, sK);
        } else {
            gemm_qk<kDataType>(rS, sQ, sK);
        }

        ptx::cp_async_wait_group<0>();  // waits for V
        // Waits until V has landed, and until every warp has read K, so that K may be overwritten.
        bool some_nonfinite = false;
        if constexpr (kMasked) {
            some_nonfinite = __syncthreads_or(has_nonfinite<kDataType>(load_v));
        } else {
            __syncthreads();
        }
        const auto load_next_k = [&] {
            if (num_left > 1) load_k.template load<false>(kBlockN);
            ptx::cp_async_commit_group();
        };
        if constexpr (!kLoadsKeysLate) load_next_k();

        const int thread = ptx::tid_x(), own_lane = thread % kWarpSize;  // saves the registers of `warp`, `lane`
        const auto seen_by = [&](int row) { return shared.window.keys_of(thread / kWarpSize * kWarpM + row); };
        const int32_t first_key = shared.tiles.tile(num_left) * kBlockN;
        if constexpr (kMasked) {
            mask_scores(rS, own_lane,
                        [&](int, int, int row) { return own_columns_of(seen_by(row), first_key, own_lane); });
        }
        const auto max = maxima_of_lane(rS);
        if (params.max_logits != nullptr) shared.largest_scores.update(max);
        if (softmax.is_outgrown_by(max)) rescale(rO, softmax.follow(max));
        softmax.exponentiate(rS);
        if (some_nonfinite) {
            const auto sees = [&](int m, int half, int n) {
                return seen_by(m * kMmaM + accumulator_row(own_lane) + 8 * half).has(first_key + n);
            };
            separate_nonfinite<kDataType>(rO, shared.sV, load_v, sees, own_lane);
        }
        if constexpr (kLoadsKeysLate) load_next_k();
        gemm_pv<kDataType>(rO, rS, sV);
    };

    if (tiles.num_tiles() > 0) {
        load_q.template load<true>(rows.length - first_row);
        load_k.template load<true>(keys.length - first_tile * kBlockN);
        ptx::cp_async_commit_group();
        if (sign != 1.0f) {
            ptx::cp_async_wait_group<0>();  // waits for Q: a thread changes only what it copied itself
            load_q.for_own_pairs([&](uint32_t& pair, int) { pair = multiply<kDataType>(pair, sign); });
        }
        if constexpr (Config::kQueryInRegisters) {
            ptx::cp_async_wait_group<0>();  // waits for Q
            __syncthreads();                // waits until the copies of every thread have landed
            load_operands_a(rQ, sQ);
        }
    }
    int32_t num_left = tiles.num_tiles();
    if (num_left > tiles.num_full) {
        do {
            step(num_left, std::true_type{});
        } while (--num_left > shared.tiles.num_full);  // tiles.num_full would take a register in this loop
    }
    for (; num_left > 0; --num_left) step(num_left, std::false_type{});

    // Epilogue. Finds the tile again, because its indices would take registers in the loops.
    const KeySplit& own = shared.split;
    const QueryTile out_tile = query_tile(params, kBlockM, own.tile_idx, own.is_split);
    const Sequence out_rows = query_rows(params, out_tile.batch);
    if (params.max_logits != nullptr) {
        shared.largest_scores.reduce_into(params.max_logits + out_tile.head, fabsf(params.scores.scale));
    }
    if (own.num_splits > 1 || params.exact_out.data != nullptr) {
        using Rows = PartialRowsSm80<kBlockM, kHeadDim, kDataType>;
        const Rows partial_rows{params, {out_tile, out_rows, out_tile.idx * kBlockM}};
        store_or_combine_in_fp32<Config::kNumThreads, kWarpM>(partial_rows, own, rO, softmax, shared.sQ);
        return;
    }
    // A warp stages its rows of the output where its rows of Q were.
    uint16_t* sO = shared.sQ + warp * kWarpM * Config::kHeadDim;
    store_rounded_rows<Config, kDataType>(params, out_tile, out_rows, rO, softmax, sO, warp, lane, /*factor=*/1.0f);
}

template <int kHeadDim, DataType kDataType, bool kFewKeys>
void launch_attention_forward_sm80(LaunchedKernel& kernel, const AttentionForwardParams& params, Stream stream) {
    using Config = PlainConfigSm80<kHeadDim, kFewKeys>;
    const AttentionForwardParams launched = launched_params_sm80(params, Config::kBlockM, Config::kBlockN);
    const Launch launch{num_ctas_sm80(launched, Config::kBlockM), Config::kNumThreads,
                        sizeof(ForwardStorageSm80<Config>)};
    kernel.launch(attention_forward_sm80<kHeadDim, kDataType, kFewKeys>, launch, launched, stream);
}

}  // namespace fastattn
