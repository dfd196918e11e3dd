// The config, shared memory, barriers and launch of the forward kernels for Hopper. forward_sm90.cuh says how their
// warps work together.
#pragma once

#include <cstdint>

#include "attention/forward_work_sm90.h"
#include "attention/key_tiles.cuh"
#include "attention/tiles_sm90.h"
#include "device/cluster.cuh"
#include "device/largest_score.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/registers.h"
#include "device/ring.cuh"
#include "device/tma_tile.cuh"
#include "device/warpgroup_gemm.cuh"
#include "host/device_facts.h"
#include "host/launch.h"
#include "host/min_max.h"
#include "host/tensor_map.h"
#include "scheduler/arrivals.cuh"
#include "scheduler/key_splits.h"
#include "scheduler/launch_id.h"
#include "scheduler/partial_tree.h"

namespace fastattn {

template <int kHeadDim_, int kValueDim_, typename Tile_ = ForwardTileSm90<kHeadDim_, kValueDim_>>
struct ForwardConfigSm90 : Tile_ {
    using Tile = Tile_;
    static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
    // Only the kernel with options takes ranges of keys, and so visits lists of key tiles. Its Tile differs from the
    // plain kernel's.
    static constexpr bool kTakesRanges = !std::is_same_v<Tile, ForwardTileSm90<kHeadDim, kValueDim>>;
    static constexpr int kBlockM = Tile::kNumConsumers * kWarpgroupM;
    static constexpr int kNumWarps = 4 * Tile::kNumConsumers + 4;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr int kConsumerThreads = Tile::kNumConsumers * kWarpgroupSize;
    static constexpr int kNumThreads = kConsumerThreads + kWarpgroupSize;
    static constexpr int kTilesN = Tile::kBlockN / kMmaN;
    static constexpr int kTilesD = kValueDim / kMmaN;
    using QueryTile = TmaTile<kWarpgroupM, kHeadDim>;  // rows of one warpgroup
    using KeyTile = TmaTile<Tile::kBlockN, kHeadDim>;
    using ValueTile = TmaTile<Tile::kBlockN, kValueDim>;
    static_assert(Tile::kBlockN % kMmaK == 0, "P·V takes 16 keys at a time");
    static_assert(has_registers_for(Tile::kNumConsumers + 1,
                                    Tile::kProducerRegisters + Tile::kNumConsumers * Tile::kConsumerRegisters));
};

// How many warps of the producer gather the rows of K and V if keys are in small pages (see paged_tiles_sm90.cuh).
inline constexpr int kGatheringWarps = 3;
inline constexpr int kGatheringThreads = kGatheringWarps * kWarpSize;

// One CTA's part of a work tile. The producer writes it to shared memory. The other warps read its fields there each
// time, because they have no registers to hold them.
struct CtaWorkTile {
    RowsOfCta rows;
    KeyTiles key_tiles;  // of this CTA's split; with ranges of keys, indices in `list`
    TilePartials partials;
    int32_t cta;                              // this CTA's number, as `partials` counts CTAs
    int32_t first_nonfinite, last_nonfinite;  // the first and last key whose V make_finite() changed

    KeyTileList list;  // used only with ranges of keys

    // Returns the key tile to visit when num_left of this split's key tiles are left.
    template <bool kTakesRanges>
    FASTATTN_DEVICE int32_t key_tile(const AttentionForwardParams& params, int32_t num_left) const {
        const int32_t tile_idx = key_tiles.tile(num_left);
        if constexpr (kTakesRanges) {
            if (list.entries != nullptr) return list.checked_tile(tile_idx, params.seen_tiles.num_key_tiles - 1);
        }
        return tile_idx;
    }

    FASTATTN_DEVICE bool is_first_split() const { return partials.first == cta; }
};

inline constexpr int kSplitTiles = 2, kNoMoreTiles = -1;

template <typename Config>
struct alignas(1024) ForwardStorageSm90 {
    uint16_t sQ[Config::kNumConsumers][Config::QueryTile::kElements];
    uint16_t sK[Config::kStages][Config::KeyTile::kElements];
    uint16_t sV[Config::kStages][Config::ValueTile::kElements];
    RingBarriers<1> query;
    RingBarriers<Config::kStages> key, value;
    StageBarriers<Config::kStages> gathered_key, gathered_value, finite_value;
    int32_t first_bits[Config::kStages];                    // first bit (ColumnBits) of each stage's key tile
    int32_t some_pages_missing[4 * Config::kNumConsumers];  // a flag of each consumer warp: see MissingPages
    LargestScores<4 * Config::kNumConsumers> largest_scores;
    RingBarriers<2> work;
    ClusterSteps steps;  // the producer's own, as it has too few registers for `steps` and `walk`
    WorkTileWalk walk;
    RingBarriers<2> claims;  // in a cluster of two, CTA 0 sends CTA 1 the work tile that CTA 0 claimed
    uint32_t claimed[2];
    // Entries 0 and 1 hold the work tiles that are not split, one for each stage of `work`. The entries from
    // kSplitTiles on hold the split work tiles, which are needed until their partials are combined at the end.
    CtaWorkTile work_tiles[4];
    int next_tile[2];     // for each stage of `work`: an index into work_tiles, or kNoMoreTiles
    int num_split_tiles;  // of this CTA: at most the one where its steps begin and the one where they end
};

// IDs of named barriers; __syncthreads() uses ID 0.
enum ForwardBarrierSm90 : int { kAllConsumers = 1, kOneConsumer };  // kOneConsumer + i: warpgroup i

// Initialises the barriers and, in CTA 0 of a cluster, opens the counter of claimed work tiles. On return, the barriers
// of every CTA of the cluster may be used. Called by all threads.
template <typename Config>
FASTATTN_DEVICE void start_cta(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params) {
    const int cluster_size = all_params.schedule.cluster_size();
    const AttentionForwardParams& params = all_params.attention;
    const bool claims = params.claimed != nullptr && ptx::cluster_ctarank() == 0;
    if (threadIdx.x == kWarpSize && claims) open_arrivals(params.claimed, params.launch_id);
    start_barriers(cluster_size, [&] {
        constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
        const bool gathers = all_params.key_box_rows == 0;
        shared.work.init(kConsumerWarps + (gathers ? kGatheringWarps : 1));  // warps that read work tiles
        shared.query.init(kConsumerWarps);
        shared.key.init(kConsumerWarps * cluster_size);
        shared.value.init(kConsumerWarps * cluster_size + 1);  // + 1: the warp of keep_values_finite()
        shared.gathered_key.init(kGatheringThreads);
        shared.gathered_value.init(kGatheringThreads);
        shared.finite_value.init(1);
        shared.claims.init(1);
    });
}

template <typename Config, DataType kDataType>
void launch_forward_sm90(LaunchedKernel& kernel, void (*function)(AttentionForwardParamsSm90),
                         const AttentionForwardParams& params, bool packs_heads, Stream stream) {
    const DeviceFacts facts = device_facts();
    const bool is_packed = params.packed.cu_seqlens_q != nullptr, is_paged = params.paged.block_table != nullptr;
    // Heads with a stride of 0 share memory, so that a tensor map cannot place them next to each other in a box.
    const bool may_pack = packs_heads && params.max_logits == nullptr && params.query.head_stride != 0;
    const auto box_rows = [&](int rows) { return key_box_rows(params.paged, params.key.batch, rows); };
    const bool has_boxes = box_rows(Config::kBlockN) > 0;
    const ForwardScheduleSm90 schedule =
        forward_schedule_sm90(kernel, params, Config::kBlockM, Config::kBlockN,
                              has_boxes ? Config::kTilesToPairUnderMask : 0, may_pack, facts.num_sms);
    const int packed_heads = 1 << schedule.log2_packed,
              rows_of_box = box_rows(Config::kBlockN / schedule.cluster_size());
    const auto map_of_keys = [&](const HeadsView<const uint16_t>& view, int32_t box_columns) {
        const int32_t rows = is_paged ? params.paged.page_size : is_packed ? params.packed.total_k : view.rows;
        return tensor_map(view, has_boxes && view.rows > 0 ? rows : 0, 1, rows_of_box, box_columns, kDataType);
    };
    AttentionForwardParamsSm90 all_params{
        params,
        schedule,
        tensor_map(params.query, is_packed ? params.packed.total_q : params.query.rows, packed_heads,
                   kWarpgroupM / packed_heads, Config::QueryTile::kBlockColumns, kDataType),
        map_of_keys(params.key, Config::KeyTile::kBlockColumns),
        map_of_keys(params.value, Config::ValueTile::kBlockColumns),
        rows_of_box};
    const int64_t most_clusters = std::max(facts.num_sms / schedule.cluster_size(), 1);
    const int64_t num_clusters =
        schedule.may_split ? most_clusters : std::min<int64_t>(schedule.num_tiles, most_clusters);
    const bool may_claim = schedule.num_tiles > num_clusters && schedule.num_tiles <= kLaunchCountMask;
    if (!may_claim) all_params.attention.claimed = nullptr;
    const Launch launch{num_clusters * schedule.cluster_size(), Config::kNumThreads, sizeof(ForwardStorageSm90<Config>),
                        schedule.cluster_size()};
    kernel.launch(function, launch, all_params, stream);
}

}  // namespace fastattn
