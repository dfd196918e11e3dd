// The work tiles of the backward kernels for Hopper: the keys of a work tile, the query rows that see these keys, and
// the order of work tiles. claim() in backward_producer_sm90.cuh claims work tiles in this order.
#pragma once

#include <cstdint>

#include "attention/query_sums.h"
#include "attention/seen_tiles.cuh"
#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/transposed_scores.cuh"
#include "host/params.h"
#include "scheduler/row_splits.h"
#include "scheduler/work_tile.h"

namespace fastattn {

// A tile of keys of one KV head, and the query rows that see any of these keys: all of them or, if the key tile is
// split (scheduler/row_splits.h), those of one split.
template <typename Config>
struct KeyWorkTile {
    int32_t batch, head;          // of K and V
    int32_t first_key, num_keys;  // the tile's first key in the sequence, and the sequence's length
    int32_t sequence_begin;       // in K and V
    Sequence rows;
    Window window;
    int32_t begin_tile, end_tile;  // this range contains the row tiles that see the keys
    int32_t first_sums_tile;       // the sequence's first tile in dQ's sums
    int32_t split, num_splits;
    uint32_t split_tile;                // the split key tile's index in the sums of dK and dV
    int32_t begin_head, num_heads;      // query heads of this split
    int32_t begin_row_tile, num_steps;  // the row tile of the split's first step, and the number of steps
    bool has_ranges;                    // of keys: then row_tiles says which steps there are, not begin_row_tile
    RowTilesOfKeys row_tiles;
    // [i]: the row tiles in which some row sees a key of consumer i. Set only with kSkipsHidden.
    int32_t begin_seen[Config::kKeyOwners], end_seen[Config::kKeyOwners];
    // [i]: the row tiles whose rows all see every key of consumer i. The last entry is for all keys of the tile. With
    // ranges of keys, which may hide keys in any row tile, end_full is 0.
    int32_t begin_full[Config::kKeyOwners + 1], end_full[Config::kKeyOwners + 1];

    // Fills in the work tile. Returns false if the keys do not exist, or if the key tile has no split row_split.idx.
    FASTATTN_DEVICE bool find(const AttentionBackwardParams& params, const RowSplit& row_split, const WorkTile& found) {
        constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kConsumerKeys = Config::kConsumerKeys;
        const bool is_packed = params.packed.cu_seqlens_q != nullptr;
        const Sequence keys =
            sequence_of(params.packed.cu_seqlens_k, found.batch, params.packed.total_k, params.key.rows);
        batch = found.batch, head = found.head;
        first_key = found.position * kBlockN, num_keys = keys.length;
        if (first_key >= num_keys) return false;
        sequence_begin = keys.begin;
        rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        window = window_of(params.scores, rows.length, num_keys);
        const RowRange sees_first = window.rows_of(first_key, rows.length);
        const RowRange sees_last = window.rows_of(min(first_key + kBlockN, num_keys) - 1, rows.length);
        begin_tile = sees_first.begin / kBlockM;
        end_tile = max(ceil_div(sees_last.end, kBlockM), begin_tile);
        has_ranges = Config::kOptions && params.scores.ranges.data != nullptr;
        if (has_ranges) {
            begin_tile = 0, end_tile = ceil_div(rows.length, kBlockM);
            row_tiles = RowTilesOfKeys::of(params.seen_tiles, batch, rows.begin, found.position);
        }

        const int32_t num_row_tiles = end_tile - begin_tile, group_size = params.query.heads / params.key.heads;
        const TileRowSplits splits(params.row_splits, row_split.tile, group_size, num_row_tiles);
        split = row_split.idx, num_splits = splits.num();
        if (split >= num_splits) return false;
        split_tile = row_split.tile - params.row_splits.first_tile;
        const int32_t rows_before = begin_of_even_split(num_row_tiles, split % splits.over_rows, splits.over_rows);
        num_heads = group_size / splits.over_heads;
        begin_head = head * group_size + split / splits.over_rows * num_heads;
        begin_row_tile = end_tile - 1 - rows_before;
        num_steps = (begin_of_even_split(num_row_tiles, split % splits.over_rows + 1, splits.over_rows) - rows_before) *
                    num_heads;
#pragma unroll 1
        for (int i = 0; i <= Config::kKeyOwners; ++i) {
            const bool is_tile = i == Config::kKeyOwners;
            const int32_t begin_key = first_key + (is_tile ? 0 : i * kConsumerKeys);
            const int32_t end_key = begin_key + (is_tile ? kBlockN : kConsumerKeys);
            const RowRange sees_begin = window.rows_of(begin_key, rows.length);
            const RowRange sees_end = window.rows_of(end_key - 1, rows.length);
            begin_full[i] = ceil_div(sees_end.begin, kBlockM);
            end_full[i] = has_ranges || end_key > num_keys ? 0
                          : sees_begin.end == rows.length  ? end_tile
                                                           : sees_begin.end / kBlockM;
            if (!Config::kSkipsHidden || is_tile) continue;
            begin_seen[i] = begin_key < num_keys ? sees_begin.begin / kBlockM : end_tile;
            end_seen[i] = ceil_div(sees_end.end, kBlockM);
        }
        first_sums_tile = first_query_tile(batch, params.query.rows, is_packed, rows.begin, kBlockM);
        return true;
    }

    FASTATTN_DEVICE bool is_split() const { return num_splits > 1; }

    // Returns whether some row of a row tile may see a key of the consumer. Only with kSkipsHidden, like seen_steps().
    FASTATTN_DEVICE bool sees(int32_t row_tile, int consumer) const {
        return has_ranges || (begin_seen[consumer] <= row_tile && row_tile < end_seen[consumer]);
    }

    // How many steps come before the steps in which some row sees a key of the consumer, how many these steps are, and
    // how many come after.
    struct SeenSteps {
        int32_t before, seen, after;
    };

    FASTATTN_DEVICE SeenSteps seen_steps(int consumer) const {
        if (has_ranges) return {0, num_steps, 0};
        const int32_t num_row_tiles = num_steps / num_heads, last_row_tile = begin_row_tile + 1 - num_row_tiles;
        const int32_t before = min(max(begin_row_tile + 1 - end_seen[consumer], 0), num_row_tiles);
        const int32_t seen = max(begin_row_tile + 1 - before - max(begin_seen[consumer], last_row_tile), 0);
        return {before * num_heads, seen * num_heads, (num_row_tiles - before - seen) * num_heads};
    }

    FASTATTN_DEVICE bool are_all_full() const {
        return warp_uniform(begin_full[Config::kKeyOwners] <= begin_tile && end_full[Config::kKeyOwners] >= end_tile) !=
               0;
    }

    // Returns a bit mask. Bit i says that every row of the row tile sees every key of consumer i.
    FASTATTN_DEVICE uint32_t full_for(int32_t row_tile) const {
        uint32_t full = 0;
        for (int i = 0; i < Config::kKeyOwners && has_all_rows(row_tile); ++i) {
            full |= (begin_full[i] <= row_tile && row_tile < end_full[i] ? 1u : 0u) << i;
        }
        return full;
    }

    // Finds which rows of a row tile see this lane's two keys through the window. warp_key: the first of the warp's 16
    // keys, to which the two belong.
    FASTATTN_DEVICE SeenRows seen_rows(int32_t warp_key, int32_t row_tile, int lane) const {
        RowRange seen_by[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t key = warp_key + accumulator_row(lane) + 8 * half;
            seen_by[half] = key < num_keys ? window.rows_of(key, rows.length) : RowRange{0, 0};
        }
        return SeenRows::of<Config::kTilesM>(seen_by, row_tile * Config::kBlockM, lane);
    }

    // Calls function(head, row_tile, ranges_hide_none) for each step, in the order in which consumers compute steps.
    // Without ranges of keys, the order is from the last row tile to the first, and for each row tile through all query
    // heads. CTAs of adjacent keys then work on the same rows under a causal mask. With ranges, the order is one head
    // after another, and for each head from the first row tile to the last. ranges_hide_none: there are ranges, they
    // hide no key of the tile, and all rows exist. Called by all lanes of a warp.
    template <typename Function>
    FASTATTN_DEVICE void for_steps(Function&& function) const {
        int32_t query_head = begin_head, row_tile = has_ranges ? begin_tile : begin_row_tile;
        for (int32_t left = num_steps; left > 0; --left) {
            bool ranges_hide_none = false;
            if (Config::kOptions && has_ranges) {
                ranges_hide_none = row_tiles.find(query_head, row_tile, begin_tile, end_tile, begin_head + num_heads) &&
                                   has_all_rows(row_tile);
            }
            function(query_head, row_tile, ranges_hide_none);
            if (Config::kOptions && has_ranges) {
                ++row_tile;
            } else if (++query_head == begin_head + num_heads) {
                query_head = begin_head;
                --row_tile;
            }
        }
    }

    // Sets the number of steps, and the range of row tiles, from the ranges of keys. find() cannot do this, because
    // only one lane calls find(). Called by all lanes of a warp.
    FASTATTN_DEVICE void find_through_ranges(int lane) {
        const auto visited = row_tiles.visited(begin_head, begin_head + num_heads, end_tile);
        __syncwarp();  // waits until every lane has read the work tile
        if (lane == 0) num_steps = visited.count, begin_tile = visited.begin, end_tile = visited.end;
    }

    // Returns how many key tiles before this one add to dQ of a row tile.
    FASTATTN_DEVICE int32_t num_before(int32_t head, int32_t row_tile) const {
        if (Config::kOptions && has_ranges) return row_tiles.num_before(head, row_tile);
        return first_key / Config::kBlockN - window.keys_of(row_tile * Config::kBlockM).begin / Config::kBlockN;
    }

  private:
    // Returns whether all rows of a row tile exist. With options, other row tiles never count as full, because the bias
    // of rows that do not exist may be NaN or infinity.
    FASTATTN_DEVICE bool has_all_rows(int32_t row_tile) const {
        return (row_tile + 1) * Config::kBlockM <= rows.length;
    }
};

// The order in which key tiles are claimed. With packed sequences, key tiles are numbered sequence by sequence, so that
// only tiles that exist are claimed. All lanes of a warp call the functions together.
struct KeyTileOrder {
    uint32_t upto = 0;  // number of tiles of all sequences up to this lane's last one

    FASTATTN_DEVICE static uint32_t num_tiles(const AttentionBackwardParams& params, int32_t batch, int32_t block_n) {
        const Sequence keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        return ceil_div(keys.length, block_n) * params.key.heads;
    }

    FASTATTN_DEVICE static int32_t sequences_per_lane(const AttentionBackwardParams& params) {
        return ceil_div(params.key.batch, kWarpSize);
    }

    FASTATTN_DEVICE KeyTileOrder(const AttentionBackwardParams& params, int32_t block_n, int lane) {
        if (params.packed.cu_seqlens_k == nullptr) return;
        const int32_t per_lane = sequences_per_lane(params);
        const int32_t end = min((lane + 1) * per_lane, params.key.batch);
        constexpr uint32_t kMost = 0x7fffffff;  // sequences that overlap may have more tiles in all
        for (int32_t batch = lane * per_lane; batch < end; ++batch) {
            upto = min(upto + num_tiles(params, batch, block_n), kMost);
        }
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffff, upto, distance);
            if (lane >= distance) upto = min(upto + before, kMost);
        }
    }

    // Finds key tile number `tile`. Returns false past the last one. Also returns false for tiles beyond the workspace,
    // of which sequences that overlap may have some.
    FASTATTN_DEVICE bool find(WorkTile& found, const AttentionBackwardParams& params, uint32_t tile,
                              int32_t block_n) const {
        const HeadsView<const uint16_t>& key = params.key;
        if (tile >= num_key_tiles(params, block_n)) return false;
        if (params.packed.cu_seqlens_k == nullptr) {
            found = work_tile(tile, key.batch, key.heads, params.heads_per_group, ceil_div(key.rows, block_n));
            return true;
        }
        const int lanes_before = __popc(__ballot_sync(0xffffffff, upto <= tile));
        const uint32_t before = __shfl_sync(0xffffffff, upto, max(lanes_before - 1, 0));
        if (lanes_before == kWarpSize) return false;
        uint32_t in_sequence = tile - (lanes_before == 0 ? 0 : before);
        int32_t batch = lanes_before * sequences_per_lane(params);
        uint32_t sequence_tiles;
        for (; in_sequence >= (sequence_tiles = num_tiles(params, batch, block_n)); ++batch)
            in_sequence -= sequence_tiles;
        found =
            work_tile(in_sequence, 1, key.heads, min(params.heads_per_group, key.heads), sequence_tiles / key.heads);
        found.batch = batch;
        return true;
    }
};

}  // namespace fastattn
