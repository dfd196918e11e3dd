// Chooses the tile and the schedule (stream_k.h) of an int8 matmul, with a formula that predicts how long each choice
// takes. The tile depends on the whole shape, not only on the number of tokens: on an A100, 48 tokens in 16 bits with K
// = 4096 take the tile of 48 rows if N >= 4096, but the tile of 32 rows if N = 1024. int8_kernel() in
// api/kernel_choice.h calls fastest_tile(), and may choose cuBLAS instead. instances.json lists the tiles. There are
// fewer tiles for int8 tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "host/sm_rates.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// What the parts of a matmul cost with one tile, in clocks of an SM. predicted_clocks() adds them up, from a CTA's
// first instruction to its last store. They are predictions for comparing tiles and schedules, not measurements. A work
// tile costs the computation of addresses, the first trip to memory, the sums' way through shared memory, and trips for
// scale, bias and residual. A split tile also costs the way of its partial into L2, the arrival, one trip for each
// batch of partials, and the bytes of each partial. Opening the arrival counter costs nothing, because it overlaps the
// first trip (scheduler/arrivals.cuh).
struct MatmulClocks {
    double step_alone;       // a step's instructions, for a cluster that has its SMs to itself
    double step_shared;      // likewise, for a cluster that shares its SMs
    double step_l2;          // a step's bytes, at the rate of one SM
    double step_memory;      // a step's bytes, at the rate of the whole GPU's memory or L2
    double work_tile;        // a work tile, in addition to its steps
    double split_tile;       // to add up the partials of a split tile, once for the tile
    double batch;            // likewise, for each batch of partials_at_once partials
    double partial;          // likewise, for each partial
    int64_t clusters_apart;  // the most clusters that have SMs to themselves
    int64_t partials_at_once;

    // Returns the clocks of a step while `clusters` clusters run and share the memory.
    double step(int64_t clusters) const {
        return std::max({clusters > clusters_apart ? step_shared : step_alone, step_l2,
                         static_cast<double>(clusters) * step_memory});
    }
};

// Returns the costs of a tile. Assumes that a second tile along M gets its weights from L2 no faster than the first
// gets them from DRAM. A cluster loads its rows of the input once, for all its CTAs.
inline MatmulClocks matmul_clocks(const MatmulTile& tile, int32_t M, const SmRates& rates, int32_t resident_clusters) {
    // Assumes that dequantising never overlaps mma.sync, and that it overlaps wgmma except for its use of the register
    // file's ports. Scaling the sums of groups takes time in proportion to a step's products. Scaling weights takes two
    // more instructions beside the four that dequantise a pair, and Hopper's forward kernel begins a work tile with a
    // search for the largest scales; the input gradient's kernels are priced alike.
    const double dequantised_in_a_clock = tile.uses_wgmma ? 56 : 64;
    const double reached = tile.uses_wgmma ? 0.9 : 1.0;
    constexpr double kBytesOfAnSm = 32;  // bytes that an SM loads in a clock: an assumption
    constexpr double kAlone = 1.5;       // of a lone CTA; two take 2, each hiding the other's waits: an assumption
    const double weights = static_cast<double>(tile.block_n) / tile.cluster_size * tile.block_k;  // of a CTA in a step
    const double macs = tile.uses_wgmma ? (tile.multiplies_in_16bit ? rates.wgmma_macs_16bit : rates.wgmma_macs_int8)
                                        : (tile.multiplies_in_16bit ? rates.macs_16bit : rates.macs_int8);
    const double products = weights * tile.block_m / (reached * macs);
    const double dequantised = tile.multiplies_in_16bit ? weights / dequantised_in_a_clock : 0;
    const double scaled = !tile.has_group_scales ? 0
                          : tile.scales_weights  ? dequantised / 2
                                                 : weights * tile.block_m / (tile.multiplies_in_16bit ? 3600 : 2400);
    const int32_t rows = std::min(M, tile.block_m);
    const double input_bytes =
        static_cast<double>(rows) / tile.cluster_size * tile.block_k * (tile.multiplies_in_16bit ? 2 : 1);
    const double bytes = weights + input_bytes;
    MatmulClocks clocks;
    clocks.clusters_apart = std::max(resident_clusters / tile.ctas_per_sm, 1);
    const double computed = products + dequantised + scaled;
    clocks.step_alone = tile.ctas_per_sm > 1 ? kAlone * computed : computed;
    clocks.step_shared = tile.ctas_per_sm * computed;
    clocks.step_l2 = bytes / std::max(kBytesOfAnSm, rates.l2_bytes);
    clocks.step_memory =
        std::max(weights / rates.dram_bytes, bytes / rates.l2_bytes) / static_cast<double>(clocks.clusters_apart);
    clocks.work_tile = tile.uses_wgmma ? 3000 + 10.0 * tile.block_m : 3000;  // nothing else runs on the SM meanwhile
    if (tile.has_group_scales && tile.scales_weights) clocks.work_tile += 1000;
    clocks.split_tile = tile.uses_wgmma ? 0 : 600;
    clocks.batch = tile.uses_wgmma ? 0 : 300;
    clocks.partial = (tile.uses_wgmma ? 600 : 0) + 12.0 * rows;  // a cluster loads one partial after the other
    clocks.partials_at_once = rows <= 4 ? 16 : 8;
    return clocks;
}

// Returns the steps of the busiest CTA, in units of a step on a full GPU.
inline double steps_of_full_gpu(const MatmulSchedule& schedule, const MatmulClocks& clocks, int32_t resident_ctas) {
    const int64_t whole_tiles = num_tiles(schedule) - schedule.num_split_tiles, rest = whole_tiles % resident_ctas;
    const auto fraction = [&](int64_t ctas) { return clocks.step(ctas) / clocks.step(resident_ctas); };
    double steps = static_cast<double>(whole_tiles / resident_ctas) * schedule.steps;
    if (rest > 0) steps += schedule.steps * fraction(rest);
    if (schedule.num_splits > 0) steps += fraction(schedule.num_splits) * split_steps(schedule) / schedule.num_splits;
    return steps;
}

inline double predicted_clocks(const MatmulSchedule& schedule, const MatmulClocks& clocks, int32_t resident_ctas) {
    const int64_t waves = ceil_div(num_tiles(schedule) - schedule.num_split_tiles, resident_ctas);
    const double stepping =
        schedule.steps == 0 ? 0 : clocks.step(resident_ctas) * steps_of_full_gpu(schedule, clocks, resident_ctas);
    const double whole = stepping + static_cast<double>(waves) * clocks.work_tile;
    if (schedule.num_splits == 0) return whole;
    const int64_t partials = most_partials(schedule);
    return whole + clocks.work_tile * static_cast<double>(most_work_tiles(schedule)) + clocks.split_tile +
           clocks.batch * static_cast<double>(ceil_div(partials, clocks.partials_at_once)) +
           clocks.partial * static_cast<double>(partials - 1);
}

// Returns the fewest steps of a split: enough to hide all trips to memory but the first.
inline int32_t least_steps(const MatmulTile& tile) {
    return ceil_div(256, tile.block_k);
}

// Returns whether the splits are long enough, and the products in stream_k.h fit in 32 bits.
inline bool can_split(const MatmulSchedule& schedule, const MatmulTile& tile) {
    const int64_t steps = int64_t{schedule.num_split_tiles} * schedule.steps;
    return steps >= int64_t{least_steps(tile)} * schedule.num_splits &&
           steps * schedule.num_splits <= INT64_C(0xffffffff);
}

// Returns the cheapest of these schedules: all tiles are whole; the tiles beyond the last full wave are split, each
// into the same number of splits; the tiles beyond the last full wave, with or without those of one full wave, are cut
// into one split for each resident CTA.
inline MatmulSchedule matmul_schedule(int32_t M, int32_t N, int32_t K, const MatmulTile& tile, const SmRates& rates,
                                      int32_t resident_ctas) {
    MatmulSchedule best{ceil_div(M, tile.block_m), ceil_div(N, tile.block_n), ceil_div(K, tile.block_k), 0, 0};
    const MatmulClocks clocks = matmul_clocks(tile, M, rates, resident_ctas);
    const int64_t tiles = num_tiles(best);
    const int32_t rest = static_cast<int32_t>(tiles % resident_ctas);
    double best_clocks = predicted_clocks(best, clocks, resident_ctas);
    const auto try_splits = [&](int32_t num_split_tiles, int32_t num_splits) {
        MatmulSchedule schedule = best;
        schedule.num_split_tiles = num_split_tiles;
        schedule.num_splits = num_splits;
        if (!can_split(schedule, tile)) return;
        const double predicted = predicted_clocks(schedule, clocks, resident_ctas);
        if (predicted >= best_clocks) return;
        best = schedule;
        best_clocks = predicted;
    };
    if (rest == 0 || best.steps == 0) return best;
    const int32_t most_partials = std::min(resident_ctas / rest, best.steps / least_steps(tile));
    for (int32_t partials = 2; partials <= most_partials; ++partials) try_splits(rest, rest * partials);
    if (!tile.is_persistent) return best;
    try_splits(rest, resident_ctas);
    if (tiles > resident_ctas) try_splits(rest + resident_ctas, resident_ctas);
    return best;
}

struct MatmulChoice {
    size_t index;  // of the tile; tiles.size() if no tile fits
    MatmulTile tile;
    MatmulSchedule schedule;
    double clocks;
};

// Returns the tile with the cheapest schedule. Tiles of one kind (with or without wgmma) must be in ascending order of
// block_m. Of each kind, tiles after the first one that holds all of M are skipped, because larger tiles are hardly
// ever cheaper.
template <typename Tiles>
MatmulChoice fastest_tile(int32_t M, int32_t N, int32_t K, const Tiles& tiles, const SmRates& rates, int32_t num_sms) {
    MatmulChoice best{tiles.size(), {}, {}, std::numeric_limits<double>::infinity()};
    bool holds_all[2] = {};  // [uses_wgmma]: whether a tile of this kind has held all of M
    for (size_t index = 0; index < tiles.size(); ++index) {
        const MatmulTile& tile = tiles[index];
        const int32_t clusters = resident_clusters(tile, num_sms);
        // A tensor map cannot have an empty dimension.
        if (clusters == 0 || holds_all[tile.uses_wgmma] || (tile.uses_wgmma && K == 0)) continue;
        holds_all[tile.uses_wgmma] = tile.block_m >= M;
        const MatmulSchedule schedule = matmul_schedule(M, N, K, tile, rates, clusters);
        const double predicted = predicted_clocks(schedule, matmul_clocks(tile, M, rates, clusters), clusters);
        if (predicted < best.clocks) best = {index, tile, schedule, predicted};
    }
    return best;
}

}  // namespace fastattn
