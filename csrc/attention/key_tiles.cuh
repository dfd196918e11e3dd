// The order in which a CTA visits the key tiles that its rows see.
#pragma once

#include <cstdint>

#include "device/sequence.cuh"
#include "host/host_device.h"

namespace fastattn {

// The steps of a split of a work tile, in this order: begin, begin - 1, ..., end + 1. A step's number is how many steps
// of the whole work tile are left, with this step.
struct Steps {
    int32_t begin, end;

    FASTATTN_DEVICE int32_t count() const { return begin - end; }
};

// Lists the key tiles that a row tile sees through its ranges of keys, full tiles first. The list is stored in the row
// tile's entries in SeenTiles.
struct KeyTileList {
    int32_t* entries;  // null: there are no ranges, or no rows

    FASTATTN_DEVICE int32_t& num_full() const { return entries[0]; }
    FASTATTN_DEVICE int32_t& num_tiles() const { return entries[1]; }
    FASTATTN_DEVICE int32_t& tile(int32_t idx) const { return entries[2 + idx]; }

    // Returns the idx-th tile of the list, or last_tile if the list holds a number there that is not in [0, last_tile].
    // With wrong cu_seqlens, it may hold any number.
    FASTATTN_DEVICE int32_t checked_tile(int32_t idx, int32_t last_tile) const {
        return static_cast<int32_t>(min(static_cast<uint32_t>(tile(idx)), static_cast<uint32_t>(last_tile)));
    }
};

// The key tiles that a CTA visits. Masked tiles, of which some row does not see every key, come first: those after the
// full tiles in memory, then those before the full tiles. The full tiles come last. Each of the three groups is visited
// from its last tile to its first.
struct KeyTiles {
    int32_t begin, count;           // the tiles of which some row sees some key: the first one and their number
    int32_t begin_full, end_full;   // the full tiles, of which every row sees every key
    int32_t num_full_of_work_tile;  // number of full tiles
    int32_t num_full;               // number of full tiles of this split

    // first_row, last_row: the keys that the CTA's first and last row see. From row to row neither bound decreases.
    FASTATTN_DEVICE KeyTiles(KeyRange first_row, KeyRange last_row, int32_t block_n)
        : begin(first_row.begin / block_n),
          count(max(ceil_div(last_row.end, block_n) - begin, 0)),
          begin_full(ceil_div(last_row.begin, block_n)),
          end_full(first_row.end / block_n) {
        if (begin_full >= end_full) begin_full = end_full = begin;
        num_full_of_work_tile = num_full = end_full - begin_full;
    }

    // Returns the tiles of a list, as indices in the list.
    FASTATTN_DEVICE static KeyTiles of_list(const KeyTileList& list) {
        KeyTiles indices({0, 0}, {0, 0}, 1);
        indices.count = list.num_tiles();
        indices.end_full = indices.num_full_of_work_tile = indices.num_full = list.num_full();
        return indices;
    }

    FASTATTN_DEVICE int32_t num_tiles() const { return count; }

    // Returns the tiles of some steps: tile(num_left) of the result is this struct's tile(num_left + steps.end).
    FASTATTN_DEVICE KeyTiles slice(Steps steps) const {
        KeyTiles tiles = *this;
        tiles.begin += steps.end;
        tiles.count = steps.count();
        tiles.begin_full += steps.end;
        tiles.num_full = max(num_full - steps.end, 0);
        return tiles;
    }

    // Returns the tile to visit when num_left tiles are left.
    FASTATTN_DEVICE int32_t tile(int32_t num_left) const {
        if (num_left <= num_full) return begin_full - 1 + num_left;
        const int32_t from_begin = begin - 1 + num_left;  // the tile if no tile were full
        return from_begin >= end_full ? from_begin : from_begin - num_full_of_work_tile;
    }

    // Returns how many tiles a loader must skip, after it has loaded tile(num_left), to reach tile(num_left - 1).
    // Without a skip, the loader's next tile is the one before tile(num_left) in memory.
    FASTATTN_DEVICE int64_t tiles_skipped(int32_t num_left) const { return tile(num_left - 1) - (tile(num_left) - 1); }
};

}  // namespace fastattn
