// Finds which key tiles a row tile sees through its ranges of keys (ScoreParams::ranges) and its window.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/key_ranges.cuh"
#include "device/sequence.cuh"
#include "host/launch.h"

namespace fastattn {

// What the rows of a row tile see of a key tile. some: some row sees some key. all: every row sees every key.
struct SeenKeys {
    bool some, all;
};

// The ranges of keys of one row tile. The CTA, which is a single warp, owns the row tile, and each lane tests a
// different key tile. Ranges are clipped to the window and to the keys of the sequence. Precondition: a row tile has at
// most kMostRowsWithRanges rows.
class RowTileRanges {
  public:
    using Storage = KeyRange[kMostRowsWithRanges * kMostRanges];  // [rows, num], in shared memory

    int32_t num_keys;
    int32_t* entries = nullptr;  // the row tile's entries in SeenTiles; null: the tile has no rows

    template <typename Params>
    FASTATTN_DEVICE RowTileRanges(const Params& params, Storage& sRanges) : sRanges_(sRanges) {
        const KeyRangesView& ranges = params.scores.ranges;
        const SeenTiles& tiles = params.seen_tiles;
        const int32_t num_tiles = ceil_div(params.query.rows, tiles.block_m), tile = blockIdx.x % num_tiles;
        const int32_t head = blockIdx.x / num_tiles % ranges.heads, batch = blockIdx.x / num_tiles / ranges.heads;
        const int32_t first_row = tile * tiles.block_m;
        const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        if (first_row >= rows.length) return;
        entries = tiles.of(batch, head, tile, rows.begin);
        num_keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows).length;
        block_n_ = tiles.block_n;
        ranges_of_row_ = ranges.num;
        num_ranges_ = min(rows.length - first_row, tiles.block_m) * ranges.num;

        // Clip the ranges of each row to the keys that its window has.
        const Window window = window_of(params.scores, rows.length, num_keys);
        const RowRanges row_ranges(ranges, batch, head, rows);
        for (int32_t i = threadIdx.x; i < num_ranges_; i += kWarpSize) {
            const int32_t row = first_row + i / ranges.num;
            const KeyRange range = row_ranges.range(row, i % ranges.num), seen = window.keys_of(row);
            sRanges_[i] = {max(range.begin, seen.begin), min(range.end, seen.end)};
        }
        __syncwarp();  // waits until every lane has written its ranges
    }

    // Returns what the rows see of a key tile: nothing if the key tile is past the last one.
    FASTATTN_DEVICE SeenKeys look_at(int32_t key_tile) const {
        if (key_tile >= ceil_div(num_keys, block_n_)) return {false, false};
        const int32_t begin = key_tile * block_n_, end = begin + block_n_;
        bool sees_some = false, sees_all = end <= num_keys;
        for (int32_t row = 0; row < num_ranges_; row += ranges_of_row_) {
            bool row_sees_all = false;
            for (int32_t i = row; i < row + ranges_of_row_; ++i) {
                const KeyRange range = sRanges_[i];
                sees_some |= max(range.begin, begin) < min(range.end, end);
                row_sees_all |= range.begin <= begin && range.end >= end;
            }
            sees_all &= row_sees_all;
        }
        return {sees_some, sees_all};
    }

  private:
    Storage& sRanges_;
    int32_t block_n_, ranges_of_row_, num_ranges_;
};

// Returns a launch with one CTA for each row tile of each batch and head. If ranges are broadcast over the batch or the
// heads, one CTA serves all of them.
template <typename Params>
Launch launch_for_row_tiles(const Params& params) {
    const KeyRangesView& ranges = params.scores.ranges;
    const int64_t num_tiles = ceil_div(params.query.rows, params.seen_tiles.block_m);
    return Launch{num_tiles * ranges.heads * ranges.batch, kWarpSize, /*shared_bytes=*/0};
}

}  // namespace fastattn
