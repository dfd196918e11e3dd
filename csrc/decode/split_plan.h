// Which keys each CTA of flash-decoding takes: a pure function of lengths, heads and the size of the GPU, that CTAs
// compute for themselves from the lengths in device memory.
//
// A tile is the rows of a KV head of a sequence, 16 at most. Its keys are cut into units of whole blocks, and the units
// of all tiles form a line: by sequence, then by tile, then by key. CTA c takes units [c * share, (c + 1) * share),
// which may be the end of one tile, whole tiles, and the beginning of another. So the work of CTAs differs by a unit at
// most, however ragged the lengths are, and whatever they become in the replay of a CUDA graph.
//   balanced        a unit is a block, and shares are as large as the line needs.
//   num_splits      a tile has at most so many units of equal size, each a CTA's share.
//   batch_invariant a unit is 1024 keys, counted from the first, and a CTA's share: no other sequence has an influence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/tile_order.h"
#include "host/decode_params.h"

namespace fastattn {

// A sequence's tokens before and after the append, and the first key of which anything depends.
struct CachedSequence {
    int32_t before, total, first_key;
};

FASTATTN_HOST_DEVICE CachedSequence cached_sequence(const SequenceShape& shape, int32_t length) {
    CachedSequence sequence;
    const int32_t positive = length > 0 ? length : 0;
    sequence.before = positive < shape.capacity ? positive : shape.capacity;
    const int32_t room = shape.capacity - sequence.before;
    sequence.total = sequence.before + (shape.num_new < room ? shape.num_new : room);
    const int64_t first = int64_t{sequence.total} - shape.num_queries - shape.window_left;
    sequence.first_key = shape.window_left < 0 || first < 0 ? 0 : static_cast<int32_t>(first);
    // New tokens are written also where no query sees them.
    if (shape.num_new > 0 && sequence.before < sequence.first_key) sequence.first_key = sequence.before;
    return sequence;
}

// The units of one tile: unit i is blocks [first_block + i * blocks_per_unit, …), the last one may be shorter.
struct TileUnits {
    int32_t first_block, blocks_per_unit, num_units;
};

FASTATTN_HOST_DEVICE TileUnits tile_units(const SplitPlan& plan, const CachedSequence& sequence, int32_t block_keys) {
    TileUnits units;
    units.first_block = sequence.first_key / block_keys;
    const int32_t num_blocks = ceil_div(sequence.total, block_keys) - units.first_block;
    units.blocks_per_unit =
        plan.splits_per_tile > 0 ? ceil_div(num_blocks, plan.splits_per_tile) : plan.blocks_per_unit;
    if (units.blocks_per_unit < 1) units.blocks_per_unit = 1;
    units.num_units = ceil_div(num_blocks, units.blocks_per_unit);
    if (units.num_units < 1) units.num_units = 1;  // somebody has to say that there are no keys
    return units;
}

FASTATTN_HOST_DEVICE int64_t units_per_cta(const SplitPlan& plan, int64_t total_units) {
    const int64_t share = (total_units + plan.num_ctas - 1) / plan.num_ctas;
    return share > plan.min_units_per_cta ? share : plan.min_units_per_cta;
}

// What a CTA has of one tile, from `unit` on: its units [first, first + count), and their keys as far as there are any.
struct TileShare {
    int32_t tile_idx, first, count;
    int32_t begin_key, end_key;
    bool is_whole;
};

// The tiles of the sequence start at first_unit on the line; the CTA's share ends at end_unit.
FASTATTN_HOST_DEVICE TileShare tile_share(const TileUnits& units, const CachedSequence& sequence, int32_t block_keys,
                                          int64_t first_unit, int64_t unit, int64_t end_unit) {
    TileShare share;
    share.tile_idx = static_cast<int32_t>((unit - first_unit) / units.num_units);
    share.first = static_cast<int32_t>(unit - first_unit - int64_t{share.tile_idx} * units.num_units);
    const int64_t left_of_tile = units.num_units - share.first, left_of_share = end_unit - unit;
    share.count = static_cast<int32_t>(left_of_tile < left_of_share ? left_of_tile : left_of_share);
    share.is_whole = share.count == units.num_units;
    const int32_t begin = (units.first_block + share.first * units.blocks_per_unit) * block_keys;
    const int32_t end = (units.first_block + (share.first + share.count) * units.blocks_per_unit) * block_keys;
    share.begin_key = begin > sequence.first_key ? begin : sequence.first_key;
    share.end_key = end < sequence.total ? end : sequence.total;
    return share;
}

inline constexpr int32_t kMergedParts = 16;  // at a time: see decode/merge_parts.cuh

// The parts of a tile, one of each CTA from `first_cta` on.
struct TileParts {
    int32_t first_cta, count, num_ctas;
    int64_t first_unit, units_per_cta;

    // Where a part is left. A CTA has two tiles at most of which others have parts: that in which its share begins, and
    // that in which it ends.
    FASTATTN_HOST_DEVICE int32_t slot(int32_t part) const {
        const int32_t cta = first_cta + part;
        const bool begins_share = cta * units_per_cta >= first_unit;
        return begins_share ? cta : cta + num_ctas;
    }
};

// The tiles of the sequence start at first_unit on the line.
FASTATTN_HOST_DEVICE TileParts tile_parts(const SplitPlan& plan, const TileUnits& units, int64_t first_unit,
                                          int32_t tile_idx, int64_t units_per_cta) {
    TileParts parts;
    parts.num_ctas = plan.num_ctas;
    parts.units_per_cta = units_per_cta;
    parts.first_unit = first_unit + int64_t{tile_idx} * units.num_units;
    parts.first_cta = static_cast<int32_t>(parts.first_unit / units_per_cta);
    const int64_t last_cta = (parts.first_unit + units.num_units - 1) / units_per_cta;
    parts.count = static_cast<int32_t>(last_cta) - parts.first_cta + 1;
    return parts;
}

// The most blocks of keys that a tile of any length can have.
inline int32_t most_blocks(const SequenceShape& shape, int32_t block_keys) {
    const int32_t all = ceil_div(shape.capacity, block_keys);
    if (shape.window_left < 0) return all;
    // Seen or new keys are the last ones; they touch one block more than they fill where they begin inside of one.
    const int64_t keys = std::max<int64_t>(int64_t{shape.window_left} + shape.num_queries, shape.num_new);
    return static_cast<int32_t>(std::min<int64_t>(all, (keys + block_keys - 2) / block_keys + 1));
}

inline int32_t num_slots(const SplitPlan& plan) {
    return plan.min_units_per_cta > 1 ? 2 * plan.num_ctas : plan.num_ctas;
}

// cta_slots: how many CTAs run on the GPU at a time. num_splits = 0 leaves the choice to the plan.
inline SplitPlan split_plan(const SequenceShape& shape, int32_t batch, int32_t kv_heads, int32_t row_tiles,
                            int32_t block_keys, int64_t num_splits, bool batch_invariant, int32_t cta_slots) {
    constexpr int32_t kInvariantKeys = 1024;  // 512 KB of 128 + 128 dims; 16 rows written and read are 3 % of that
    constexpr int32_t kMostInvariantUnits = 256;
    // Both blocks of a CTA are on their way before the first is used: with one block each, CTAs would take as long, and
    // leave twice as many results to merge.
    constexpr int32_t kMinUnits = 2;
    const int32_t blocks = std::max(1, most_blocks(shape, block_keys));
    SplitPlan plan{};
    plan.tiles_per_sequence = kv_heads * row_tiles;
    plan.blocks_per_unit = 1;
    plan.min_units_per_cta = 1;
    const int64_t tiles = int64_t{batch} * plan.tiles_per_sequence;
    int64_t num_ctas;
    if (num_splits > 0) {
        plan.splits_per_tile = static_cast<int32_t>(std::min<int64_t>(num_splits, blocks));
        num_ctas = tiles * plan.splits_per_tile;
    } else if (batch_invariant) {
        plan.blocks_per_unit = std::max(kInvariantKeys / block_keys, ceil_div(blocks, kMostInvariantUnits));
        num_ctas = tiles * ceil_div(blocks, plan.blocks_per_unit);
    } else {
        plan.min_units_per_cta = kMinUnits;
        num_ctas = std::min<int64_t>(cta_slots, (tiles * blocks + kMinUnits - 1) / kMinUnits);
    }
    plan.num_ctas = static_cast<int32_t>(std::min<int64_t>(num_ctas, 0x3fffffff));
    return plan;
}

// Whether a tile can be cut at all: else nothing is left to merge.
inline bool can_be_cut(const SplitPlan& plan, const SequenceShape& shape, int32_t block_keys) {
    const int32_t blocks = most_blocks(shape, block_keys);
    return plan.splits_per_tile > 0 ? plan.splits_per_tile > 1 : blocks > plan.blocks_per_unit;
}

}  // namespace fastattn
