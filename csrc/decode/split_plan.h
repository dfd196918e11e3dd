// Which keys each CTA of flash-decoding takes: a pure function of lengths, heads and the size of the GPU, that CTAs
// compute for themselves from the lengths in device memory.
//
// A tile is the rows of a KV head of a sequence, 16 or 32 at most. Its keys are cut into spans of whole blocks, and the spans
// of all tiles form a line: by sequence, then by tile, then by key. CTA c takes spans [c * share, (c + 1) * share),
// which may be the end of one tile, whole tiles, and the beginning of another. So the work of CTAs differs by a span at
// most, however ragged the lengths are, and whatever they become in the replay of a CUDA graph.
//   balanced        a span is a block, and shares are as large as the line needs.
//   num_splits      a tile has at most so many spans of equal size, each a CTA's share.
//   batch_invariant a span is 1024 keys, counted from the first; shares are as large as the line needs.
//
// What a CTA makes of a tile that it shares with others is a part, merged with the others' in the order of
// device/part_tree.h. As a rule all that a CTA has of a tile is one part. With batch_invariant each span is one: then
// the cut of a sequence's keys into parts, and the tree that merges them, depend on this sequence alone. The batch, the
// capacity and the size of the GPU only decide which CTA does which of these steps. A CTA merges its own parts while it
// goes through them, so that few of them ever lie in memory: see slots_per_cta().
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/tile_order.h"
#include "device/part_tree.h"
#include "host/decode_params.h"

namespace fastattn {

// Of 16 rows so many nodes are merged side by side, four levels of the tree at once: one level at a time would wait
// four times as often for memory.
inline constexpr int kLog2MergedNodes = 4, kMergedNodes = 1 << kLog2MergedNodes;

// A sequence's tokens before and after the append, and the first key on which anything depends.
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

// The spans of one tile: span i is blocks [first_block + i * blocks_per_span, …), the last one may be shorter.
struct TileSpans {
    int32_t first_block, blocks_per_span, num_spans;
};

FASTATTN_HOST_DEVICE TileSpans tile_spans(const SplitPlan& plan, const CachedSequence& sequence, int32_t block_keys) {
    TileSpans spans;
    spans.first_block = sequence.first_key / block_keys;
    const int32_t num_blocks = ceil_div(sequence.total, block_keys) - spans.first_block;
    spans.blocks_per_span =
        plan.splits_per_tile > 0 ? ceil_div(num_blocks, plan.splits_per_tile) : plan.blocks_per_span;
    if (spans.blocks_per_span < 1) spans.blocks_per_span = 1;
    spans.num_spans = ceil_div(num_blocks, spans.blocks_per_span);
    if (spans.num_spans < 1) spans.num_spans = 1;  // some CTA has to say that there are no keys
    return spans;
}

// Shares of one span halve the steps of a CTA and double what is left to merge. That pays where tiles have one span, for
// nothing is merged, and where they have more than a CTA takes at least, but no more than are merged at once.
FASTATTN_HOST_DEVICE int64_t spans_per_cta(const SplitPlan& plan, int64_t total_spans) {
    const int64_t share = (total_spans + plan.num_ctas - 1) / plan.num_ctas;
    const bool merges_at_once =
        total_spans > plan.min_spans_per_cta * plan.num_tiles && total_spans <= kMergedNodes * plan.num_tiles;
    const int64_t least = merges_at_once || total_spans <= plan.num_tiles ? 1 : plan.min_spans_per_cta;
    return share > least ? share : least;
}

// What a CTA takes of one tile at once, from `span` on: the tile's spans [first, first + count), and the keys of these
// that exist.
struct TileShare {
    int32_t tile_idx, first, count;
    int32_t begin_key, end_key;
};

// The tiles of the sequence start at first_span on the line; the CTA's share ends at end_span.
FASTATTN_HOST_DEVICE TileShare tile_share(const SplitPlan& plan, const TileSpans& spans, const CachedSequence& sequence,
                                          int32_t block_keys, int64_t first_span, int64_t span, int64_t end_span) {
    TileShare share;
    share.tile_idx = static_cast<int32_t>((span - first_span) / spans.num_spans);
    share.first = static_cast<int32_t>(span - first_span - int64_t{share.tile_idx} * spans.num_spans);
    const int64_t left_of_tile = spans.num_spans - share.first, left_of_share = end_span - span;
    share.count = static_cast<int32_t>(left_of_tile < left_of_share ? left_of_tile : left_of_share);
    if (plan.spans_are_parts) share.count = 1;
    const int32_t begin = (spans.first_block + share.first * spans.blocks_per_span) * block_keys;
    const int32_t end = (spans.first_block + (share.first + share.count) * spans.blocks_per_span) * block_keys;
    share.begin_key = begin > sequence.first_key ? begin : sequence.first_key;
    share.end_key = end < sequence.total ? end : sequence.total;
    return share;
}

// The tiles of the sequence start at first_span on the line.
FASTATTN_HOST_DEVICE TileParts tile_parts(const SplitPlan& plan, const TileSpans& spans, int64_t first_span,
                                          int32_t tile_idx, int64_t spans_per_cta) {
    const int64_t first = first_span + int64_t{tile_idx} * spans.num_spans;
    if (plan.spans_are_parts) return {spans.num_spans, first, spans_per_cta};
    const int64_t first_cta = first / spans_per_cta, last_cta = (first + spans.num_spans - 1) / spans_per_cta;
    return {static_cast<int32_t>(last_cta - first_cta) + 1, first_cta, 1};
}

// The most blocks of keys that a tile of any length can have.
inline int32_t most_blocks(const SequenceShape& shape, int32_t block_keys) {
    const int32_t all = ceil_div(shape.capacity, block_keys);
    if (shape.window_left < 0) return all;
    // Seen or new keys are the last ones; they touch one block more than they fill where they begin inside of one.
    const int64_t keys = std::max<int64_t>(int64_t{shape.window_left} + shape.num_queries, shape.num_new);
    return static_cast<int32_t>(std::min<int64_t>(all, (keys + block_keys - 2) / block_keys + 1));
}

// Two for each level of a tree of so many parts below its root.
inline int32_t slots_for_parts(int32_t most_parts) {
    int32_t levels = 1;
    while (int64_t{1} << levels < most_parts) ++levels;
    return 2 * levels;
}

inline int64_t num_slots(const SplitPlan& plan) {
    return int64_t{plan.num_ctas} * plan.slots_per_cta;
}

// Counters of the CTAs that bring a node to be merged: kMergeSteps for each CTA.
inline int64_t num_counters(const SplitPlan& plan) {
    return int64_t{plan.num_ctas} * kMergeSteps;
}

// resident_ctas: how many CTAs run on the GPU at a time. num_splits = 0 leaves the choice to the plan.
inline SplitPlan split_plan(const SequenceShape& shape, int32_t batch, int32_t kv_heads, int32_t row_tiles,
                            int32_t block_keys, int64_t num_splits, bool batch_invariant, int32_t resident_ctas) {
    constexpr int32_t kInvariantKeys = 1024;  // 512 KB of 128 + 128 dims; 16 rows written and read are 3 % of that
    constexpr int32_t kMinBlocks = 2;         // both are on their way before the first is used
    const int32_t blocks = std::max(1, most_blocks(shape, block_keys));
    SplitPlan plan{};
    plan.tiles_per_sequence = kv_heads * row_tiles;
    plan.blocks_per_span = 1;
    plan.min_spans_per_cta = 1;
    const int64_t tiles = int64_t{batch} * plan.tiles_per_sequence;
    plan.num_tiles = tiles;
    int64_t num_ctas;
    if (num_splits > 0) {
        plan.splits_per_tile = static_cast<int32_t>(std::min<int64_t>(num_splits, blocks));
        plan.slots_per_cta = 1;
        num_ctas = tiles * plan.splits_per_tile;
    } else if (batch_invariant) {
        plan.spans_are_parts = true;
        plan.blocks_per_span = kInvariantKeys / block_keys;
        const int32_t spans = ceil_div(blocks, plan.blocks_per_span);
        plan.slots_per_cta = slots_for_parts(spans);
        num_ctas = std::min<int64_t>(resident_ctas, tiles * spans);
    } else {
        plan.min_spans_per_cta = kMinBlocks;
        plan.slots_per_cta = 2;
        num_ctas = tiles;
        if (blocks > kMinBlocks) {
            num_ctas = std::max((tiles * blocks + kMinBlocks - 1) / kMinBlocks, tiles * std::min(blocks, kMergedNodes));
        }
        num_ctas = std::min<int64_t>(num_ctas, resident_ctas);
    }
    plan.num_ctas = static_cast<int32_t>(std::min<int64_t>(num_ctas, 0x3fffffff));
    return plan;
}

// Whether a tile can be cut at all: else nothing is left to merge.
inline bool can_be_cut(const SplitPlan& plan, const SequenceShape& shape, int32_t block_keys) {
    const int32_t blocks = most_blocks(shape, block_keys);
    return plan.splits_per_tile > 0 ? plan.splits_per_tile > 1 : blocks > plan.blocks_per_span;
}

}  // namespace fastattn
