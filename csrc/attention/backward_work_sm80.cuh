// The work tile of a CTA of the backward pass on sm_80: its keys, and the query rows that see them.
#pragma once

#include <cstdint>

#include "attention/query_gradient.h"
#include "attention/seen_tiles.cuh"
#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "scheduler/work_tile.h"

namespace fastattn {

// kBlockN keys of one KV head, and the tiles of kBlockM query rows that see some of them, the same for each query head
// of that KV head.
template <int kBlockM, int kBlockN>
struct KeyWorkTileSm80 {
    static constexpr int kRows = kBlockM, kKeys = kBlockN;

    int32_t batch, key_head, key_tile, first_key;
    Sequence rows, keys;
    int32_t num_keys;  // of the tile; none: there is nothing to do
    int32_t first_head, end_head;
    Window window;
    int32_t begin_tile, end_tile;
    int32_t begin_full, end_full;  // tiles whose existing rows all see all of the keys

    // has_ranges: which tiles of rows see the keys is told by SeenTiles.
    FASTATTN_DEVICE KeyWorkTileSm80(const AttentionBackwardParams& params, uint32_t cta, bool has_ranges = false) {
        const WorkTile tile = work_tile(cta, params.key.batch, params.key.heads, params.heads_per_group,
                                        ceil_div(params.key.rows, kBlockN));
        batch = tile.batch;
        key_head = tile.head;
        key_tile = tile.position;
        first_key = key_tile * kBlockN;
        rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        num_keys = min(kBlockN, keys.length - first_key);
        const int32_t group_size = params.query.heads / params.key.heads;
        first_head = key_head * group_size;
        end_head = first_head + group_size;
        window = window_of(params.scores, rows.length, keys.length);
        const RowRange sees_first = window.rows_of(first_key, rows.length);
        const RowRange sees_last = window.rows_of(first_key + num_keys - 1, rows.length);
        begin_tile = sees_first.begin / kBlockM;
        end_tile = ceil_div(sees_last.end, kBlockM);
        begin_full = ceil_div(sees_last.begin, kBlockM);
        end_full = num_keys < kBlockN ? 0 : sees_first.end == rows.length ? end_tile : sees_first.end / kBlockM;
        if (has_ranges) begin_tile = 0, end_tile = ceil_div(rows.length, kBlockM);
    }

    FASTATTN_DEVICE bool is_full(int32_t row_tile) const { return row_tile >= begin_full && row_tile < end_full; }

    // The first tile of the sequence in dQ's sums.
    FASTATTN_DEVICE int32_t first_sums_tile(const AttentionBackwardParams& params) const {
        return first_query_tile(batch, params.query.rows, params.packed.cu_seqlens_q != nullptr, rows.begin, kBlockM);
    }
};

// The steps of a CTA: for one query head after the other, the tiles of rows that see its keys. Called by all lanes of a
// warp. kOptions: there may be ranges of keys.
template <typename WorkTile, bool kOptions>
struct RowTileWalk {
    const AttentionBackwardParams& params;
    const WorkTile& tile;
    int32_t head, row_tile;
    bool is_full;  // the rows see all of the keys; with kOptions, their ranges hide none

    FASTATTN_DEVICE RowTileWalk(const AttentionBackwardParams& params, const WorkTile& tile)
        : params(params),
          tile(tile),
          head(tile.first_head),
          row_tile(tile.begin_tile - 1),
          end_looked_(tile.begin_tile) {
        if (tile.begin_tile < tile.end_tile) {
            go_on();
        } else {
            head = tile.end_head;
        }
    }

    FASTATTN_DEVICE bool is_over() const { return head >= tile.end_head; }

    FASTATTN_DEVICE void go_on() {
        if constexpr (kOptions) {
            while (seen_ == 0 && !is_over()) look_ahead();
            const int idx = __ffs(seen_) - 1;
            row_tile = end_looked_ - kWarpSize + idx;
            is_full = full_ >> idx & 1;
            seen_ &= seen_ - 1;
        } else {
            if (++row_tile == tile.end_tile) {
                row_tile = tile.begin_tile;
                ++head;
            }
            is_full = tile.is_full(row_tile);
        }
    }

    // How many tiles of keys before this one add to dQ of the tile of rows at hand.
    FASTATTN_DEVICE int32_t num_before() const {
        if (has_ranges()) return tiles_of_keys().num_before(head, row_tile);
        return tile.key_tile - tile.window.keys_of(row_tile * WorkTile::kRows).begin / WorkTile::kKeys;
    }

  private:
    int32_t end_looked_;            // behind the tiles whose bits these are
    uint32_t seen_ = 0, full_ = 0;  // tiles that have not been walked over; that see all keys through their ranges

    FASTATTN_DEVICE bool has_ranges() const { return kOptions && params.scores.ranges.data != nullptr; }

    FASTATTN_DEVICE RowTilesOfKeys tiles_of_keys() const {
        return RowTilesOfKeys::of(params.seen_tiles, tile.batch, tile.rows.begin, tile.key_tile);
    }

    // Looks at 32 more tiles, or goes to the next head.
    FASTATTN_DEVICE void look_ahead() {
        const int32_t num_left = tile.end_tile - end_looked_;
        if (num_left <= 0) {
            end_looked_ = tile.begin_tile;
            ++head;
            return;
        }
        if (has_ranges()) {
            const auto bits = tiles_of_keys().look_at(head, end_looked_, tile.end_tile);
            seen_ = bits.seen, full_ = bits.full;
        } else {
            seen_ = 0xffffffff >> (kWarpSize - min(num_left, kWarpSize)), full_ = 0xffffffff;
        }
        end_looked_ += kWarpSize;
    }
};

// The CTA's index: where semaphores order additions, in the order in which CTAs start. Called by all threads;
// shared_cta lies in shared memory.
FASTATTN_DEVICE uint32_t cta_in_order(const AttentionBackwardParams& params, uint32_t& shared_cta) {
    if (params.semaphores == nullptr) return blockIdx.x;
    if (threadIdx.x == 0) shared_cta = atomicAdd(params.num_claimed, 1);
    __syncthreads();
    return shared_cta;
}

}  // namespace fastattn
