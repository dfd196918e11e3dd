// The work tile of a CTA of the backward pass on sm_80: its keys, and the query rows that see these keys.
#pragma once

#include <cstdint>

#include "attention/query_sums.h"
#include "attention/seen_tiles.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "scheduler/work_tile.h"

namespace fastattn {

// kBlockN keys of one KV head, and row tiles [begin_tile, end_tile) of kBlockM query rows each, the same for every
// query head of the KV head. Without ranges of keys, these are the row tiles that see some of the keys through the
// window. With ranges, they extend from the first to the last row tile that sees some of the keys. Constructed by all
// lanes of a warp together.
template <int kBlockM_, int kBlockN_>
struct KeyWorkTileSm80 {
    static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;

    int32_t batch, key_head, key_tile, first_key;
    Sequence rows, keys;
    int32_t tile_keys;  // how many keys of the tile exist; <= 0: the CTA has nothing to do
    int32_t first_head, end_head;
    Window window;
    int32_t begin_tile, end_tile;
    int32_t begin_full, end_full;  // row tiles whose existing rows all see every key of the tile through the window

    FASTATTN_DEVICE KeyWorkTileSm80(const AttentionBackwardParams& params, uint32_t cta, bool has_ranges = false) {
        const WorkTile tile = work_tile(cta, params.key.batch, params.key.heads, params.heads_per_group,
                                        ceil_div(params.key.rows, kBlockN));
        batch = tile.batch;
        key_head = tile.head;
        key_tile = tile.position;
        first_key = key_tile * kBlockN;
        rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        tile_keys = min(kBlockN, keys.length - first_key);
        const int32_t group_size = params.query.heads / params.key.heads;
        first_head = key_head * group_size;
        end_head = first_head + group_size;
        window = window_of(params.scores, rows.length, keys.length);
        const RowRange sees_first = window.rows_of(first_key, rows.length);
        const RowRange sees_last = window.rows_of(first_key + tile_keys - 1, rows.length);
        begin_tile = sees_first.begin / kBlockM;
        end_tile = ceil_div(sees_last.end, kBlockM);
        begin_full = ceil_div(sees_last.begin, kBlockM);
        end_full = tile_keys < kBlockN ? 0 : sees_first.end == rows.length ? end_tile : sees_first.end / kBlockM;
        if (has_ranges) {
            const RowTilesOfKeys row_tiles = RowTilesOfKeys::of(params.seen_tiles, batch, rows.begin, key_tile);
            const auto visited = row_tiles.visited(first_head, end_head, ceil_div(rows.length, kBlockM));
            begin_tile = visited.begin, end_tile = visited.end;
        }
    }

    FASTATTN_DEVICE bool is_full(int32_t row_tile) const { return row_tile >= begin_full && row_tile < end_full; }

    // Returns the sequence's first row tile in dQ's sums.
    FASTATTN_DEVICE int32_t first_sums_tile(const AttentionBackwardParams& params) const {
        return first_query_tile(batch, params.query.rows, params.packed.cu_seqlens_q != nullptr, rows.begin, kBlockM);
    }
};

// The steps of a CTA: one query head after another, and for each head the row tiles that see the CTA's keys. All lanes
// of a warp call the functions together. kOptions: there may be ranges of keys.
template <typename WorkTile, bool kOptions>
struct RowTileWalk {
    const AttentionBackwardParams& params;
    const WorkTile& tile;
    int32_t head, row_tile;

    FASTATTN_DEVICE RowTileWalk(const AttentionBackwardParams& params, const WorkTile& tile)
        : params(params), tile(tile), head(tile.first_head), row_tile(tile.begin_tile) {
        if (tile.begin_tile >= tile.end_tile) head = tile.end_head;
        find();
    }

    FASTATTN_DEVICE bool is_over() const { return head >= tile.end_head; }

    FASTATTN_DEVICE void go_on() {
        if (++row_tile == tile.end_tile) {
            row_tile = tile.begin_tile;
            ++head;
        }
        find();
    }

    // Returns whether nothing but a bias hides keys of the tile from rows. Without kOptions, this means that every
    // existing row sees every key. With kOptions, it means that ranges of keys, clipped to the window, hide no key, and
    // that all kBlockM rows exist: a row that does not exist would not be masked, and would take up NaN from keys that
    // a bias hides from all existing rows. With kOptions but without ranges, returns false, because the loop has no
    // registers left to compare windows.
    FASTATTN_DEVICE bool is_full() const { return kOptions ? seen_whole_ : tile.is_full(row_tile); }

    // Returns how many key tiles before this one add to dQ of the current row tile. With ranges of keys, returns 0 if
    // additions are not ordered (no semaphores). window: a copy of tile.window that the caller recomputes, because
    // reading tile.window here would keep it in registers throughout the loop.
    FASTATTN_DEVICE int32_t num_before(const Window& window) const {
        if (has_ranges()) {
            return params.semaphores != nullptr ? row_tiles().num_before(head, row_tile) : 0;
        }
        return tile.key_tile - window.keys_of(row_tile * WorkTile::kBlockM).begin / WorkTile::kBlockN;
    }

  private:
    bool seen_whole_ = false;  // no key is hidden by ranges, and all rows exist

    FASTATTN_DEVICE bool has_ranges() const { return kOptions && params.scores.ranges.data != nullptr; }

    FASTATTN_DEVICE RowTilesOfKeys row_tiles() const {
        // Opaque: otherwise a value that the compiler derives from rows.begin takes a register in the loop.
        return RowTilesOfKeys::of(params.seen_tiles, tile.batch, ptx::opaque(tile.rows.begin), tile.key_tile);
    }

    // With ranges of keys, skips row tiles that see none of the keys.
    FASTATTN_DEVICE void find() {
        if (has_ranges()) {
            seen_whole_ = row_tiles().find(head, row_tile, tile.begin_tile, tile.end_tile, tile.end_head) &&
                          (row_tile + 1) * WorkTile::kBlockM <= tile.rows.length;
        }
    }
};

// Returns the index of the CTA's work tile. If semaphores order the additions to dQ, from the first keys to the last,
// CTAs claim their indices in the order in which they start. A CTA then waits only for CTAs that already run. Called by
// all threads. shared_cta is in shared memory.
FASTATTN_DEVICE uint32_t cta_in_order(const AttentionBackwardParams& params, uint32_t& shared_cta) {
    if (params.semaphores == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) shared_cta = atomicAdd(params.num_claimed, 1);
    __syncthreads();  // waits until the index is in shared memory
    return shared_cta;
}

}  // namespace fastattn
