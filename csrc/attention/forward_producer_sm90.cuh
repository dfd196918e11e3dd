// The producer of the forward kernels for Hopper: finds the work tiles of its CTA, passes them to the consumers, and
// copies Q, K and V by TMA.
#pragma once

#include <cstdint>

#include "attention/forward_config_sm90.cuh"
#include "attention/forward_work_sm90.h"
#include "attention/key_tiles.cuh"
#include "device/cluster.cuh"
#include "device/mask.cuh"
#include "device/nonfinite.cuh"
#include "device/ptx/cluster.cuh"
#include "device/ptx/fence.cuh"
#include "device/ring.cuh"
#include "device/tma_nonfinite.cuh"
#include "host/tensor_map.h"
#include "scheduler/arrivals.cuh"
#include "scheduler/key_splits.h"

namespace fastattn {

// Finds the steps of this cluster (scheduler/key_splits.h), and sets shared.walk to the first of them. Called by the
// producer's first warp.
template <typename Config>
FASTATTN_DEVICE void find_steps(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params,
                                int lane) {
    const ForwardScheduleSm90& schedule = all_params.schedule;
    ClusterSteps steps{};
    if (schedule.may_split) {
        const uint32_t heads = work_tile_heads(all_params.attention, schedule);
        steps =
            cluster_steps(schedule.num_tiles / heads, heads, cluster_in_grid(schedule.cluster_size()),
                          clusters_in_grid(schedule.cluster_size()), lane, [&](uint32_t entry) {
                              const RowsOfCta rows(all_params.attention, schedule, entry * heads,
                                                   /*in_split_order=*/true, 0, Config::kBlockM);
                              return rows.cluster_has_rows() ? max(rows.key_tiles(Config::kBlockN).num_tiles(), 1) : 0;
                          });
    }
    if (lane != 0) return;
    if (!steps.is_split) steps.tile_idx = cluster_in_grid(schedule.cluster_size());
    shared.steps = steps;
    shared.walk = WorkTileWalk(steps);
    shared.num_split_tiles = 0;
}

// Returns the index of the cluster's next work tile, if work tiles are not split. Clusters claim work tiles one at a
// time, because work tiles differ in length. If `claimed` is null, they take work tiles in turn instead. CTA 0 claims
// for both CTAs of a cluster, and sends CTA 1 the index. ring: the stage of `work` that will hold the work tile. Called
// by one thread of the producer, once it has issued the copies of the current work tile's last keys.
template <typename Config>
FASTATTN_DEVICE uint32_t next_whole_tile(ForwardStorageSm90<Config>& shared,
                                         const AttentionForwardParamsSm90& all_params, int rank, const Ring<2>& ring) {
    const AttentionForwardParams& params = all_params.attention;
    const ForwardScheduleSm90& schedule = all_params.schedule;
    const uint32_t clusters = clusters_in_grid(schedule.cluster_size());
    if (params.claimed == nullptr) return shared.walk.tile_idx + clusters;
    const Ring<2> claims = ring.before(shared.claims);  // one step behind, as the first work tile is not claimed
    uint32_t& claimed = shared.claimed[claims.stage];
    if (rank > 0) {
        claims.expect(sizeof(claimed));
        claims.wait_full();
        const uint32_t tile_idx = claimed;
        claims.arrive_empty_at(/*rank=*/0);
        return tile_idx;
    }
    const uint32_t ticket = take_ticket(params.claimed), tile_idx = clusters + ticket;
    // Clusters take num_tiles tickets in all. Of these, num_tiles - clusters yield a work tile, because the first work
    // tile of each cluster is not claimed. Each cluster takes one more ticket to learn that no work tile is left. The
    // cluster with the last ticket resets the counter.
    if (ticket == schedule.num_tiles - 1) reset_tickets(params.claimed, params.launch_id, ticket);
    if (schedule.cluster_size() > 1) {
        claims.wait_empty();
        ptx::st_async_u32(ptx::mapa(shared_address(&claimed), 1), tile_idx, ptx::mapa(claims.full_barrier(), 1));
    }
    return tile_idx;
}

// Passes the next work tile, or kNoMoreTiles, to the other warps. Does not advance the ring. Called by one thread of
// the producer.
template <typename Config>
FASTATTN_DEVICE void publish_work_tile(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params,
                                       int rank, const Ring<2>& ring) {
    const ForwardScheduleSm90& schedule = all_params.schedule;
    WorkTileWalk& walk = shared.walk;
    const bool is_split = shared.steps.is_split;
    const uint32_t cluster = cluster_in_grid(schedule.cluster_size());
    if (!is_split && walk.has_begun) walk.tile_idx = next_whole_tile(shared, all_params, rank, ring);
    walk.has_begun = true;
    const uint32_t tile_idx = walk.tile_idx;
    ring.wait_empty();
    int idx = kNoMoreTiles;
    if (is_split ? walk.left > 0 : tile_idx < schedule.num_tiles) {
        const RowsOfCta rows(all_params.attention, schedule, tile_idx, is_split, rank, Config::kBlockM);
        const KeyTiles tiles = rows.template key_tiles<Config::kTakesRanges>(all_params.attention, Config::kBlockN);
        const TilePartials partials = is_split ? walk.partials(shared.steps, cluster, tiles.num_tiles())
                                               : TilePartials{1, static_cast<int32_t>(cluster), 1};
        idx = partials.count > 1 ? kSplitTiles + shared.num_split_tiles++ : ring.stage;
        CtaWorkTile& tile = shared.work_tiles[idx];
        tile.rows = rows;
        if constexpr (Config::kTakesRanges) tile.list = rows.tile_list(all_params.attention);
        tile.key_tiles = tiles.slice(walk.steps(is_split, tiles.num_tiles()));
        // A CTA combines partials only with CTAs of its own rank. `partials` numbers the CTAs of a rank in the order of
        // their clusters, after all CTAs of the rank before.
        const auto first_of_rank = static_cast<int32_t>(rank * clusters_in_grid(schedule.cluster_size()));
        tile.partials = {partials.count, first_of_rank + partials.first, 1};
        tile.cta = first_of_rank + static_cast<int32_t>(cluster);
        tile.first_nonfinite = INT32_MAX, tile.last_nonfinite = -1;
        if (is_split) walk.advance(rows.cluster_has_rows(), tiles.num_tiles());
    }
    shared.next_tile[ring.stage] = idx;
    ring.arrive_full();
}

// Calls begin(tile) for each work tile, then take(tile, key_tile, is_masked) for each of its key tiles, in the
// consumers' order. kPublishes: whether this warp is the one that passes work tiles to all other warps. Called by a
// whole warp of the producer.
template <bool kPublishes, typename Config, typename Begin, typename Take>
FASTATTN_DEVICE void for_tiles_of_cta(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params,
                                      int rank, int lane, Begin&& begin, Take&& take) {
    for (Ring<2> ring(shared.work);;) {
        if (!kPublishes) {
            ring.wait_full();
        } else if (lane == 0) {
            publish_work_tile(shared, all_params, rank, ring);
        }
        __syncwarp();  // waits until all lanes see the index
        const int idx = shared.next_tile[ring.stage];
        if (idx == kNoMoreTiles) return;
        // A reference, so that its fields are read from shared memory each time: the producer has too few registers for
        // them.
        CtaWorkTile& tile = shared.work_tiles[idx];
        begin(tile);
        for (int32_t num_left = tile.key_tiles.num_tiles(); num_left > 0; --num_left) {
            take(tile, tile.template key_tile<Config::kTakesRanges>(all_params.attention, num_left),
                 num_left > tile.key_tiles.num_full);
        }
        __syncwarp();  // waits until every lane has read the work tile
        if (kPublishes) {
            ring.advance();
        } else {
            ring.release(lane);
        }
    }
}

// Copies Q of a work tile. Called by one thread.
template <typename Config>
FASTATTN_DEVICE void load_query(ForwardStorageSm90<Config>& shared, const TensorMap& query, const CtaWorkTile& tile,
                                Ring<1>& ring) {
    using QueryTile = typename Config::QueryTile;
    if (tile.key_tiles.num_tiles() == 0) {  // without keys, consumers do not read Q
        ring.wait_empty();
        ring.arrive_full();
        ring.advance();
        return;
    }
    const uint32_t landed = ring.acquire(Config::kNumConsumers * QueryTile::kBytes);
#pragma unroll
    for (int consumer = 0; consumer < Config::kNumConsumers; ++consumer) {
        const RowsOfCta& rows = tile.rows;
        QueryTile::load(shared_address(shared.sQ[consumer]), query, rows.batch, rows.head >> rows.log2_packed,
                        rows.queries.begin + rows.row_of(rows.first_row + consumer * kWarpgroupM), landed);
    }
    ring.advance();
}

// Waits until the stage is empty, and tells the consumers which key tile the stage will hold: writes the tile's first
// bit (ColumnBits), which masks need. Called by one thread before it arrives at `full`.
template <typename Config>
FASTATTN_DEVICE void publish_key_tile(ForwardStorageSm90<Config>& shared, const Ring<Config::kStages>& key_ring,
                                      int32_t key_tile) {
    key_ring.wait_empty();
    shared.first_bits[key_ring.stage] = key_tile * ColumnBits<Config::kTilesN>::kPerTile;
}

// Zeroes NaN and infinity in a tile of V whose first key is first_key. Records in `tile` the first and last key that
// had any. Called by one warp, only for a tile that has some. A proxy fence must follow.
template <DataType kDataType, typename ValueTile>
FASTATTN_DEVICE void make_finite(uint16_t* sV, int32_t first_key, CtaWorkTile& tile, int lane) {
    __syncwarp();  // waits until every lane has searched: below, a lane changes elements that others have searched
    constexpr int kPairsPerBlock = ValueTile::kBlockBytes / 4, kPairsPerRow = ValueTile::kRowBytes / 4;
#pragma unroll 1
    for (int i = lane; i < ValueTile::kBytes / 4; i += kWarpSize) {  // pairs go row by row in each block of columns
        uint32_t& pair = reinterpret_cast<uint32_t*>(sV)[i];
        const uint32_t nonfinite = nonfinite_mask<kDataType>(pair);
        if (nonfinite == 0) continue;
        pair &= ~nonfinite;
        const int32_t key = first_key + i % kPairsPerBlock / kPairsPerRow;
        if (key >= tile.rows.keys.length) continue;  // no row sees keys past the sequence's last
        atomicMin(&tile.first_nonfinite, key);
        atomicMax(&tile.last_nonfinite, key);
    }
}

// Zeroes NaN and infinity in a tile of V in which a mask may hide keys. P = 0 does not remove a hidden key's NaN or
// infinity, because 0 · NaN and 0 · infinity are NaN. After the last key tile,
// ForwardConsumerSm90::add_nonfinite_values() reads these values from memory again, and adds them to the rows that see
// their keys. Called by one warp for every tile of V. Consumers wait for this warp at masked tiles only. So the warp
// counts as one more consumer of the ring. In a cluster, the other CTA may refill its half of a stage earlier, but only
// of a tile that this warp does not read.
template <DataType kDataType, typename Config>
FASTATTN_DEVICE void keep_values_finite(ForwardStorageSm90<Config>& shared, const BiasView& bias,
                                        Ring<Config::kStages> value_ring, CtaWorkTile& tile, int32_t key_tile,
                                        bool is_masked, int lane) {
    using ValueTile = typename Config::ValueTile;
    constexpr int kUnroll = 4;  // more loads at once would take more registers than the producer has
    value_ring.wait_full();
    uint16_t* sV = shared.sV[value_ring.stage];
    const bool may_hide = is_masked || bias.kind != BiasView::Kind::kNone;  // a bias may hide any key
    if (may_hide) {
        if (__any_sync(0xffffffff, tile_has_nonfinite<kDataType, ValueTile, kWarpSize, kUnroll>(sV, lane))) {
            make_finite<kDataType, ValueTile>(sV, key_tile * Config::kBlockN, tile, lane);
        }
        // Makes zeros visible to wgmma, and lets the cluster's other CTA overwrite what this lane has read.
        ptx::fence_proxy_async_shared();
    }
    __syncwarp();  // waits until every lane is done with the tile
    if (lane == 0) value_ring.arrive(shared.finite_value);
    value_ring.release(lane);
}

// Copies Q with one lane, and K and V in boxes, each box with a different lane. A key tile is one box or, in pages,
// several boxes, none of which crosses a page. If other warps gather the rows of key tiles instead (key_box_rows is 0),
// waits for their copies, marks the stages as full, and zeroes NaN and infinity in V. After each key tile calls
// ahead(rows, first_key), which may prefetch what consumers need with the key tile. Called by one warp.
template <DataType kDataType, typename Config, typename Ahead>
FASTATTN_DEVICE void produce_tiles(ForwardStorageSm90<Config>& shared, const AttentionForwardParamsSm90& all_params,
                                   int rank, int cluster_size, int lane, Ahead&& ahead) {
    const AttentionForwardParams& params = all_params.attention;
    Ring<1> query_ring(shared.query);
    Ring<Config::kStages> key_ring(shared.key);
    const int rows_of_cta = Config::kBlockN / cluster_size, own_row = lane * all_params.key_box_rows;
    const int first_row = rank * rows_of_cta + own_row;
    for_tiles_of_cta</*kPublishes=*/true>(
        shared, all_params, rank, lane,
        [&](const CtaWorkTile& tile) {
            if (lane == 0) load_query(shared, all_params.query, tile, query_ring);
        },
        [&](CtaWorkTile& tile, int32_t key_tile, bool is_masked) {
            const Ring<Config::kStages> value_ring = key_ring.at_same_stage(shared.value);
            const int32_t first_key = key_tile * Config::kBlockN;
            if (lane == 0) publish_key_tile(shared, key_ring, key_tile);
            if (all_params.key_box_rows > 0) {
                const RowsOfCta& rows = tile.rows;
                const bool has_box = own_row < rows_of_cta;
                const TokenLocation location =
                    has_box ? rows.mapped_location(params, first_key + first_row) : TokenLocation{};
                const auto fill = [&](const auto& ring, auto& stages, auto layout, const TensorMap& map) {
                    const uint32_t landed = ring.acquire_by_warp(layout.kBytes, lane);
                    const uint32_t sRows = shared_address(stages[ring.stage]) + first_row * layout.kRowBytes;
                    if (has_box && cluster_size == 1) {
                        layout.load(sRows, map, location.block, rows.kv_head, location.row, landed);
                    } else if (has_box) {
                        layout.load_into_both(sRows, map, location.block, rows.kv_head, location.row, landed);
                    }
                };
                fill(key_ring, shared.sK, typename Config::KeyTile{}, all_params.key);
                fill(value_ring, shared.sV, typename Config::ValueTile{}, all_params.value);
            } else {
                if (lane == 0) key_ring.publish(shared.gathered_key), value_ring.publish(shared.gathered_value);
                keep_values_finite<kDataType>(shared, params.scores.bias, value_ring, tile, key_tile, is_masked, lane);
            }
            key_ring.advance();
            ahead(tile.rows, first_key);
        });
}

}  // namespace fastattn
