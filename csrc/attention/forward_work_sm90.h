// The work tiles of the forward kernels for Hopper: which query rows a cluster and its CTAs take.
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

// A cluster takes one work tile after the other. Its CTAs need the same tiles of keys: two heads that read one key
// head, or two tiles of rows, side by side. The rows of a tile are those of one head, or of all heads that read a key
// head, row by row: row m of a head with 2^log2_packed heads packed is row m / 2^log2_packed of head m % 2^log2_packed.
struct ForwardScheduleSm90 {
    int32_t heads_per_cluster, tiles_per_cluster;  // 1 and 1, 2 and 1, or 1 and 2
    int32_t log2_packed;                           // 0: a tile has rows of one head
    uint32_t num_tiles;                            // work tiles
    bool may_split;                                // clusters may split the keys of a work tile: see key_splits.h

    FASTATTN_HOST_DEVICE int cluster_size() const { return heads_per_cluster * tiles_per_cluster; }
};
struct AttentionForwardParamsSm90 {
    AttentionForwardParams attention;
    ForwardScheduleSm90 schedule;
    TensorMap query, key, value;
    int32_t key_box_rows;  // of K and V: see key_box_rows()
};

// How many rows of K or V a box of TMA has, where a CTA copies so many rows of a tile: in pages, the most that never
// lie in two of them. 0: boxes would begin where no pattern of the swizzle does, and rows are gathered one by one.
inline int32_t key_box_rows(const PagedParams& paged, int32_t num_pages, int32_t rows) {
    if (paged.block_table == nullptr) return rows;
    if (num_pages == 0) return 0;  // nor is there a tensor to make boxes of
    if (paged.max_pages == 1) return rows;
    const int32_t box_rows = std::gcd(paged.page_size, rows);
    return box_rows % kSwizzleRows == 0 ? box_rows : 0;
}

// tiles_to_pair_under_mask: two tiles of rows under a mask see different keys; both then take what either sees, which
// pays where a head has at least so many tiles. 0: sharing never pays, as the L2 cache delivers what each CTA needs, or
// there is no TMA to copy into both. packs_heads: whether a tile may hold rows of several heads.
inline ForwardScheduleSm90 forward_schedule_sm90(const LaunchedKernel& kernel, const AttentionForwardParams& params,
                                                 int32_t block_m, int32_t block_n, int32_t tiles_to_pair_under_mask,
                                                 bool packs_heads, int32_t num_sms) {
    ForwardScheduleSm90 schedule{1, 1, 0, 0, false};
    const int32_t group = params.query.heads / params.key.heads;
    int64_t tiles = ceil_div(params.query.rows, block_m), heads = params.query.heads;
    // Where a box of TMA, 64 rows of a tile, can hold whole rows of all heads.
    const bool can_pack = packs_heads && group > 1 && group <= 64 && (group & (group - 1)) == 0;
    const int64_t packed_tiles = ceil_div(int64_t{params.query.rows} * group, block_m);
    constexpr int64_t kMostRows = 1 << 30;  // what 32 bits hold, with a tile to spare
    if (can_pack && packed_tiles < tiles * group && int64_t{params.query.rows} * group < kMostRows) {
        while (1 << schedule.log2_packed < group) ++schedule.log2_packed;
        tiles = packed_tiles;
        heads = params.key.heads;
    }
    const bool fills_gpu = tiles * heads * params.query.batch >= num_sms;
    const bool may_pair = params.scores.ranges.data == nullptr;  // the lists of two CTAs would differ
    if (may_pair && tiles_to_pair_under_mask > 0 && fills_gpu && num_sms % 2 == 0) {
        const bool is_masked = params.scores.has_window();
        constexpr int64_t kTilesOfOddCount = 16;  // one CTA too many among so many does not count
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

// The rows of CTA `rank` of a cluster in a work tile. They may lie past the last one.
struct RowsOfCta {
    int32_t batch, kv_head;
    int32_t head, log2_packed;           // the first head, and how many follow
    int32_t first_row;                   // counted with packed heads, as all of these are
    int32_t cluster_begin, cluster_end;  // of all of the cluster's CTAs
    Sequence queries, keys;              // counted without
    Window window;

    // in_line: tile_idx counts as on the line of key_splits.h.
    FASTATTN_DEVICE RowsOfCta(const AttentionForwardParams& params, const ForwardScheduleSm90& schedule,
                              uint32_t tile_idx, bool in_line, int rank, int32_t block_m)
        : log2_packed(schedule.log2_packed) {
        const int32_t rows_per_cluster = block_m * schedule.tiles_per_cluster;
        const int32_t num_positions = ceil_div(params.query.rows << log2_packed, rows_per_cluster);
        const int32_t num_heads = work_tile_heads(params, schedule), heads_apart = params.query.heads / num_heads;
        const WorkTile tile =
            work_tile(tile_idx, params.query.batch, num_heads,
                      in_line ? num_heads : max(params.heads_per_group / heads_apart, 1), num_positions);
        batch = tile.batch;
        head = tile.head * heads_apart + (schedule.heads_per_cluster > 1 ? rank : 0);
        kv_head = head / (params.query.heads / params.key.heads);
        // The last tiles come first: under a causal mask these are the longest.
        cluster_begin = (num_positions - 1 - tile.position) * rows_per_cluster;
        first_row = cluster_begin + (schedule.tiles_per_cluster > 1 ? rank * block_m : 0);
        queries = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        keys = params.paged.block_table != nullptr
                   ? Sequence{0, paged_keys(params.packed.cu_seqlens_k, batch, params.key.rows)}
                   : sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        cluster_end = min(cluster_begin + rows_per_cluster, num_rows());
        window = window_of(params.scores, queries.length, keys.length);
    }

    // Where the keys lie, if in pages.
    FASTATTN_DEVICE PageTable page_table(const AttentionForwardParams& params) const {
        return {params.paged, batch, params.key.batch, keys.length};
    }

    // Where K and V have a key; absent if its page is missing.
    FASTATTN_DEVICE TokenLocation location_of(const AttentionForwardParams& params, int32_t key) const {
        if (params.paged.block_table == nullptr) return {batch, keys.begin + key};
        return page_table(params).find(key);
    }

    // Returns where the tensor maps have a key. An absent one lies one row past a page's last, for which TMA copies
    // zeros.
    FASTATTN_DEVICE TokenLocation mapped_location(const AttentionForwardParams& params, int32_t key) const {
        const TokenLocation location = location_of(params, key);
        return location.is_present() ? location : TokenLocation{0, params.paged.page_size};
    }

    FASTATTN_DEVICE int32_t num_rows() const { return queries.length << log2_packed; }
    FASTATTN_DEVICE int32_t row_of(int32_t packed_row) const { return packed_row >> log2_packed; }
    FASTATTN_DEVICE int32_t head_of(int32_t packed_row) const { return head + (packed_row & ((1 << log2_packed) - 1)); }

    FASTATTN_DEVICE KeyRange keys_of(int32_t packed_row) const { return window.keys_of(row_of(packed_row)); }

    FASTATTN_DEVICE bool cluster_has_rows() const { return cluster_begin < num_rows(); }

    // Returns the list of the tiles that ranges of keys leave; null if there are none, or no rows.
    FASTATTN_DEVICE const int32_t* tile_list(const AttentionForwardParams& params) const {
        if (params.scores.ranges.data == nullptr || !cluster_has_rows()) return nullptr;
        const SeenTiles& lists = params.seen_tiles;
        return lists.of(batch, head, first_row / lists.block_m, queries.begin);
    }

    // Returns the key tiles of all CTAs of the cluster; none if it has no rows.
    FASTATTN_DEVICE KeyTiles key_tiles(int32_t block_n) const {
        if (!cluster_has_rows()) return {KeyRange{0, 0}, KeyRange{0, 0}, block_n};
        return {keys_of(cluster_begin), keys_of(cluster_end - 1), block_n};
    }

    // Returns the same, or the indices of the tiles in their list.
    template <bool kTakesRanges>
    FASTATTN_DEVICE KeyTiles key_tiles(const AttentionForwardParams& params, int32_t block_n) const {
        if constexpr (kTakesRanges) {
            if (const int32_t* list = tile_list(params)) return KeyTiles::of_list(list[0], list[1]);
        }
        return key_tiles(block_n);
    }
};
#endif

}  // namespace fastattn
