// Chooses the row splits of the backward pass (row_splits.h) with which the last CTA finishes earliest, by simulating
// how CTAs claim tiles of keys.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "device/sequence.cuh"
#include "host/device_facts.h"
#include "host/last_answers.h"
#include "host/params.h"
#include "scheduler/row_splits.h"
#include "scheduler/work_tile.h"

namespace fastattn {

// The bits of deterministic gradients must not depend on the GPU, so their tiles are claimed and split as on an H100.
// (The order of claims matters too, because RowSplits::first_tile is a number in this order.)
inline constexpr int32_t kSmsOfDeterministicSplits = 132;
inline constexpr int64_t kL2BytesOfDeterministicSplits = 50 << 20;

// The cost of a work tile in addition to its steps, in steps. A CTA loads K and V, and stores dK and dV. For a split
// tile it adds dK and dV to sums instead, which takes twice the bytes.
inline constexpr double kStepsPerTile = 0.75, kStepsPerSplit = 1.5;

// The fraction of the time that splitting must save, because the sums are zeroed before the kernel and read after it.
inline constexpr double kLeastGain = 0.05;

// Everything that the splits depend on: equal problems have equal splits.
struct RowSplitProblem {
    int32_t query_rows, key_rows, group, heads, heads_per_group, window_left, window_right, query_offset, block_m,
        block_n, num_sms, is_masked, is_deterministic;

    bool operator==(const RowSplitProblem&) const = default;

    // Returns whether a tile may have num_splits splits. With deterministic gradients, CTAs add dQ in a fixed order,
    // and should not reach the same query rows at the same time. Under a mask, tiles differ in length, and only splits
    // by whole query heads avoid such collisions.
    bool can_split_into(int64_t num_splits) const {
        return group % num_splits == 0 || is_deterministic == 0 || is_masked == 0;
    }

    RowSplits split_into(uint32_t first_tile, int64_t num_splits) const {
        const int64_t over_heads = group % num_splits == 0 ? num_splits : num_splits % group == 0 ? group : 1;
        return {first_tile, static_cast<int32_t>(over_heads), static_cast<int32_t>(num_splits / over_heads)};
    }
};

// Returns after how many steps the last CTA is done, if all CTAs begin with the first split tile. row_tiles[i]: how
// many tiles of rows see tile i of keys.
inline double steps_until_done(const RowSplitProblem& problem, const std::vector<int32_t>& row_tiles,
                               const RowSplits& row_splits) {
    std::priority_queue<double, std::vector<double>, std::greater<>> done(
        std::greater<>(), std::vector<double>(static_cast<size_t>(problem.num_sms), 0.0));
    const auto positions = static_cast<uint32_t>(row_tiles.size());
    double last = 0.0;
    for (uint32_t tile = row_splits.first_tile; tile < positions * problem.heads; ++tile) {
        const int32_t seen_by =
            row_tiles[work_tile(tile, 1, problem.heads, problem.heads_per_group, positions).position];
        const TileRowSplits tile_splits(row_splits, tile, problem.group, seen_by);
        for (int32_t split = 0; split < tile_splits.num(); ++split) {
            const int32_t row_split = split % tile_splits.over_rows;
            const int32_t rows = begin_of_even_split(seen_by, row_split + 1, tile_splits.over_rows) -
                                 begin_of_even_split(seen_by, row_split, tile_splits.over_rows);
            const double begin = done.top();
            done.pop();
            const double extra_steps = tile_splits.num() > 1 ? kStepsPerSplit : kStepsPerTile;
            done.push(begin + problem.group / tile_splits.over_heads * rows + extra_steps);
            last = std::max(last, begin + problem.group / tile_splits.over_heads * rows + extra_steps);
        }
    }
    return last;
}

inline RowSplits search_row_splits(const RowSplitProblem& problem, const Window& window) {
    const int64_t positions = ceil_div(problem.key_rows, problem.block_n), num_tiles = positions * problem.heads;
    const RowSplits whole{0, 1, 1};
    // Under a mask, four waves of tiles leave few CTAs idle, because short tiles come last.
    if (num_tiles == 0 || (problem.is_masked != 0 && num_tiles >= 4 * int64_t{problem.num_sms})) return whole;
    std::vector<int32_t> row_tiles(static_cast<size_t>(positions));
    for (int64_t i = 0; i < positions; ++i) {
        const auto first_key = static_cast<int32_t>(i * problem.block_n);
        const auto last_key =
            static_cast<int32_t>(std::min<int64_t>(int64_t{first_key} + problem.block_n, problem.key_rows) - 1);
        const int32_t begin = window.rows_of(first_key, problem.query_rows).begin / problem.block_m;
        const int32_t end = ceil_div(window.rows_of(last_key, problem.query_rows).end, problem.block_m);
        row_tiles[static_cast<size_t>(i)] = std::max(end - begin, 0);
    }
    // Without a mask, every CTA needs the same time for all waves but the last two.
    const int64_t full_waves = problem.is_masked != 0 ? 0 : std::max<int64_t>(num_tiles / problem.num_sms - 1, 0);
    const auto first_tile = static_cast<uint32_t>(full_waves * problem.num_sms);
    const int64_t num_tiles_to_split = num_tiles - first_tile;
    RowSplits best = whole;
    double least = (1 - kLeastGain) * steps_until_done(problem, row_tiles, problem.split_into(first_tile, 1));
    const int64_t most_waves = problem.is_deterministic != 0 ? 8 : 4;
    const int64_t longest = int64_t{*std::max_element(row_tiles.begin(), row_tiles.end())} * problem.group;
    const int64_t most_splits =
        std::min(most_waves * problem.num_sms / num_tiles_to_split + 1, longest / kMinStepsOfSplit);
    for (int64_t num_splits = 2; num_splits <= most_splits; ++num_splits) {
        if (!problem.can_split_into(num_splits)) continue;
        const RowSplits candidate = problem.split_into(first_tile, num_splits);
        const double until = steps_until_done(problem, row_tiles, candidate);
        if (until < least) best = candidate, least = until;
    }
    return best;
}

// Returns the splits for packed sequences, whose lengths the host does not know. Splits either no tile or all tiles. If
// tiles are split, there are about twelve splits for each SM. There are at least `fewest` tiles, and at most one more
// for each sequence and head.
inline RowSplits packed_row_splits(const RowSplitProblem& problem, int32_t total_keys, int32_t key_heads) {
    constexpr int64_t kSplitsPerSm = 12, kMostSplits = 12, kMostTilesPerSm = 6;
    const int64_t fewest = int64_t{total_keys / problem.block_n} * key_heads;
    if (fewest + problem.heads >= kMostTilesPerSm * problem.num_sms) return {0, 1, 1};
    const int64_t likely = std::max<int64_t>(1, fewest + problem.heads / 2);
    const int64_t longest = int64_t{ceil_div(problem.query_rows, problem.block_m)} * problem.group;
    int64_t num_splits = std::min({ceil_div(kSplitsPerSm * problem.num_sms, likely), kMostSplits,
                                   std::max<int64_t>(1, longest / kMinStepsOfSplit)});
    while (!problem.can_split_into(num_splits)) --num_splits;
    return problem.split_into(0, num_splits);
}

// Splits no tile if whole tiles fill the GPU well. Otherwise splits the tiles of the last waves. Reads
// params.heads_per_group.
inline RowSplits choose_row_splits(const AttentionBackwardParams& params, int32_t block_m, int32_t block_n,
                                   int32_t num_sms, bool is_deterministic) {
    const ScoreParams& scores = params.scores;
    const RowSplitProblem problem{params.query.rows,
                                  params.key.rows,
                                  params.query.heads / params.key.heads,
                                  params.key.batch * params.key.heads,
                                  params.heads_per_group,
                                  scores.window_left,
                                  scores.window_right,
                                  scores.query_offset,
                                  block_m,
                                  block_n,
                                  num_sms,
                                  scores.has_window(),
                                  is_deterministic};
    if (params.packed.cu_seqlens_k != nullptr)
        return packed_row_splits(problem, params.packed.total_k, params.key.heads);
    // Keeps the last answers: every layer of a model has the same problem, and the search may take as long as a launch.
    thread_local LastAnswers<RowSplitProblem, RowSplits, 8> answers;
    return answers.find_or(
        problem, [&] { return search_row_splits(problem, window_of(scores, problem.query_rows, problem.key_rows)); });
}

// Sets the order in which the CTAs of Hopper's kernels claim tiles of keys, and how these tiles are split.
inline void schedule_key_tiles(AttentionBackwardParams& params, int32_t block_m, int32_t block_n,
                               const DeviceFacts& facts, bool is_deterministic) {
    const int64_t l2_bytes = is_deterministic ? kL2BytesOfDeterministicSplits : facts.l2_bytes;
    const int32_t num_sms = is_deterministic ? kSmsOfDeterministicSplits : facts.num_sms;
    params.heads_per_group = std::max(
        1, claimed_key_heads_per_group(params.query, params.key, l2_bytes, block_n, num_sms, is_deterministic));
    // With ranges of keys, no tile is split, because the position of a tile does not tell how much work it is.
    params.row_splits = params.scores.ranges.data != nullptr
                            ? RowSplits{0, 1, 1}
                            : choose_row_splits(params, block_m, block_n, num_sms, is_deterministic);
}

}  // namespace fastattn
