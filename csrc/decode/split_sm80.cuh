// Flash-decoding (Dao et al. 2023): attention of a few queries over a long KV cache, and the append of new tokens.
//
//   S = mask(ALiBi(softcap(scale * rotate(Q) Kᵀ)))     P = exp(S - lse)     O = P V
//
// A CTA takes splits of the keys of all sequences (scheduler/decode_splits.h), one work tile after another. The rows of
// a tile are all query heads of a KV head times the queries, so that each key is loaded once for all of them. Warps
// take alternate blocks of a few keys. Each warp has its own softmax, accumulator and pipeline. No warp waits for
// another before the end of the tile, where the warps' results are combined. If several CTAs have splits of a tile,
// each CTA stores a partial, and the partials are combined (scheduler/combine.cuh).
//
//   ring             K0 V0 K1 V1 …   kStages of each; a stage is loaded again as soon as its product has read it
//   step             wait K → Q·Kᵀ → load K → softmax → wait V → P·V → load V
//
// The memory accesses of which each waits for the one before: load lengths → block table → K of the first step … store
// the partial → count the arrival → load partials → store the result.
//
// A tile of more than 16 rows has a group of warps for each ring, one warp for each 16 rows. One warp of the group
// fills the ring, and all warps of the group read it. The warps of a group synchronise wherever a single warp would
// synchronise its lanes.
//
// New tokens are never read from the cache: a CTA that needs a new token reads it from k_new and v_new. The CTA that
// has the last tile of rows stores the token in the cache. So one launch appends and attends. Every CTA applies RoPE to
// its own queries. An 8-bit cache has a scale for each token and head: the scales of keys multiply scores, and the
// scales of values multiply P. Preconditions: those of HeadsView; head dims are multiples of 8 and at most kHeadDim;
// the capacity is below 2^30.
#pragma once

#include "decode/cache_tokens.cuh"
#include "decode/decode.h"
#include "decode/eight_bit_gemm.cuh"
#include "decode/packed_rows.cuh"
#include "decode/query_tile.cuh"
#include "decode/ring_loader.cuh"
#include "decode/row_warps.cuh"
#include "decode/tile_rows.cuh"
#include "decode/tiles_sm80.h"
#include "decode/value_rows.cuh"
#include "device/finish_row.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/shared_memory.h"
#include "device/warp_gemm.cuh"
#include "host/launch.h"
#include "host/min_max.h"
#include "scheduler/combine.cuh"
#include "scheduler/decode_splits.cuh"

namespace fastattn {

template <int kBlockM, int kHeadDim_, CacheFormat kFormat_>
struct DecodeConfigSm80 : DecodeTileSm80<kBlockM, kHeadDim_, is_8bit(kFormat_)> {
    using Tile = DecodeTileSm80<kBlockM, kHeadDim_, is_8bit(kFormat_)>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr CacheFormat kFormat = kFormat_;
    static constexpr bool k8Bit = is_8bit(kFormat);  // elements of the cache have 8 bits
    static constexpr int kElementBytes = k8Bit ? 1 : 2;
    static constexpr int kCacheDim = kHeadDim * kElementBytes / 2;  // a row of the cache, in elements of 16 bits
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kTilesN = Tile::kWarpN / kMmaN;
    static constexpr int kTilesD = kHeadDim / kMmaN;
    static constexpr int kStageBytes = Tile::kWarpN * Swizzle<kCacheDim>::kRowBytes;
    static constexpr int kStages = std::min(4, Tile::kRingBytes / (2 * kStageBytes));
    static_assert(kBlockM == kMmaM * Tile::kRowWarps, "a warp's tile is one MMA of rows");
    static_assert(kStages >= 1 && Tile::kWarpN <= kWarpSize, "one bit of a mask, and one lane, for each key");
    static_assert(kBlockM * kHeadDim * 4 <= Tile::kRingBytes, "the output of a group overlays its ring");
};

// The CTA's tile, kept in shared memory because registers are scarce. `partials` is written in step 0, and may be read
// after the barrier behind the queries.
struct CurrentTile {
    TileSplits splits;
    int64_t first_split;  // of the sequence, numbered across all sequences
    int32_t batch, num_tokens;
    int32_t tile_idx, kv_head, first_row;
    int32_t splits_in_run;
    TilePartials partials;
};

template <typename Config>
struct alignas(128) DecodeStorageSm80 {
    union {
        struct {
            uint16_t sQ[Config::kBlockM * Swizzle<Config::kHeadDim>::kRowElements];  // swizzled
            KeyRing<Config> rings[Config::kKeyGroups];  // a group's output overlays K and V at the end
        };
        CombineStorage<log2_combined_nodes(Config::kHeadDim), Config::kBlockM, Config::kNumThreads> combine;
    };
    float row_max[Config::kKeyGroups][Config::kBlockM], row_sum[Config::kKeyGroups][Config::kBlockM];
    float query_powers[Config::kFormat == CacheFormat::kFp8 ? Config::kBlockM : 1];  // query_tile.cuh
    SplitLine line;
    CurrentTile tile;
    TileMask<Config::kBlockM> mask;
};

// Returns how many bytes of shared memory a GPU must allow for a CTA, or 0 if every GPU allows enough.
template <typename Config>
constexpr size_t bytes_needed() {
    constexpr size_t kBytes = sizeof(DecodeStorageSm80<Config>);
    return ctas_with_room(kBytes, kSharedBytesSm86) >= 1 ? 0 : kBytes;
}

template <typename Config>
struct DecodeThreads : AllThreadsOfCta {
    static constexpr int kCount = Config::kNumThreads;
};

// The layout of a group's output: [kBlockM, kHeadDim] fp32, swizzled in stretches of kStretch columns. A stretch is the
// columns of one MMA tile or, with an 8-bit cache, of two MMA tiles. Lanes write 8 columns of 4 rows at a time (16
// columns of 2 rows with an 8-bit cache) and read along a row. Both kinds of access cover all banks.
template <typename Config>
struct OutputLayout {
    static constexpr int kStretch = Config::k8Bit ? 2 * kMmaN : kMmaN, kPeriod = Config::k8Bit ? 2 : 4;

    FASTATTN_DEVICE static int index(int row, int column) {
        return row * Config::kHeadDim + (column ^ (row % kPeriod * kStretch));
    }
};

template <typename Config>
FASTATTN_DEVICE void store_output_row(float* sO, const float (&rO)[Config::kTilesD][4], float factor, int row, int half,
                                      int lane) {
    using Layout = OutputLayout<Config>;
    constexpr int kTiles = Layout::kStretch / kMmaN;  // MMA tiles in a stretch; two hold the even and the odd dims
    float* sOwn[Layout::kPeriod];                     // addresses in the first kPeriod stretches
#pragma unroll
    for (int i = 0; i < Layout::kPeriod; ++i) {
        sOwn[i] = sO + Layout::index(row, i * Layout::kStretch + kTiles * accumulator_column(lane));
    }
#pragma unroll
    for (int d = 0; d < Config::kTilesD; d += kTiles) {
        const int stretch = d / kTiles;
        float* sStretch =
            sOwn[stretch % Layout::kPeriod] + stretch / Layout::kPeriod * Layout::kPeriod * Layout::kStretch;
        const float first = rO[d][2 * half] * factor, second = rO[d][2 * half + 1] * factor;
        if constexpr (kTiles == 1) {
            *reinterpret_cast<float2*>(sStretch) = {first, second};
        } else {
            const float between = rO[d + 1][2 * half] * factor, last = rO[d + 1][2 * half + 1] * factor;
            *reinterpret_cast<float4*>(sStretch) = {first, between, second, last};
        }
    }
}

// Combines the groups' results into a partial. Then combines the partial with the nodes to its left, of this CTA, that
// wait only for it (scheduler/partial_tree.h). If the combined node is the whole tile, stores the result. Otherwise
// stores the node, the largest that the CTA can make so far, in a workspace slot.
template <typename Config, typename Rows>
FASTATTN_DEVICE void store_combined_groups(const Rows& rows, const DecodeStorageSm80<Config>& shared,
                                           const TilePartials& partials, PartialRange own, int32_t partial) {
    constexpr int kQuads = Config::kHeadDim / 4;
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const int32_t slots_per_cta = rows.slots_per_cta();
    const PartialNode node = largest_node(partial, {own.begin, partial + 1}, partials.count);
    const bool is_result = node.holds_all(partials.count);
    for (int index = threadIdx.x; index < rows.num_rows() * kQuads; index += Config::kNumThreads) {
        const int row = index / kQuads, column = index % kQuads * 4;
        RowPartial result = {-kInfinity, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
        for (int group = 0; group < Config::kKeyGroups; ++group) {
            result.max = fmaxf(result.max, shared.row_max[group][row]);
        }
#pragma unroll
        for (int group = 0; group < Config::kKeyGroups; ++group) {
            const float weight = weight_of(shared.row_max[group][row], result.max);
            const auto* sO = reinterpret_cast<const float*>(shared.rings[group].data);
            result.sum += weight * shared.row_sum[group][row];
            add_weighted(result.values, weight,
                         *reinterpret_cast<const float4*>(sO + OutputLayout<Config>::index(row, column)));
        }
#pragma unroll 1
        for (int level = 0; level < node.level; ++level) {
            const int32_t node_idx = partial >> level;
            if (node_idx % 2 == 0) continue;  // a left child without a right sibling: nothing to combine
            const int64_t slot = slot_of(slots_per_cta, cta, {level, node_idx - 1});
            result = combined(rows.slots().load(slot, row, column), result);
        }
        if (is_result) {
            rows.store_result(row, column, result);
        } else {
            rows.slots().store(slot_of(slots_per_cta, cta, node), row, column, result);
        }
    }
}

template <int kHeadDim, DataType kDataType, CacheFormat kFormat, int kBlockM>
__global__ void __launch_bounds__(DecodeConfigSm80<kBlockM, kHeadDim, kFormat>::kNumThreads,
                                  DecodeConfigSm80<kBlockM, kHeadDim, kFormat>::kMinCtasPerSm)
    decode_split_sm80(const __grid_constant__ DecodeParams params) {
    using Config = DecodeConfigSm80<kBlockM, kHeadDim, kFormat>;
    constexpr int kCacheDim = Config::kCacheDim, kWarpN = Config::kWarpN, kBlockN = Config::kBlockN;
    constexpr int kStages = Config::kStages;
    constexpr bool k8Bit = Config::k8Bit;
    using Decoding = CacheDecoding<kFormat, kDataType>;
    extern __shared__ __align__(128) char shared_bytes[];
    auto& shared = *reinterpret_cast<DecodeStorageSm80<Config>*>(shared_bytes);
    const CurrentTile& current = shared.tile;
    static_assert(ctas_with_room(sizeof(shared), kSharedBytesSm80) >= Config::kMinCtasPerSm);

    ptx::griddepcontrol_wait();  // waits until the previous kernel has written queries, tokens and lengths
    ptx::griddepcontrol_launch_dependents();
    const int lane = threadIdx.x % kWarpSize;
    const RowWarps<Config::kRowWarps> warps;
    SplitScheduler<kBlockN> work(params, shared.line, lane);
    const SwizzledBlocks<kHeadDim> sQ(shared.sQ + warps.index() * kMmaM * Swizzle<kHeadDim>::kRowElements,
                                      ldmatrix_lane(lane));

    while (work.next_split() < work.end_split()) {
        // Prologue: finds the tile, and which of its keys this CTA takes.
        const int64_t split = work.next_split();
        const ScheduledSequence sequence = work.sequence_with(split);
        const CachedSequence& tokens = sequence.tokens;
        const SplitRun run =
            split_run(params.schedule, sequence.splits, tokens, kBlockN, sequence.first_split, split, work.end_split());
        const int32_t batch = sequence.batch, kv_head = params.by_row_tiles.quotient(run.tile_idx);
        const int32_t row_tile = run.tile_idx - kv_head * params.row_tiles, first_row = row_tile * kBlockM;
        const PackedRows<kBlockM> rows(params, tokens, batch, kv_head, first_row, warps.index() * kMmaM, shared.mask,
                                       lane);
        const bool stores_new = row_tile == params.row_tiles - 1 && tokens.before < tokens.total;
        const KeyRange wanted = {stores_new ? min(rows.some.begin, tokens.before) : rows.some.begin,
                                 stores_new ? tokens.total : rows.some.end};
        const int32_t begin_key = max(run.begin_key, wanted.begin), end_key = min(run.end_key, wanted.end);

        if (threadIdx.x == 0) {
            shared.tile = {sequence.splits, sequence.first_split, batch, tokens.total, run.tile_idx, kv_head, first_row,
                           run.count};
        }

        // Producer: one warp of each group.
        KeyRing<Config>& ring = shared.rings[warps.group()];
        int32_t next_key = begin_key / kBlockN * kBlockN + warps.group() * kWarpN;
        RingLoader<Config, kDataType> loader(params, ring, lane);
        if (warps.is_first()) {
            loader.begin({batch, kv_head, begin_key, end_key, tokens.before, stores_new}, next_key);
        }

        OnlineSoftmax<1, /*kInNats=*/true> softmax(kLog2E);
        float rO[1][Config::kTilesD][4] = {};  // [16, kHeadDim], of this warp's rows and keys
        OutputScale output_scale;              // with an 8-bit cache, the output is rO times this scale
        // Each step starts to load the step kStages later. The first kStages steps only load. Loads before the loop
        // would be a second copy of the code that loads, and each launch fetches code from memory.
#pragma unroll 1
        for (int step = -kStages, stage = 0;; ++step, next_key += kBlockN) {
            const int32_t first_key = next_key - kStages * kBlockN;
            if (step == 0) {
                // Waits until shared.tile is complete and every thread has read the scheduler's current split.
                __syncthreads();
                if (threadIdx.x == 0) {
                    work.advance(current.splits_in_run);
                    // Computed here, where the loads that are in flight hide the divisions.
                    shared.tile.partials = tile_partials(params.schedule, current.splits, current.first_split,
                                                         current.tile_idx, work.splits_per_cta());
                }
                stage_queries<kBlockM, kHeadDim, kDataType, Decoding, k8Bit, Config::kNumThreads>(
                    shared.sQ, shared.query_powers, params, current.num_tokens, current.batch, current.kv_head,
                    current.first_row);
                __syncthreads();  // waits until the queries are in shared memory
            }
            if (step >= 0 && first_key >= ring.head.end_key) break;
            const bool computes = step >= 0;
            float rS[1][Config::kTilesN][4];  // [16, kWarpN]: scores, then probabilities
            uint32_t present_now;
            if (computes) {
                ptx::cp_async_wait_group<2 * kStages - 1>();
                warps.sync();  // waits until all of K is there; its V and later steps stay in flight
                present_now = ring.present[stage];
                const SwizzledBlocks<kCacheDim> sK(reinterpret_cast<uint16_t*>(ring.keys(stage)),
                                                   ldmatrix_lane_b(lane));
                if constexpr (k8Bit) {
                    gemm_qk_8bit<Decoding>(rS, sQ, sK);
                    multiply_columns(rS, ring.key_scales(stage), Decoding::kFactor, lane);
                } else {
                    gemm_qk<kDataType>(rS, sQ, sK);
                }
                warps.sync();  // waits until every lane has read K: it may be overwritten
            }
            if (warps.is_first()) loader.load_keys(stage, next_key);

            if (computes) {
                float query_power[2] = {1.0f, 1.0f};
                if constexpr (Decoding::kDataType != kDataType) {
                    for_own_rows<1>(lane, [&](int, int half, int row) {
                        query_power[half] = shared.query_powers[warps.index() * kMmaM + row];
                    });
                }
                rows.to_masked_scores(rS, query_power, present_now, first_key, lane);
                const auto max = maxima_of_lane(rS);
                if (softmax.is_outgrown_by(max)) rescale(rO, softmax.follow(max));
                softmax.exponentiate(rS);

                ptx::cp_async_wait_group<2 * kStages - 1>();
                warps.sync();  // waits until all of V is there; later steps stay in flight
                const SwizzledBlocks<kCacheDim> sV(reinterpret_cast<uint16_t*>(ring.values(stage)),
                                                   ldmatrix_lane(lane));
                if constexpr (k8Bit) {
                    if (kFormat == CacheFormat::kFp8 && !rows.template see_all<kWarpN>(present_now, first_key)) {
                        silence_unseen_fp8<kWarpN>(rO, ring.values(stage), rows, warps, present_now, first_key, lane);
                    }
                    output_scale.follow<kWarpN>(rO, ring.value_scales(stage), lane);
                    output_scale.weigh(rS, ring.value_scales(stage), rows, present_now, first_key, lane);
                    gemm_pv_8bit<Decoding, kHeadDim>(rO, rS, sV);
                } else {
                    if (rows.differ(first_key, min(first_key + kWarpN, current.num_tokens))) {
                        silence_unseen<kDataType>(rO, ring.values(stage), rows, warps, present_now, first_key, lane);
                    }
                    gemm_pv<kDataType>(rO, rS, sV);
                }
                warps.sync();  // waits until every lane has read V: it may be overwritten
            }
            if (warps.is_first()) loader.load_values(stage, next_key);
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }

        // Epilogue: combines the groups' results.
        auto* sO = reinterpret_cast<float*>(ring.data);
        const float output_factor = k8Bit ? output_scale.value() * Decoding::kFactor : 1.0f;
        for_own_rows<1>(lane, [&](int m, int half, int row_of_warp) {
            const int row = warps.index() * kMmaM + row_of_warp;
            shared.row_max[warps.group()][row] = softmax.reference[m][half];  // the same in all lanes of a row
            shared.row_sum[warps.group()][row] = row_reduce_sum(softmax.row_sum[m][half]);
            store_output_row<Config>(sO, rO[m], output_factor, row, half, lane);
        });
        __syncthreads();  // waits until the results of every warp are in shared memory
        using Rows = TileRows<kBlockM, kHeadDim, kDataType>;
        const Rows tile_rows{params, current.batch, current.kv_head, current.first_row};
        const TilePartials partials = current.partials;
        const PartialRange own = partials.made_by(static_cast<int32_t>(blockIdx.x));
        const int32_t partial = params.schedule.splits_are_partials
                                    ? static_cast<int32_t>(work.next_split() - 1 - partials.first)
                                    : own.begin;
        store_combined_groups<Config>(tile_rows, shared, partials, own, partial);
        __syncthreads();  // waits until every thread has read the results: rings and queries may be overwritten
        const bool splits_tile = own.end - own.begin < partials.count;
        if (splits_tile && partial + 1 == own.end && params.partials.arrivals != nullptr) {
            Combiner<Rows, DecodeThreads<Config>>{tile_rows, shared.combine, partials, own}.run();
            __syncthreads();  // waits until every thread is done with combining, which uses the rings
        }
    }
}

template <int kHeadDim, DataType kDataType, CacheFormat kFormat, int kBlockM>
void launch_decode_split_sm80(LaunchedKernel& kernel, const DecodeParams& params, Stream stream) {
    using Config = DecodeConfigSm80<kBlockM, kHeadDim, kFormat>;
    const Launch launch{params.schedule.num_ctas, Config::kNumThreads, sizeof(DecodeStorageSm80<Config>),
                        /*cluster_size=*/1, /*is_dependent=*/true};
    kernel.launch(decode_split_sm80<kHeadDim, kDataType, kFormat, kBlockM>, launch, params, stream);
}

}  // namespace fastattn
