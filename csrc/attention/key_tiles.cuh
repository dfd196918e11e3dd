// The order in which a CTA visits the key tiles that its rows see.
#pragma once

#include <cstdint>

#include "device/sequence.cuh"
#include "host/host_device.h"

namespace fastattn {

// The steps of a split: begin, begin - 1, ..., end + 1. The number of a step counts the steps of the work tile that are
// left, itself included.
struct Steps {
    int32_t begin, end;

    FASTATTN_DEVICE int32_t count() const { return begin - end; }
};

// The key tiles that a row tile sees through its ranges of keys: its entries in SeenTiles. Full tiles come first.
struct KeyTileList {
    int32_t* entries;  // null: there are no ranges, or no rows

    FASTATTN_DEVICE int32_t& num_full() const { return entries[0]; }
    FASTATTN_DEVICE int32_t& num_tiles() const { return entries[1]; }
    FASTATTN_DEVICE int32_t& tile(int32_t idx) const { return entries[2 + idx]; }

    // Returns a tile that exists: with wrong cu_seqlens the list may hold any number, and then last_tile is returned.
    FASTATTN_DEVICE int32_t checked_tile(int32_t idx, int32_t last_tile) const {
        return static_cast<int32_t>(min(static_cast<uint32_t>(tile(idx)), static_cast<uint32_t>(last_tile)));
    }
};

// The key tiles that a CTA visits. First come the masked tiles, of which some row does not see every key: those at the
// end of the rows' keys, then those at the beginning. The full tiles follow. Each group goes from its last tile to its
// first.
struct KeyTiles {
    int32_t begin, count;          // the tiles of which some row sees some key: the first one and their number
    int32_t begin_full, end_full;  // the full tiles, of which every row sees every key
    int32_t num_all_full;          // number of full tiles
    int32_t num_full;              // number of full tiles of this split

    // first_row, last_row: the keys that the CTA's first and last row see. From row to row neither bound decreases.
    FASTATTN_DEVICE KeyTiles(KeyRange first_row, KeyRange last_row, int32_t block_n)
        : begin(first_row.begin / block_n),
          count(max(ceil_div(last_row.end, block_n) - begin, 0)),
          begin_full(ceil_div(last_row.begin, block_n)),
          end_full(first_row.end / block_n) {
        if (begin_full >= end_full) begin_full = end_full = begin;
        num_all_full = num_full = end_full - begin_full;
    }

    // Returns indices into the list.
    FASTATTN_DEVICE static KeyTiles of_list(const KeyTileList& list) {
        KeyTiles indices({0, 0}, {0, 0}, 1);
        indices.count = list.num_tiles();
        indices.end_full = indices.num_all_full = indices.num_full = list.num_full();
        return indices;
    }

    FASTATTN_DEVICE int32_t num_tiles() const { return count; }

    // Returns the tiles of these steps: tile(num_left) of the result is tile(num_left + steps.end) of this.
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
        return from_begin >= end_full ? from_begin : from_begin - num_all_full;
    }

    // Returns how many tiles a loader skips to reach tile(num_left - 1). After tile(num_left), it stands one tile
    // before that one in memory.
    FASTATTN_DEVICE int64_t tiles_skipped(int32_t num_left) const { return tile(num_left - 1) - (tile(num_left) - 1); }
};

}  // namespace fastattn
