// Splits the keys of work tiles in attention's forward pass if whole tiles would leave CTAs idle: with few
// row tiles over a long cache, or with packed sequences of different lengths. Up to 16 queries over a cache usually run
// in the decoding kernels, whose splits are in decode_splits.h.
//
// A work tile is a tile of query rows. The steps of a work tile are the tiles of keys that its rows see. Workers take
// the steps: on Hopper a worker is a persistent cluster of one or two CTAs, on sm_80 it is a CTA. The steps of all work
// tiles form a line, ordered by sequence, then rows, then head. On Hopper, cluster c takes steps
// [c * per_cluster, (c + 1) * per_cluster): the end of one work tile, whole ones, and the beginning of another. So the
// work of clusters differs by at most a step. On sm_80 a CTA has a single work tile, and takes all of it or one of its
// equal splits. Each split leaves a partial, and scheduler/combine.cuh combines the partials of a work tile.
//
// Each worker computes its split from the lengths in device memory, so that each replay of a CUDA graph uses the
// lengths of that time.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/min_max.h"
#include "host/params.h"
#include "scheduler/partial_tree.h"
#ifdef __CUDACC__
#include "attention/key_tiles.cuh"
#include "device/fragment.cuh"
#include "device/reduce.cuh"
#endif

namespace fastattn {

// The cost of combining the partials of a work tile, in steps: a worker writes and reads fp32 rows through L2. A split
// has at least kCombineCost steps, and splitting must save more than kCombineCost steps.
inline constexpr int32_t kCombineCost = 4;
// Nothing is split if there are more whole work tiles than this for each worker: the work is balanced already, and
// whole tiles keep keys in the L2 cache.
inline constexpr uint32_t kTilesPerSplitWorker = 2;
// The most row tiles, counted in one head of all sequences, that a warp counts: 32 in each lane.
inline constexpr uint32_t kMostRowTiles = 1024;
// Workspace slots for each CTA that runs at a time. A persistent CTA needs 2, because it leaves at most two partials,
// one of each split work tile (see partial_tree.h). A CTA that exits after its split needs 1, but up to three times as
// many CTAs are launched as run at a time.
inline constexpr int32_t kMostSlotsPerCta = 1 + kTilesPerSplitWorker;

// Returns the most steps that a work tile of block_m rows has, as far as the host knows.
inline int64_t most_steps(const AttentionForwardParams& params, int32_t block_m, int32_t block_n) {
    const int64_t all_steps = ceil_div(params.key.rows, block_n);
    const int64_t seen = int64_t{params.scores.window_left} + params.scores.window_right;
    return std::min(all_steps, (seen + block_m) / block_n + 2);
}

// Returns whether workers may find that splitting pays. For packed sequences, the host does not know the lengths, but
// knows that there are at least as many work tiles as the total number of rows fills. num_row_tiles: the number of work
// tiles of one head.
inline bool splitting_may_pay(const AttentionForwardParams& params, int32_t block_m, int32_t block_n,
                              int64_t num_work_tiles, int64_t num_row_tiles, int64_t num_workers) {
    if (most_steps(params, block_m, block_n) <= kCombineCost) return false;
    const int64_t most_work_tiles = kTilesPerSplitWorker * num_workers;
    if (params.packed.cu_seqlens_q == nullptr) return num_work_tiles <= most_work_tiles;
    const int64_t group = params.query.heads / params.key.heads;
    const int64_t filled = params.packed.total_q * group / block_m * params.key.heads;
    return num_row_tiles <= kMostRowTiles && filled <= most_work_tiles;
}

// Returns how many rows of workspace a launch of num_ctas CTAs may need; each row has value_dim values and two sums.
// Returns 0 if nothing can be split. Assumes the fewest work tiles that any kernel has, because splitting then pays
// most easily: kernels that pack heads make the fewest tiles, and the two CTAs of a cluster share one work tile.
inline int64_t workspace_rows(const AttentionForwardParams& params, int32_t block_m, int32_t block_n,
                              int64_t num_ctas) {
    const int64_t group = params.query.heads / params.key.heads;
    const int64_t packed_tiles = ceil_div(params.query.rows * group, block_m);
    const int64_t entries = std::min<int64_t>(packed_tiles, ceil_div(params.query.rows, block_m)) * params.query.batch;
    if (!splitting_may_pay(params, block_m, block_n, packed_tiles * params.query.batch * params.key.heads, entries / 2,
                           num_ctas)) {
        return 0;
    }
    const int64_t tiles = int64_t{ceil_div(params.query.rows, block_m)} * params.query.heads * params.query.batch;
    const int64_t splits = ceil_div(tiles * most_steps(params, block_m, block_n), kCombineCost);
    // If tiles fill the GPU, CTAs may come in pairs, which are numbered differently, so every CTA gets slots.
    const int64_t ctas_with_partials = tiles >= num_ctas ? num_ctas : std::min(num_ctas, splits);
    return ctas_with_partials * kMostSlotsPerCta * block_m;
}

// The steps that a persistent cluster takes, in shared memory for all warps of a CTA.
struct ClusterSteps {
    bool is_split;        // false: work tiles are taken whole
    uint32_t tile_idx;    // the work tile in which the cluster's steps begin
    int32_t step;         // where they begin in that work tile
    int32_t count;        // steps of this cluster
    int32_t per_cluster;  // steps of every cluster
};

// The one split that a CTA takes: all of a work tile, or the idx-th of its num_splits equal splits.
struct KeySplit {
    int32_t is_split, exists;  // not bool: the struct is copied as a whole, and must have no padding
    uint32_t tile_idx;
    int32_t idx, num_splits;
};

#ifdef __CUDACC__
// Sums count_of(row_tile) over all row tiles with one warp, in which each lane sums adjacent row tiles. A row tile is
// a tile of rows of one sequence, in all heads. Its work tiles, one for each head, have the same number of steps.
struct RowTileScan {
    uint32_t first;     // row tile of this lane
    int64_t own, upto;  // the sum of this lane's row tiles, and of all up to its last
    int64_t all;        // the sum of all lanes

    template <typename CountOf>
    FASTATTN_DEVICE RowTileScan(uint32_t num_row_tiles, int lane, CountOf&& count_of) : own(0) {
        const uint32_t per_lane = (num_row_tiles + kWarpSize - 1) / kWarpSize;
        first = min(lane * per_lane, num_row_tiles);
        const uint32_t end = min(first + per_lane, num_row_tiles);
        for (uint32_t row_tile = first; row_tile < end; ++row_tile) own += count_of(row_tile);
        upto = warp_inclusive_sum(own, lane);
        all = __shfl_sync(0xffffffff, upto, kWarpSize - 1);
    }

    // If count_of() counts items: the row tile of item `index`, 0 <= index < all, and how many of its items come
    // before it.
    struct Position {
        uint32_t row_tile;
        int64_t before;
    };

    template <typename CountOf>
    FASTATTN_DEVICE Position find(int64_t index, CountOf&& count_of) const {
        Position position{first, index - (upto - own)};
        const bool is_owner = position.before >= 0 && index < upto;
        if (is_owner) {
            for (int64_t count; position.before >= (count = count_of(position.row_tile)); ++position.row_tile)
                position.before -= count;
        }
        const int owner = __ffs(__ballot_sync(0xffffffff, is_owner)) - 1;
        return {__shfl_sync(0xffffffff, position.row_tile, owner), __shfl_sync(0xffffffff, position.before, owner)};
    }
};

// Counts the steps of all work tiles in one pass over the row tiles. steps_of(row_tile): the steps of each of its
// work tiles, 0 where there are no rows. A work tile whose rows see no key has one step: some worker has to write
// its zeros.
struct StepScan {
    uint32_t num_work_tiles = 0;
    int32_t longest = 0;  // the most steps of a work tile
    RowTileScan row_tiles;

    // Called by one warp.
    template <typename StepsOf>
    FASTATTN_DEVICE StepScan(uint32_t num_row_tiles, uint32_t heads, int lane, StepsOf&& steps_of)
        : row_tiles(num_row_tiles, lane, [&](uint32_t row_tile) {
              const int32_t steps = steps_of(row_tile);
              num_work_tiles += steps > 0 ? heads : 0;
              longest = max(longest, steps);
              return int64_t{steps} * heads;
          }) {
        num_work_tiles = __reduce_add_sync(0xffffffff, num_work_tiles);
        longest = __reduce_max_sync(0xffffffff, longest);
    }

    // Returns the steps of each worker if work tiles are split, or 0 if that does not pay.
    FASTATTN_DEVICE int32_t steps_per_worker(uint32_t num_workers) const {
        if (num_work_tiles == 0 || num_work_tiles > kTilesPerSplitWorker * num_workers) return 0;
        // The steps of the busiest worker, with and without splits.
        const int64_t most_split = max((row_tiles.all + num_workers - 1) / num_workers, int64_t{kCombineCost});
        const int64_t waves = (num_work_tiles + num_workers - 1) / num_workers;
        const int64_t most_whole = max(int64_t{longest}, waves * row_tiles.all / num_work_tiles);
        return most_split + kCombineCost < most_whole ? static_cast<int32_t>(most_split) : 0;
    }
};

// Returns the steps of a persistent cluster. Called by one warp.
template <typename StepsOf>
FASTATTN_DEVICE ClusterSteps cluster_steps(uint32_t num_row_tiles, uint32_t heads, uint32_t cluster,
                                           uint32_t num_clusters, int lane, StepsOf&& steps_of) {
    const StepScan steps(num_row_tiles, heads, lane, steps_of);
    ClusterSteps own{};
    own.per_cluster = steps.steps_per_worker(num_clusters);
    own.is_split = own.per_cluster > 0;
    const int64_t all = steps.row_tiles.all, begin = int64_t{cluster} * own.per_cluster;
    if (!own.is_split || begin >= all) return own;
    own.count = static_cast<int32_t>(min(int64_t{own.per_cluster}, all - begin));
    const auto [row_tile, before] =
        steps.row_tiles.find(begin, [&](uint32_t row_tile) { return int64_t{steps_of(row_tile)} * heads; });
    const int32_t tile_steps = steps_of(row_tile);
    own.tile_idx = row_tile * heads + static_cast<uint32_t>(before / tile_steps);
    own.step = static_cast<int32_t>(before % tile_steps);
    return own;
}

// Returns the split of a CTA that takes only one split. Called by one warp. The number of splits of a work tile is
// proportional to its steps. It is rounded down, so that num_ctas CTAs run all splits at a time, but is at least one.
template <typename StepsOf>
FASTATTN_DEVICE KeySplit key_split(uint32_t num_row_tiles, uint32_t heads, uint32_t cta, uint32_t num_ctas, int lane,
                                   StepsOf&& steps_of) {
    const StepScan steps(num_row_tiles, heads, lane, steps_of);
    if (steps.steps_per_worker(num_ctas) == 0) return {false, cta < num_row_tiles * heads, cta, 0, 1};
    const auto splits_of_tile = [&](uint32_t row_tile) {
        const int32_t tile_steps = steps_of(row_tile);
        const auto proportional = static_cast<int32_t>(int64_t{tile_steps} * num_ctas / steps.row_tiles.all);
        return tile_steps == 0 ? 0 : max(min(proportional, tile_steps / kCombineCost), 1);
    };
    const auto splits_of_row_tile = [&](uint32_t row_tile) { return int64_t{splits_of_tile(row_tile)} * heads; };
    const RowTileScan splits(num_row_tiles, lane, splits_of_row_tile);
    if (splits.all == steps.num_work_tiles) return {false, cta < num_row_tiles * heads, cta, 0, 1};
    if (cta >= splits.all) return {};
    const auto [row_tile, before] = splits.find(cta, splits_of_row_tile);
    const int32_t num_splits = splits_of_tile(row_tile), split = static_cast<int32_t>(before);
    return {true, true, row_tile * heads + split / num_splits, split % num_splits, num_splits};
}

// Returns the steps of a split of a work tile whose rows see num_tiles tiles of keys.
FASTATTN_DEVICE Steps steps_of_split(const KeySplit& split, int32_t num_tiles) {
    const auto left_before = [&](int32_t idx) {
        return num_tiles - static_cast<int32_t>(int64_t{num_tiles} * idx / split.num_splits);
    };
    return {left_before(split.idx), left_before(split.idx + 1)};
}

// The position of a persistent cluster in its work.
struct WorkTileWalk {
    uint32_t tile_idx;   // the work tile at hand
    int32_t step, left;  // with splits: the next step of the work tile, and how many steps the cluster has left
    bool has_begun;      // used without splits

    FASTATTN_DEVICE explicit WorkTileWalk(const ClusterSteps& own)
        : tile_idx(own.tile_idx), step(own.step), left(own.count), has_begun(false) {}

    FASTATTN_DEVICE Steps steps(bool is_split, int32_t num_tiles) const {
        if (!is_split) return {num_tiles, 0};
        const int32_t begin = max(num_tiles - step, 0);
        return {begin, max(begin - left, 0)};
    }

    // With splits: goes on to the next steps.
    FASTATTN_DEVICE void advance(bool has_rows, int32_t num_tiles) {
        const int32_t tile_steps = has_rows ? max(num_tiles, 1) : 0, taken = min(tile_steps - step, left);
        left -= taken;
        step += taken;
        if (step == tile_steps) {
            step = 0;
            ++tile_idx;
        }
    }

    // Returns the partials of this work tile. `first` and `last` are the tile's steps, counted from the first step of
    // cluster `cluster`.
    FASTATTN_DEVICE TilePartials partials(const ClusterSteps& own, uint32_t cluster, int32_t num_tiles) const {
        const int32_t first = own.count - left - step, last = first + max(num_tiles, 1) - 1;
        const int32_t clusters_before = first < 0 ? ceil_div(-first, own.per_cluster) : 0;
        return {clusters_before + last / own.per_cluster + 1, static_cast<int32_t>(cluster) - clusters_before, 1};
    }
};
#endif

}  // namespace fastattn
