// Chooses which keys each CTA of flash-decoding takes. The choice is a pure function of lengths, heads and the size of
// the GPU. CTAs compute it from the lengths in device memory.
//
// A work tile is up to 16 or 32 query rows of one KV head of a sequence. Its keys are cut into splits of whole blocks.
// The splits of all work tiles form a line, ordered by sequence, then tile, then key. CTA c takes splits [c *
// splits_per_cta, (c + 1) * splits_per_cta): the end of one tile, whole tiles, and the beginning of another. So the
// work of CTAs differs by at most a split, however ragged the lengths are, and also if they change between replays of a
// CUDA graph. There are three modes:
//   balanced        a split is a block. Each CTA takes the same number, just enough to cover the line.
//   num_splits      a tile has at most so many splits of equal size, and a CTA takes one.
//   batch_invariant a split is 1024 keys, counted from the first. CTAs take splits as in `balanced`.
//
// A CTA leaves a partial of each tile that it shares with other CTAs. Partials are combined in the order of
// scheduler/partial_tree.h. Usually all splits that a CTA has of a tile make one partial. With batch_invariant each
// split makes its own partial, so that the partials of a sequence, and the tree that combines them, depend only on this
// sequence. The batch, the capacity and the size of the GPU only decide which CTA does which step. A CTA combines its
// own partials as soon as possible, so that only few of them are in memory at any time: see slots_per_cta.
#pragma once

#include <cstdint>

#include "host/decode_params.h"
#include "host/min_max.h"
#include "scheduler/partial_tree.h"

namespace fastattn {

// Returns log2 of how many nodes are combined at once: the number of levels of the tree that one round covers. With 64
// dims (three CTAs fit on an SM) and with 256 dims, registers do not suffice for more than 16 nodes.
FASTATTN_HOST_DEVICE constexpr int log2_combined_nodes(int head_dim) {
    return head_dim == 128 ? 5 : 4;
}

// A sequence's number of tokens before and after the append, and the first key that a query sees or that the append
// writes.
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
    sequence.first_key = first < 0 ? 0 : static_cast<int32_t>(first);
    // New tokens are written even if no query sees them.
    if (shape.num_new > 0 && sequence.before < sequence.first_key) sequence.first_key = sequence.before;
    return sequence;
}

// The splits of one tile: split i is blocks [first_block + i * blocks_per_split, …); the last one may be shorter.
struct TileSplits {
    int32_t first_block, blocks_per_split, num_splits;
};

FASTATTN_HOST_DEVICE TileSplits tile_splits(const SplitSchedule& schedule, const CachedSequence& sequence,
                                            int32_t block_keys) {
    TileSplits splits;
    splits.first_block = sequence.first_key / block_keys;
    const int32_t num_blocks = ceil_div(sequence.total, block_keys) - splits.first_block;
    splits.blocks_per_split = schedule.blocks_per_split;
    splits.num_splits = schedule.by_blocks_per_split.quotient(num_blocks + schedule.blocks_per_split - 1);
    if (schedule.splits_per_tile > 0 && num_blocks > 0) {
        splits.blocks_per_split = ceil_div(num_blocks, schedule.splits_per_tile);
        splits.num_splits = ceil_div(num_blocks, splits.blocks_per_split);
    }
    if (splits.num_splits < 1) splits.num_splits = 1;  // some CTA has to write the result of a tile without keys
    return splits;
}

// Returns how many splits each CTA takes. One split instead of two halves the steps of a CTA and doubles the partials.
// That pays if each tile has one split, because nothing is combined then. It also pays if tiles have, on average, more
// than min_splits_per_cta splits, but no more than one trip combines.
FASTATTN_HOST_DEVICE int64_t choose_splits_per_cta(const SplitSchedule& schedule, int64_t total_splits) {
    const bool takes_one_trip = total_splits > schedule.min_splits_per_cta * schedule.num_tiles &&
                                total_splits <= kNodesOfOneTrip * schedule.num_tiles;
    const int64_t least = takes_one_trip || total_splits <= schedule.num_tiles ? 1 : schedule.min_splits_per_cta;
    if (total_splits <= least * schedule.num_ctas) return least;  // as usual, without a 64-bit division
    return (total_splits + schedule.num_ctas - 1) / schedule.num_ctas;
}

// The adjacent splits [first, first + count) of one tile that a CTA processes in one loop, and the keys [begin_key,
// end_key) of these splits. They make one partial.
struct SplitRun {
    int32_t tile_idx, first, count;
    int32_t begin_key, end_key;
};

// Returns the run that begins with `split`. The sequence's tiles begin at first_split on the line. The CTA's splits end
// at end_split.
FASTATTN_HOST_DEVICE SplitRun split_run(const SplitSchedule& schedule, const TileSplits& splits,
                                        const CachedSequence& sequence, int32_t block_keys, int64_t first_split,
                                        int64_t split, int64_t end_split) {
    SplitRun run;
    run.tile_idx = static_cast<int32_t>((split - first_split) / splits.num_splits);
    run.first = static_cast<int32_t>(split - first_split - int64_t{run.tile_idx} * splits.num_splits);
    const int64_t left_of_tile = splits.num_splits - run.first, left_of_cta = end_split - split;
    run.count = static_cast<int32_t>(left_of_tile < left_of_cta ? left_of_tile : left_of_cta);
    if (schedule.splits_are_partials) run.count = 1;
    const int32_t begin = (splits.first_block + run.first * splits.blocks_per_split) * block_keys;
    const int32_t end = (splits.first_block + (run.first + run.count) * splits.blocks_per_split) * block_keys;
    run.begin_key = begin > sequence.first_key ? begin : sequence.first_key;
    run.end_key = end < sequence.total ? end : sequence.total;
    return run;
}

// Returns the partials of a tile. The sequence's tiles begin at first_split on the line.
FASTATTN_HOST_DEVICE TilePartials tile_partials(const SplitSchedule& schedule, const TileSplits& splits,
                                                int64_t first_split, int32_t tile_idx, int64_t splits_per_cta) {
    const int64_t first = first_split + int64_t{tile_idx} * splits.num_splits;
    if (schedule.splits_are_partials) return {splits.num_splits, first, splits_per_cta};
    const int64_t first_cta = first / splits_per_cta, last_cta = (first + splits.num_splits - 1) / splits_per_cta;
    return {static_cast<int32_t>(last_cta - first_cta) + 1, first_cta, 1};
}

// Returns the largest number of blocks of keys that a tile can have, whatever the lengths are.
inline int32_t most_blocks(const SequenceShape& shape, int32_t block_keys) {
    const int32_t all = ceil_div(shape.capacity, block_keys);
    // Keys that are seen or new are the last keys of a sequence. If they begin inside a block, they touch one block
    // more than they fill.
    const int64_t keys = std::max<int64_t>(int64_t{shape.window_left} + shape.num_queries, shape.num_new);
    return static_cast<int32_t>(std::min<int64_t>(all, (keys + block_keys - 2) / block_keys + 1));
}

// Returns the number of slots that a CTA needs for a tree of most_partials partials: two for each level below the root.
inline int32_t slots_for_partials(int32_t most_partials) {
    int32_t levels = 1;
    while (int64_t{1} << levels < most_partials) ++levels;
    return 2 * levels;
}

inline int64_t num_workspace_slots(const SplitSchedule& schedule) {
    return int64_t{schedule.num_ctas} * schedule.slots_per_cta;
}

// Returns how many arrival counters there are: kCombineRounds for each CTA.
inline int64_t num_counters(const SplitSchedule& schedule) {
    return int64_t{schedule.num_ctas} * kCombineRounds;
}

// Returns the schedule of a call. resident_ctas: how many CTAs run on the GPU at a time. num_splits = 0: as many splits
// as balance the work.
inline SplitSchedule split_schedule(const SequenceShape& shape, int32_t batch, int32_t kv_heads, int32_t row_tiles,
                                    int32_t block_keys, int64_t num_splits, bool batch_invariant,
                                    int32_t resident_ctas) {
    constexpr int32_t kInvariantKeys = 1024;  // 512 KB of K and V with 128 dims; a partial of 16 rows adds 3 %
    constexpr int32_t kMinBlocks = 2;         // both are in flight before the first is used
    const int32_t blocks = std::max(1, most_blocks(shape, block_keys));
    SplitSchedule schedule{};
    schedule.tiles_per_sequence = kv_heads * row_tiles;
    schedule.blocks_per_split = 1;
    schedule.min_splits_per_cta = 1;
    const int64_t tiles = int64_t{batch} * schedule.tiles_per_sequence;
    schedule.num_tiles = tiles;
    int64_t num_ctas;
    if (num_splits > 0) {
        schedule.splits_per_tile = static_cast<int32_t>(std::min<int64_t>(num_splits, blocks));
        schedule.slots_per_cta = 1;
        num_ctas = tiles * schedule.splits_per_tile;
    } else if (batch_invariant) {
        schedule.splits_are_partials = true;
        schedule.blocks_per_split = kInvariantKeys / block_keys;
        const int32_t splits = ceil_div(blocks, schedule.blocks_per_split);
        schedule.slots_per_cta = slots_for_partials(splits);
        num_ctas = std::min<int64_t>(resident_ctas, tiles * splits);
    } else {
        schedule.min_splits_per_cta = kMinBlocks;
        schedule.slots_per_cta = 2;
        num_ctas = tiles;
        if (blocks > kMinBlocks) {
            num_ctas = std::max(ceil_div(tiles * blocks, kMinBlocks), tiles * std::min(blocks, kNodesOfOneTrip));
        }
        num_ctas = std::min<int64_t>(num_ctas, resident_ctas);
    }
    schedule.num_ctas = static_cast<int32_t>(std::min<int64_t>(num_ctas, 0x3fffffff));
    schedule.by_blocks_per_split = Divisor::of(schedule.blocks_per_split);
    return schedule;
}

// Returns whether a tile can have several splits. If none can, nothing is combined.
inline bool can_be_split(const SplitSchedule& schedule, const SequenceShape& shape, int32_t block_keys) {
    const int32_t blocks = most_blocks(shape, block_keys);
    return schedule.splits_per_tile > 0 ? schedule.splits_per_tile > 1 : blocks > schedule.blocks_per_split;
}

}  // namespace fastattn
