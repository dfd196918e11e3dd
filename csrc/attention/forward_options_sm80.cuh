// Attention forward with every option: what forward_sm80.cuh computes, with softcap, ALiBi or a bias on the scores,
// dropout, and either ranges of keys or keys in pages.
//
// CTAs and warps divide the work as in forward_sm80.cuh; a warp always has 16 rows. A step has two more parts: the
// scores before the softmax, and dropout after it.
//
//   cp.async      K2 |   V2   |                 K1                 |   V1   | …
//   tensor cores     | Q·K2ᵀ  | scores, softmax, dropout     P·V2  | Q·K1ᵀ  | …
//
// Options are chosen at run time by branches, which all threads of a CTA take alike. Key tiles that no row sees are
// skipped; with ranges of keys, key_ranges_sm80.cuh lists the tiles that are left. A tile is masked if some row does
// not see every key of it; with a bias, all tiles are masked. kPaged: keys are in pages. While a step computes, each
// thread looks up its rows of the next tile in the block table. Preconditions: those of HeadsView; head dims are
// multiples of 8 and at most kHeadDim.
#pragma once

#include "attention/forward.h"
#include "attention/forward_config_sm80.cuh"
#include "attention/forward_epilogue_sm80.cuh"
#include "attention/forward_work_sm80.h"
#include "attention/key_tiles.cuh"
#include "device/dropout.cuh"
#include "device/fragment.cuh"
#include "device/key_ranges.cuh"
#include "device/largest_score.cuh"
#include "device/nonfinite.cuh"
#include "device/paged_rows.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/scores.cuh"
#include "device/shared_memory.h"
#include "device/softmax.cuh"
#include "device/swizzle.cuh"
#include "device/tile_copy.cuh"
#include "device/warp_gemm.cuh"
#include "host/launch.h"

namespace fastattn {

template <int kHeadDim>
using ForwardOptionsConfigSm80 = ForwardConfigSm80<kHeadDim, ForwardOptionsTileSm80<kHeadDim>>;

template <typename Config>
struct alignas(128) ForwardOptionsStorageSm80 {
    uint16_t sQ[Config::kBlockM * Config::kHeadDim];  // swizzled; holds the output at the end
    uint16_t sK[Config::kBlockN * Config::kHeadDim];  // swizzled
    uint16_t sV[Config::kBlockN * Config::kHeadDim];  // swizzled
    KeySplit split;
    KeyRange full_tiles;  // values of tile_idx of full tiles; in shared memory to save registers in the loop
    LargestScores<Config::kNumWarps> largest_scores;
};

template <int kHeadDim, DataType kDataType, bool kPaged>
__global__ void __launch_bounds__(ForwardOptionsConfigSm80<kHeadDim>::kNumThreads,
                                  ForwardOptionsConfigSm80<kHeadDim>::kMinCtasPerSm)
    attention_forward_options_sm80(const __grid_constant__ AttentionForwardParams params) {
    using Config = ForwardOptionsConfigSm80<kHeadDim>;
    constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kWarpM = Config::kWarpM;
    constexpr int kTilesM = Config::kTilesM, kTilesN = Config::kTilesN, kTilesD = Config::kTilesD;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<ForwardOptionsStorageSm80<Config>*>(shared_bytes);
    static_assert(sizeof(shared) <= kSharedBytesPerCtaSm86);

    // Prologue: finds the CTA's query rows and the keys that they see.
    const ScoreParams& options = params.scores;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const KeySplit split = own_split<kBlockM, kBlockN, kPaged>(shared.split, params, warp);
    if (!split.exists) return;
    const QueryTile tile = query_tile(params, kBlockM, split.tile_idx, split.is_split);
    const int32_t kv_head = tile.head / (params.query.heads / params.key.heads);
    const Sequence rows = query_rows(params, tile.batch), keys = keys_of_sequence<kPaged>(params, tile.batch);
    const int32_t first_row = tile.idx * kBlockM;
    if (first_row >= rows.length) return;
    const int32_t last_row = min(first_row + kBlockM, rows.length) - 1;
    const int32_t warp_row = first_row + warp * kWarpM;
    const Window window = window_of(options, rows.length, keys.length);
    const float slope = HeadScores::slope_of(options, tile.batch, tile.head);
    const KeyRange first_sees = window.keys_of(first_row), last_sees = window.keys_of(last_row);
    const KeyTiles all_tiles(first_sees, last_sees, kBlockN);
    const Steps steps = steps_of_split(split, all_tiles.num_tiles());
    const int32_t begin_tile = all_tiles.begin + steps.end, end_tile = all_tiles.begin + steps.begin;
    const bool has_ranges = !kPaged && options.ranges.data != nullptr;
    const KeyTileList list{has_ranges ? params.seen_tiles.of(tile.batch, tile.head, tile.idx, rows.begin) : nullptr};
    if (threadIdx.x == 0) {
        const bool has_bias = options.bias.kind != BiasView::Kind::kNone;
        shared.full_tiles = has_bias     ? KeyRange{0, 0}
                            : has_ranges ? KeyRange{0, list.num_full()}
                                         : KeyRange{ceil_div(last_sees.begin, kBlockN), first_sees.end / kBlockN};
    }

    if (params.max_logits != nullptr) shared.largest_scores.start(rows.length - warp_row);

    OnlineSoftmax<kTilesM, /*kInNats=*/true> softmax(kLog2E);
    if (options.sinks != nullptr && split.idx == 0) {  // only one split may count the sink
        softmax.set_sink(options.sinks[tile.head], lane % kLanesPerRow == 0);
    }
    const Dropout dropout(options, tile.batch * params.query.heads + tile.head);
    float rO[kTilesM][kTilesD][4] = {};  // [kWarpM, kHeadDim]

    // Producer: every thread copies its chunks of each tile. Key tiles go from the last to the first, or from the end
    // of the list to its beginning. tile_idx is a tile's index in the list or, without a list, the tile itself. Only
    // the first tile that is visited may reach past the last key: in a list, such a tile is not full and has the
    // highest number, so it is the last entry.
    const int32_t num_tiles = ceil_div(keys.length, kBlockN), num_complete = keys.length / kBlockN;
    int32_t tile_idx = has_ranges ? min(list.num_tiles(), num_tiles) - 1 : end_tile - 1;
    const int32_t begin_idx = has_ranges ? 0 : begin_tile;
    const auto tile_at = [&](int32_t idx, int32_t end) { return has_ranges ? list.checked_tile(idx, end - 1) : idx; };
    int32_t key_tile = has_ranges && tile_idx < 0 ? 0 : tile_at(tile_idx, num_tiles);
    const uint16_t* gQ = row_pointer(params.query, tile.batch, tile.head, rows.begin + first_row);
    TileLoader<kBlockM, kHeadDim, Config::kNumThreads> load_q(shared.sQ, gQ, params.query.row_stride, threadIdx.x,
                                                              params.query.head_dim);
    using PagedLoader = PagedTileLoader<kBlockN, kHeadDim, Config::kNumThreads>;
    const auto loader_of = [&](uint16_t* sTile, const HeadsView<const uint16_t>& view, const PageStrides& strides) {
        if constexpr (kPaged) {
            return PagedLoader(sTile, view, strides, kv_head, threadIdx.x);
        } else {
            const uint16_t* gTile = row_pointer(view, tile.batch, kv_head, keys.begin + key_tile * kBlockN);
            return TileLoader<kBlockN, kHeadDim, Config::kNumThreads>(sTile, gTile, view.row_stride, threadIdx.x,
                                                                      view.head_dim);
        }
    };
    auto load_k = loader_of(shared.sK, params.key, params.paged.key);
    auto load_v = loader_of(shared.sV, params.value, params.paged.value);
    const PageTable table(params.paged, tile.batch, params.key.batch, keys.length);
    typename PagedLoader::Rows own_rows;  // this thread's rows of the tile that is copied next
    const auto find_rows = [&](int32_t first_key) {
        if constexpr (kPaged) own_rows.find(table, first_key, threadIdx.x);
    };
    const auto load = [&](auto& loader, int32_t num_rows) {
        if constexpr (kPaged) {
            loader.load(own_rows);
        } else {
            loader.template load<true>(num_rows);
        }
    };
    // Moves a loader that has copied key_tile to tile `next`. The loader itself has moved on to the tile before
    // key_tile in memory, so only lists of tiles need a skip.
    const auto skip_to = [&](auto& loader, const HeadsView<const uint16_t>& view, int32_t next) {
        if constexpr (!kPaged) {
            if (has_ranges) loader.skip((next - (key_tile - 1)) * int64_t{kBlockN} * view.row_stride);
        }
    };

    const SwizzledBlocks<kHeadDim> sQ(shared.sQ + warp * kWarpM * Config::kHeadDim, ldmatrix_lane(lane));
    const SwizzledBlocks<kHeadDim> sK(shared.sK, ldmatrix_lane_b(lane));  // [kBlockN, kHeadDim]
    const SwizzledBlocks<kHeadDim> sV(shared.sV, ldmatrix_lane(lane));    // [kBlockN, kHeadDim]

    // Computes key_tile. Unless it is the last one, also starts to copy K of next_tile.
    const auto step = [&](int32_t next_tile, bool is_last) {
        const int32_t first_key = key_tile * kBlockN;
        float rS[kTilesM][kTilesN][4];  // [kWarpM, kBlockN]: scores, then probabilities

        ptx::cp_async_wait_group<0>();  // waits for K and, in the first step, Q
        // Waits until K has landed, and until every warp has read the previous V, so that V may be overwritten.
        bool some_absent = false;
        if constexpr (kPaged) {
            some_absent = __syncthreads_or(own_rows.has_hole(table, first_key, threadIdx.x));
        } else {
            __syncthreads();
        }
        const bool is_masked = !shared.full_tiles.has(tile_idx);
        load(load_v, keys.length - first_key);
        ptx::cp_async_commit_group();
        skip_to(load_v, params.value, next_tile);
        if (!is_last) find_rows(next_tile * kBlockN);
        gemm_qk<kDataType>(rS, sQ, sK);

        ptx::cp_async_wait_group<0>();  // waits for V
        // Waits until V has landed, and until every warp has read K, so that K may be overwritten.
        bool some_nonfinite = false;
        if (is_masked) {
            some_nonfinite = __syncthreads_or(has_nonfinite<kDataType>(load_v));
        } else {
            __syncthreads();
        }
        skip_to(load_k, params.key, next_tile);
        if (!is_last) load(load_k, kBlockN);
        ptx::cp_async_commit_group();

        // Made again in each step: the bias's address would otherwise take registers during the whole loop.
        const HeadScores scores(options, slope, ptx::opaque(tile.batch), tile.head, rows.length, keys.length);
        scores.to_scores(rS, warp_row, first_key, lane);
        const auto row_ranges = [&] { return RowRanges(options.ranges, tile.batch, tile.head, rows); };
        if (is_masked) scores.template mask</*kMayHaveRanges=*/!kPaged>(rS, warp_row, first_key, lane, row_ranges);
        if (some_absent) {
            const uint32_t present = present_columns<kTilesN>(table, first_key, lane);
            mask_scores(rS, lane, [&](int, int, int) { return present; });
        }
        const auto max = maxima_of_lane(rS);
        if (params.max_logits != nullptr) shared.largest_scores.update(max);
        if (softmax.is_outgrown_by(max)) rescale(rO, softmax.follow(max));
        softmax.exponentiate(rS);
        if (options.dropout_seed != nullptr) dropout.drop(rS, warp_row, first_key, lane);
        if (some_nonfinite) {
            const auto sees = [&](int m, int half, int n) {
                const int32_t row = warp_row + m * kMmaM + accumulator_row(lane) + 8 * half, key = first_key + n;
                return scores.sees(row, key) && (!has_ranges || row_ranges().sees(row, key));
            };
            separate_nonfinite<kDataType>(rO, shared.sV, load_v, sees, lane);
        }
        gemm_pv<kDataType>(rO, rS, sV);
    };

    if (tile_idx >= begin_idx) {
        find_rows(key_tile * kBlockN);
        load_q.template load<true>(rows.length - first_row);
        load(load_k, keys.length - key_tile * kBlockN);
        ptx::cp_async_commit_group();
    }
    for (; tile_idx >= begin_idx; --tile_idx) {
        const bool is_last = tile_idx == begin_idx;
        const int32_t next_tile = has_ranges && is_last ? key_tile : tile_at(tile_idx - 1, num_complete);
        step(next_tile, is_last);
        key_tile = next_tile;
    }

    // Epilogue. Finds the tile again, because its indices would take registers in the loops.
    const float factor = options.dropout_factor;
    const KeySplit& own = shared.split;
    const QueryTile out_tile = query_tile(params, kBlockM, own.tile_idx, own.is_split);
    const Sequence out_rows = query_rows(params, out_tile.batch);
    if (params.max_logits != nullptr) {
        shared.largest_scores.reduce_into(params.max_logits + out_tile.head, /*factor=*/1.0f);
    }
    if (own.num_splits > 1 || params.exact_out.data != nullptr) {
        const TileRowLocator location{out_tile, out_rows, out_tile.idx * kBlockM};
        const PartialRowsSm80<kBlockM, kHeadDim, kDataType> partial_rows{params, location, factor};
        store_or_combine_in_fp32<Config::kNumThreads, kWarpM>(partial_rows, own, rO, softmax, shared.sQ);
        return;
    }
    // A warp stages its rows of the output where its rows of Q were.
    uint16_t* sO = shared.sQ + warp * kWarpM * Config::kHeadDim;
    store_rounded_rows<Config, kDataType>(params, out_tile, out_rows, rO, softmax, sO, warp, lane, factor);
}

template <int kHeadDim, DataType kDataType, bool kPaged>
void launch_attention_forward_options_sm80(LaunchedKernel& kernel, const AttentionForwardParams& params,
                                           Stream stream) {
    using Config = ForwardOptionsConfigSm80<kHeadDim>;
    const AttentionForwardParams launched = launched_params_sm80(params, Config::kBlockM, Config::kBlockN);
    const Launch launch{num_ctas_sm80(launched, Config::kBlockM), Config::kNumThreads,
                        sizeof(ForwardOptionsStorageSm80<Config>)};
    kernel.launch(attention_forward_options_sm80<kHeadDim, kDataType, kPaged>, launch, launched, stream);
}

}  // namespace fastattn
