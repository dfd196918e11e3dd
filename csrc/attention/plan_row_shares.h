// Where CTAs share tiles of keys in the backward pass (row_shares.h): which cut lets the last CTA of a GPU be done first, by
// a simulation of how they claim tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "attention/row_shares.h"
#include "attention/tile_order.h"
#include "device/sequence.cuh"
#include "host/device_facts.h"
#include "host/params.h"

namespace fastattn {

// The numbers of deterministic gradients may not depend on the GPU: tiles are cut as for an H200.
inline constexpr int32_t kSmsOfDeterministicShares = 132;

// What a CTA does beside a tile's steps, in steps: it brings K and V, and stores dK and dV. Where a tile is shared, it adds
// them to sums. Predictions, from bytes and the bandwidth of an SM of an H100: not measured.
inline constexpr double kStepsPerTile = 0.75, kStepsPerShare = 1.5;

// Of the time with whole tiles: what sums cost that are zeroed before and read afterwards.
inline constexpr double kLeastGain = 0.05;

// The calls that get the same answer.
struct RowSharesCase {
    int32_t query_rows, key_rows, group, heads, heads_per_group, window_left, window_right, query_offset, block_m,
        block_n, num_sms, is_deterministic;

    bool operator==(const RowSharesCase&) const = default;

    bool is_masked() const { return window_left >= 0 || window_right >= 0; }

    // Whether tiles are cut in so many. CTAs whose turns come one after the other must not stand at the same rows at a time:
    // under a mask, where tiles differ in length, only those that have whole query heads do not.
    bool can_cut_in(int64_t parts) const { return group % parts == 0 || is_deterministic == 0 || !is_masked(); }

    RowShares cut_in(uint32_t first_tile, int64_t parts) const {
        const int64_t of_heads = group % parts == 0 ? parts : parts % group == 0 ? group : 1;
        return {first_tile, static_cast<int32_t>(of_heads), static_cast<int32_t>(parts / of_heads)};
    }
};

// When the last CTA is done, in steps, where all begin with the first tile that is cut. row_tiles: of the tile at each
// position.
inline double steps_until_done(const RowSharesCase& of, const std::vector<int32_t>& row_tiles,
                               const RowShares& shares) {
    std::priority_queue<double, std::vector<double>, std::greater<>> done(
        std::greater<>(), std::vector<double>(static_cast<size_t>(of.num_sms), 0.0));
    const auto positions = static_cast<uint32_t>(row_tiles.size());
    double last = 0.0;
    for (uint32_t tile = shares.first_tile; tile < positions * of.heads; ++tile) {
        const int32_t seen_by = row_tiles[head_tile(tile, 1, of.heads, of.heads_per_group, positions).position];
        const RowParts parts(shares, tile, of.group, seen_by);
        for (int32_t share = 0; share < parts.num(); ++share) {
            const int32_t part = share % parts.of_rows;
            const int32_t rows =
                begin_of_part(seen_by, part + 1, parts.of_rows) - begin_of_part(seen_by, part, parts.of_rows);
            const double begin = done.top();
            done.pop();
            const double beside = parts.num() > 1 ? kStepsPerShare : kStepsPerTile;
            done.push(begin + of.group / parts.of_heads * rows + beside);
            last = std::max(last, begin + of.group / parts.of_heads * rows + beside);
        }
    }
    return last;
}

inline RowShares find_row_shares(const RowSharesCase& of, const Window& window) {
    const int64_t positions = ceil_div(of.key_rows, of.block_n), num_tiles = positions * of.heads;
    const RowShares whole{0, 1, 1};
    // Under a mask, tiles from 4 rounds on leave few CTAs idle: short ones come last.
    if (num_tiles == 0 || (of.is_masked() && num_tiles >= 4 * int64_t{of.num_sms})) return whole;
    std::vector<int32_t> row_tiles(static_cast<size_t>(positions));
    for (int64_t i = 0; i < positions; ++i) {
        const auto first_key = static_cast<int32_t>(i * of.block_n);
        const auto last_key = static_cast<int32_t>(std::min<int64_t>(int64_t{first_key} + of.block_n, of.key_rows) - 1);
        const int32_t begin = window.rows_of(first_key, of.query_rows).begin / of.block_m;
        const int32_t end = ceil_div(window.rows_of(last_key, of.query_rows).end, of.block_m);
        row_tiles[static_cast<size_t>(i)] = std::max(end - begin, 0);
    }
    // Unmasked, all CTAs take the rounds before the last two in the same time.
    const int64_t full_rounds = of.is_masked() ? 0 : std::max<int64_t>(num_tiles / of.num_sms - 1, 0);
    const auto first_tile = static_cast<uint32_t>(full_rounds * of.num_sms);
    const int64_t num_cut = num_tiles - first_tile;
    RowShares best = whole;
    double least = (1 - kLeastGain) * steps_until_done(of, row_tiles, of.cut_in(first_tile, 1));
    const int64_t most_rounds = of.is_deterministic != 0 ? 8 : 4;
    const int64_t longest = int64_t{*std::max_element(row_tiles.begin(), row_tiles.end())} * of.group;
    const int64_t most_parts = std::min(most_rounds * of.num_sms / num_cut + 1, longest / kLeastStepsOfShare);
    for (int64_t parts = 2; parts <= most_parts; ++parts) {
        if (!of.can_cut_in(parts)) continue;
        const RowShares shares = of.cut_in(first_tile, parts);
        const double until = steps_until_done(of, row_tiles, shares);
        if (until < least) best = shares, least = until;
    }
    return best;
}

// Of packed sequences the host knows no lengths: all tiles are cut, into about twelve parts for each SM, or none. There are
// between `fewest` tiles and one more for each sequence and head.
inline RowShares row_shares_of_packed(const RowSharesCase& of, int32_t total_keys, int32_t key_heads) {
    constexpr int64_t kPartsPerSm = 12, kMostParts = 12, kMostTilesPerSm = 6;
    const int64_t fewest = int64_t{total_keys / of.block_n} * key_heads;
    if (fewest + of.heads >= kMostTilesPerSm * of.num_sms) return {0, 1, 1};
    const int64_t likely = std::max<int64_t>(1, fewest + of.heads / 2);
    const int64_t longest = int64_t{ceil_div(of.query_rows, of.block_m)} * of.group;
    int64_t parts = std::min({(kPartsPerSm * of.num_sms + likely - 1) / likely, kMostParts,
                              std::max<int64_t>(1, longest / kLeastStepsOfShare)});
    while (!of.can_cut_in(parts)) --parts;
    return of.cut_in(0, parts);
}

// All tiles are whole where these fill the GPU well; else those of the last rounds are cut. Reads params.heads_per_group.
inline RowShares row_shares(const AttentionBackwardParams& params, int32_t block_m, int32_t block_n, int32_t num_sms,
                            bool is_deterministic) {
    const ScoreParams& scores = params.scores;
    const RowSharesCase of{params.query.rows,
                           params.key.rows,
                           params.query.heads / params.key.heads,
                           params.key.batch * params.key.heads,
                           params.heads_per_group,
                           scores.window_left,
                           scores.window_right,
                           scores.query_offset,
                           block_m,
                           block_n,
                           is_deterministic ? kSmsOfDeterministicShares : num_sms,
                           is_deterministic};
    if (params.packed.cu_seqlens_k != nullptr) return row_shares_of_packed(of, params.packed.total_k, params.key.heads);
    // Models ask the same for one layer after the other, and an answer may take as long as a launch.
    constexpr size_t kRemembered = 8;
    struct Answer {
        RowSharesCase of;
        RowShares shares;
    };
    thread_local std::array<Answer, kRemembered> answers{};
    thread_local size_t oldest = 0;
    for (const Answer& known : answers) {
        if (known.of == of) return known.shares;
    }
    Answer& answer = answers[oldest++ % kRemembered];
    answer = {of, find_row_shares(of, window_of(scores, of.query_rows, of.key_rows))};
    return answer.shares;
}

// How CTAs of the kernels for Hopper claim tiles, and share them.
inline void plan_claims(AttentionBackwardParams& params, int32_t block_m, int32_t block_n, const DeviceFacts& facts,
                        bool is_deterministic) {
    params.heads_per_group = std::max(1, claimed_key_heads_per_group(params.query, params.key, facts.l2_bytes, block_n,
                                                                     facts.num_sms, is_deterministic));
    params.shares = row_shares(params, block_m, block_n, facts.num_sms, is_deterministic);
}

}  // namespace fastattn
