// The work tiles of the forward kernels for Hopper: the query rows that a cluster and its CTAs take.
#pragma once

#include <cstdint>
#include <numeric>

#include "attention/key_tiles.cuh"
#include "device/paged_rows.cuh"
#include "device/sequence.cuh"
#include "host/launch.h"
#include "host/min_max.h"
#include "host/params.h"
#include "host/tensor_map.h"
#include "scheduler/key_splits.h"
#include "scheduler/work_tile.h"

namespace fastattn {

// How the work of a launch is divided into work tiles, which clusters take one after another. The CTAs of a cluster
// need the same key tiles: they take two heads that share a key head, or two adjacent row tiles of one head. A CTA's
// tile has rows of one head or, packed, of all 2^log2_packed heads that share a key head. Packed row m is row m /
// 2^log2_packed of head m % 2^log2_packed. heads_per_cluster counts packed heads as one.
struct ForwardScheduleSm90 {
    int32_t heads_per_cluster, tiles_per_cluster;  // of a cluster: 1 and 1, 2 and 1, or 1 and 2
    int32_t log2_packed;                           // 0: heads are not packed
    uint32_t num_tiles;                            // number of work tiles
    bool may_split;                                // clusters may split the keys of a work tile: see key_splits.h

    FASTATTN_HOST_DEVICE int cluster_size() const { return heads_per_cluster * tiles_per_cluster; }
};
struct AttentionForwardParamsSm90 {
    AttentionForwardParams attention;
    ForwardScheduleSm90 schedule;
    TensorMap query, key, value;
    int32_t key_box_rows;  // of K and V: see key_box_rows()
};

// Returns how many rows of K or V a TMA box has, if a CTA copies `rows` rows of each key tile. In pages, this is the
// largest number with which no box crosses a page. Returns 0 if such boxes would not begin where the swizzle's pattern
// does: rows are then gathered one by one.
inline int32_t key_box_rows(const PagedParams& paged, int32_t num_pages, int32_t rows) {
    if (paged.block_table == nullptr) return rows;
    if (num_pages == 0) return 0;  // there is no tensor to copy from
    if (paged.max_pages == 1) return rows;
    const int32_t box_rows = std::gcd(paged.page_size, rows);
    return box_rows % kSwizzleRows == 0 ? box_rows : 0;
}

// Chooses the schedule of a launch. packs_heads: whether a tile may have rows of several heads.
// tiles_to_pair_under_mask: how many row tiles a head must have for a cluster to take two of them under a mask. Two row
// tiles then see different keys, and both CTAs visit every key tile that one of them sees. 0: there are no clusters,
// because the L2 cache delivers what single CTAs need, or because rows are gathered without TMA.
inline ForwardScheduleSm90 forward_schedule_sm90(const LaunchedKernel& kernel, const AttentionForwardParams& params,
                                                 int32_t block_m, int32_t block_n, int32_t tiles_to_pair_under_mask,
                                                 bool packs_heads, int32_t num_sms) {
    ForwardScheduleSm90 schedule{1, 1, 0, 0, false};
    const int32_t group = params.query.heads / params.key.heads;
    int64_t tiles = ceil_div(params.query.rows, block_m), heads = params.query.heads;
    // A box of Q has 64 packed rows: some rows in all packed heads. So the number of packed heads must divide 64.
    const bool can_pack = packs_heads && group > 1 && group <= 64 && (group & (group - 1)) == 0;
    const int64_t packed_tiles = ceil_div(int64_t{params.query.rows} * group, block_m);
    constexpr int64_t kMostRows = 1 << 30;  // leaves room for one more tile in 32 bits
    if (can_pack && packed_tiles < tiles * group && int64_t{params.query.rows} * group < kMostRows) {
        while (1 << schedule.log2_packed < group) ++schedule.log2_packed;
        tiles = packed_tiles;
        heads = params.key.heads;
    }
    const bool fills_gpu = tiles * heads * params.query.batch >= num_sms;
    const bool may_pair = params.scores.ranges.data == nullptr;  // else the CTAs' lists of key tiles would differ
    if (may_pair && tiles_to_pair_under_mask > 0 && fills_gpu && num_sms % 2 == 0) {
        const bool is_masked = params.scores.has_window();
        constexpr int64_t kTilesOfOddCount = 16;  // from this many on, one idle CTA in the last pair hardly matters
        if (group % 2 == 0 && schedule.log2_packed == 0) {
            schedule.heads_per_cluster = 2;
        } else if (is_masked ? tiles >= tiles_to_pair_under_mask : tiles % 2 == 0 || tiles >= kTilesOfOddCount) {
            schedule.tiles_per_cluster = 2;
        }
    }
    const int64_t num =
        ceil_div(tiles, schedule.tiles_per_cluster) * (heads / schedule.heads_per_cluster) * params.query.batch;
    kernel.check_work_tiles(num, "tiles of rows");
    schedule.num_tiles = static_cast<uint32_t>(num);
    schedule.may_split = params.partials.values != nullptr &&
                         splitting_may_pay(params, block_m, block_n, num, num / (heads / schedule.heads_per_cluster),
                                           std::max(num_sms / schedule.cluster_size(), 1));
    return schedule;
}

#ifdef __CUDACC__
FASTATTN_DEVICE int32_t work_tile_heads(const AttentionForwardParams& params, const ForwardScheduleSm90& schedule) {
    return params.query.heads / (schedule.heads_per_cluster << schedule.log2_packed);
}

// The rows that CTA `rank` of a cluster has in a work tile. They may be past the last row of the sequence.
struct RowsOfCta {
    int32_t batch, kv_head;
    int32_t head, log2_packed;           // first head; 2^log2_packed heads are packed
    int32_t first_row;                   // counts packed rows, like cluster_begin and cluster_end
    int32_t cluster_begin, cluster_end;  // rows of all of the cluster's CTAs
    Sequence queries, keys;              // in rows and keys of one head
    Window window;

    // in_split_order: whether tile_idx counts in the order of key_splits.h, in which heads form no groups.
    FASTATTN_DEVICE RowsOfCta(const AttentionForwardParams& params, const ForwardScheduleSm90& schedule,
                              uint32_t tile_idx, bool in_split_order, int rank, int32_t block_m)
        : log2_packed(schedule.log2_packed) {
        const int32_t rows_per_cluster = block_m * schedule.tiles_per_cluster;
        const int32_t num_positions = ceil_div(params.query.rows << log2_packed, rows_per_cluster);
        const int32_t num_heads = work_tile_heads(params, schedule), heads_apart = params.query.heads / num_heads;
        const WorkTile tile =
            work_tile(tile_idx, params.query.batch, num_heads,
                      in_split_order ? num_heads : max(params.heads_per_group / heads_apart, 1), num_positions);
        batch = tile.batch;
        head = tile.head * heads_apart + (schedule.heads_per_cluster > 1 ? rank : 0);
        kv_head = head / (params.query.heads / params.key.heads);
        // The last tiles come first: under a causal mask they take longest.
        cluster_begin = (num_positions - 1 - tile.position) * rows_per_cluster;
        first_row = cluster_begin + (schedule.tiles_per_cluster > 1 ? rank * block_m : 0);
        queries = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        keys = params.paged.block_table != nullptr
                   ? Sequence{0, paged_keys(params.packed.cu_seqlens_k, batch, params.key.rows)}
                   : sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        cluster_end = min(cluster_begin + rows_per_cluster, num_rows());
        window = window_of(params.scores, queries.length, keys.length);
    }

    // Returns the page table of the sequence. Must not be read if keys are not in pages.
    FASTATTN_DEVICE PageTable page_table(const AttentionForwardParams& params) const {
        return {params.paged, batch, params.key.batch, keys.length};
    }

    // Returns the location of a key in K and V. A key whose page is missing is absent.
    FASTATTN_DEVICE TokenLocation location_of(const AttentionForwardParams& params, int32_t key) const {
        if (params.paged.block_table == nullptr) return {batch, keys.begin + key};
        return page_table(params).find(key);
    }

    // Returns the location of a key in the tensor maps. For an absent key, that is one row past the last row of a page,
    // for which TMA writes zeros.
    FASTATTN_DEVICE TokenLocation mapped_location(const AttentionForwardParams& params, int32_t key) const {
        const TokenLocation location = location_of(params, key);
        return location.is_present() ? location : TokenLocation{0, params.paged.page_size};
    }

    FASTATTN_DEVICE int32_t num_rows() const { return queries.length << log2_packed; }
    FASTATTN_DEVICE int32_t row_of(int32_t packed_row) const { return packed_row >> log2_packed; }
    FASTATTN_DEVICE int32_t head_of(int32_t packed_row) const { return head + (packed_row & ((1 << log2_packed) - 1)); }

    FASTATTN_DEVICE KeyRange keys_of(int32_t packed_row) const { return window.keys_of(row_of(packed_row)); }

    FASTATTN_DEVICE bool cluster_has_rows() const { return cluster_begin < num_rows(); }

    FASTATTN_DEVICE KeyTileList tile_list(const AttentionForwardParams& params) const {
        if (params.scores.ranges.data == nullptr || !cluster_has_rows()) return {nullptr};
        const SeenTiles& lists = params.seen_tiles;
        return {lists.of(batch, head, first_row / lists.block_m, queries.begin)};
    }

    // Returns the key tiles of all CTAs of the cluster; none if the cluster has no rows.
    FASTATTN_DEVICE KeyTiles key_tiles(int32_t block_n) const {
        if (!cluster_has_rows()) return {KeyRange{0, 0}, KeyRange{0, 0}, block_n};
        return {keys_of(cluster_begin), keys_of(cluster_end - 1), block_n};
    }

    // Returns the key tiles of the cluster or, with ranges of keys, indices in tile_list().
    template <bool kTakesRanges>
    FASTATTN_DEVICE KeyTiles key_tiles(const AttentionForwardParams& params, int32_t block_n) const {
        if constexpr (kTakesRanges) {
            const KeyTileList list = tile_list(params);
            if (list.entries != nullptr) return KeyTiles::of_list(list);
        }
        return key_tiles(block_n);
    }
};
#endif

}  // namespace fastattn
