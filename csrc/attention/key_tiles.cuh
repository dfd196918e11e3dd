// The order in which a CTA takes the tiles of keys that its rows see.
#pragma once

#include <cstdint>

#include "device/sequence.cuh"
#include "host/host_device.h"

namespace fastattn {

// The steps of a split, numbered by how many are left: begin, begin - 1, ..., end + 1.
struct Steps {
    int32_t begin, end;

    FASTATTN_DEVICE int32_t count() const { return begin - end; }
};

// The tiles of keys that a CTA goes through. First come the tiles that some row sees only in part, which need masks:
// those at the end of the rows' keys, the last tile first, then those at the beginning. The others follow, the last one
// first.
struct KeyTiles {
    int32_t begin, count;          // tiles of which some row sees a key
    int32_t begin_full, end_full;  // tiles of which every row sees all keys
    int32_t all_full;              // their number
    int32_t num_full;              // their number, without those of other splits

    // first_row, last_row: the keys that the CTA's first and last row see. Those of other rows begin and end between.
    FASTATTN_DEVICE KeyTiles(KeyRange first_row, KeyRange last_row, int32_t block_n)
        : begin(first_row.begin / block_n),
          count(max(ceil_div(last_row.end, block_n) - begin, 0)),
          begin_full(ceil_div(last_row.begin, block_n)),
          end_full(first_row.end / block_n) {
        if (begin_full >= end_full) begin_full = end_full = begin;
        all_full = num_full = end_full - begin_full;
    }

    // Returns the indices of a list whose first num_full tiles are full, and of which some row sees `count`.
    FASTATTN_DEVICE static KeyTiles of_list(int32_t num_full, int32_t count) {
        KeyTiles indices({0, 0}, {0, 0}, 1);
        indices.count = count;
        indices.end_full = indices.all_full = indices.num_full = num_full;
        return indices;
    }

    FASTATTN_DEVICE int32_t num_tiles() const { return count; }

    // The tiles of these steps alone: tile(num_left) of theirs is tile(num_left + steps.end) of all.
    FASTATTN_DEVICE KeyTiles slice(Steps steps) const {
        KeyTiles tiles = *this;
        tiles.begin += steps.end;
        tiles.count = steps.count();
        tiles.begin_full += steps.end;
        tiles.num_full = max(num_full - steps.end, 0);
        return tiles;
    }

    // The tile that comes next where num_left are left.
    FASTATTN_DEVICE int32_t tile(int32_t num_left) const {
        if (num_left <= num_full) return begin_full - 1 + num_left;
        const int32_t from_begin = begin - 1 + num_left;  // the tile if there were no full ones
        return from_begin >= end_full ? from_begin : from_begin - all_full;
    }

    // How many tiles lie from the one directly before tile(num_left) in memory to the one that is taken next.
    FASTATTN_DEVICE int64_t tiles_skipped(int32_t num_left) const { return tile(num_left - 1) - (tile(num_left) - 1); }
};

}  // namespace fastattn
