// The forward kernels for Hopper: config, shared memory, barriers and launch. See forward_sm90.cuh for how their warps
// work together.
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
    // Whether the kernel goes by lists of tiles: the one with options, whose tile is not the plain one's.
    static constexpr bool kTakesRanges = !std::is_same_v<Tile, ForwardTileSm90<kHeadDim, kValueDim>>;
    static constexpr int kBlockM = Tile::kNumConsumers * kWarpgroupM;
    static constexpr int kNumWarps = 4 * Tile::kNumConsumers + 4;
    static constexpr int kMinCtasPerSm = 1;
    static constexpr int kConsumerThreads = Tile::kNumConsumers * kWarpgroupSize;
    static constexpr int kNumThreads = kConsumerThreads + kWarpgroupSize;
    static constexpr int kTilesN = Tile::kBlockN / kMmaN;
    static constexpr int kTilesD = kValueDim / kMmaN;
    using QueryTile = TmaTile<kWarpgroupM, kHeadDim>;  // of one warpgroup
    using KeyTile = TmaTile<Tile::kBlockN, kHeadDim>;
    using ValueTile = TmaTile<Tile::kBlockN, kValueDim>;
    static_assert(Tile::kBlockN % kMmaK == 0, "P·V takes 16 keys at a time");
    static_assert(has_registers_for(Tile::kNumConsumers + 1,
                                    Tile::kProducerRegisters + Tile::kNumConsumers * Tile::kConsumerRegisters));
};

// How many of the producer's four warps gather rows where keys lie in small pages.
inline constexpr int kGatheringWarps = 3;
inline constexpr int kGatheringThreads = kGatheringWarps * kWarpSize;

// A work tile, as the producer tells it to the consumers. It is in shared memory, because they have no registers for
// it.
struct CtaWorkTile {
    RowsOfCta rows;
    KeyTiles key_tiles;  // of this CTA's split, or their indices in `list`
    TilePartials partials;
    int32_t cta;                              // as `partials` count them
    int32_t first_nonfinite, last_nonfinite;  // keys that make_finite() took NaN or infinity from

    const int32_t* list;  // of the tiles that ranges of keys leave; null: there are none

    // The tile of keys that comes next where num_left are left. Wrong offsets of packed sequences may have left any
    // number in the list, which then means the last tile.
    template <bool kTakesRanges>
    FASTATTN_DEVICE int32_t key_tile(const AttentionForwardParams& params, int32_t num_left) const {
        const int32_t tile_idx = key_tiles.tile(num_left);
        if constexpr (kTakesRanges) {
            const auto last_tile = static_cast<uint32_t>(params.seen_tiles.num_key_tiles - 1);
            if (list != nullptr) return min(static_cast<uint32_t>(list[2 + tile_idx]), last_tile);
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
    int32_t first_bits[Config::kStages];                    // of the tiles in the ring of keys: see ColumnBits
    int32_t some_pages_missing[4 * Config::kNumConsumers];  // see MissingPages
    LargestScores<4 * Config::kNumConsumers> largest_scores;
    RingBarriers<2> work;
    CtaSteps steps;  // the producer keeps these two here, as it has few registers
    WorkTileWalk walk;
    RingBarriers<2> claims;  // for a cluster of two: tells CTA 1 what CTA 0 has claimed
    uint32_t claimed[2];
    CtaWorkTile
        work_tiles[4];  // of the ring's two stages; from kSplitTiles on, the split tiles, which are combined at the end
    int next_tile[2];   // for each stage: an index of `work_tiles`, or kNoMoreTiles
    int num_split;      // split tiles of this CTA: at most that in which its steps begin, and that in which they end
};

// Named barriers; 0 is that of __syncthreads().
enum ForwardBarrierSm90 : int { kAllConsumers = 1, kOneConsumer };  // kOneConsumer + i: warpgroup i

// Called by all threads: on return, the barriers of every CTA of the cluster may be used, and CTA 0 may claim work
// tiles.
template <typename Config>
FASTATTN_DEVICE void start_cta(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params) {
    const int cluster_size = all_params.schedule.cluster_size();
    const AttentionForwardParams& params = all_params.attention;
    const bool claims = params.claimed != nullptr && ptx::cluster_ctarank() == 0;
    if (threadIdx.x == kWarpSize && claims) open_arrivals(params.claimed, params.launch_id);
    if (threadIdx.x == 0) {
        constexpr int kConsumerWarps = 4 * Config::kNumConsumers;
        const bool gathers = all_params.key_box_rows == 0;
        shared.work.init(kConsumerWarps + (gathers ? kGatheringWarps : 1));  // which all read the work tiles
        shared.query.init(kConsumerWarps);
        shared.key.init(kConsumerWarps * cluster_size);
        shared.value.init(kConsumerWarps * cluster_size + 1);  // and keep_values_finite()
        shared.gathered_key.init(kGatheringThreads);
        shared.gathered_value.init(kGatheringThreads);
        shared.finite_value.init(1);
        shared.claims.init(1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();                 // waits until the barriers are initialised
    wait_for_cluster(cluster_size);  // waits until those of the other CTA are
}

template <typename Config, DataType kDataType>
void launch_forward_sm90(LaunchedKernel& kernel, void (*function)(AttentionForwardParamsSm90),
                         const AttentionForwardParams& params, bool packs_heads, Stream stream) {
    const DeviceFacts facts = device_facts();
    const bool is_packed = params.packed.cu_seqlens_q != nullptr, is_paged = params.paged.block_table != nullptr;
    // Heads that are the same memory have no stride that a map of several in a box could hold.
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
