// Which part of a matmul each CTA computes: whole tiles of the result, and stream-K (Osama et al., 2023) for those that
// would not fill the GPU.
//
// A tile's sum takes a number of steps, and a number of CTAs, the resident ones, run at a time. The first tiles are
// shared: their steps form a line, by tile and then by step, that is cut into ranges which differ by a step at most.
// Each range is a CTA's; it may be the end of one tile, a whole one, and the beginning of another. The other tiles are
// one CTA's each, without partial sums, and fill the GPU a whole number of times. With 10 tiles and 4 resident CTAs:
//
//   shared tiles   | 0      | 1      | 2      | 3      | 4      | 5      |   whole tiles   6, 7, 8, 9
//   CTAs           | 0          | 1          | 2          | 3            |   CTAs          4, 5, 6, 7
//
// Ranges are longer than tiles here: a tile has two parts at most. Where there are fewer tiles than resident CTAs, a tile
// has many; then parts that end with a tile are often better than as many parts as there are resident CTAs, because a
// piece of work costs a start of the pipeline, and a part a way through L2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "host/host_device.h"
#include "host/sm_rates.h"

namespace fastattn {

// What a kernel computes at a time, and where. A team is the CTAs that compute a tile together, one or a cluster: a "CTA" of a
// plan is a team.
struct MatmulTile {
    int32_t tokens, outputs;  // of the result
    int32_t depth;            // of the sum, in a step
    bool dequantises = true;  // false: int8 numbers are multiplied as they are
    bool goes_on = true;      // whether a CTA may go on to another tile
    bool uses_wgmma = false;  // on Hopper's tensor cores
    int32_t ctas_per_team = 1;
    int32_t ctas_per_sm = 2;     // where only one fits (sm_86, sm_89), two halves come one after the other
    bool scales_groups = false;  // sums of each group of K are multiplied by its scale: the call's, not the kernel's
};

// Teams that run at a time.
inline int32_t resident_teams(const MatmulTile& tile, int32_t num_sms) {
    return num_sms * tile.ctas_per_sm / tile.ctas_per_team;
}

// Tiles [0, shared_tiles) are cut into num_ranges ranges, of a step or more.
struct MatmulPlan {
    int32_t token_tiles, output_tiles, steps;  // steps of each tile
    int32_t shared_tiles, num_ranges;
};

FASTATTN_HOST_DEVICE uint32_t shared_steps(const MatmulPlan& plan) {
    return static_cast<uint32_t>(plan.shared_tiles) * plan.steps;
}

// The first step of a range, on the line. matmul_plan() makes only plans whose products here fit in 32 bits.
FASTATTN_HOST_DEVICE uint32_t range_begin(const MatmulPlan& plan, uint32_t range) {
    return range * shared_steps(plan) / plan.num_ranges;
}

FASTATTN_HOST_DEVICE int32_t range_with(const MatmulPlan& plan, uint32_t step) {
    return static_cast<int32_t>(((step + 1) * plan.num_ranges - 1) / shared_steps(plan));
}

struct TilePosition {
    int32_t token_tile, output_tile;
};

// All tokens pass over kGroup blocks of weights, which stay in L2 meanwhile, then over the next ones.
FASTATTN_HOST_DEVICE TilePosition tile_position(const MatmulPlan& plan, int32_t tile) {
    constexpr int32_t kGroup = 8;  // of 128 outputs
    const int32_t first_output_tile = tile / (kGroup * plan.token_tiles) * kGroup;
    const int32_t left = plan.output_tiles - first_output_tile, width = left < kGroup ? left : kGroup;
    const int32_t in_group = tile % (kGroup * plan.token_tiles);
    return {in_group / width, first_output_tile + in_group % width};
}

// A CTA's work on one tile.
struct MatmulWork {
    int32_t tile, begin_step, end_step;
    int32_t steps_left;  // that the CTA has of the tiles that follow
};

// The given number of steps from begin_step on, cut off where the tile ends.
FASTATTN_HOST_DEVICE MatmulWork work_on_tile(const MatmulPlan& plan, int32_t tile, int32_t begin_step, int32_t steps) {
    const int32_t here = plan.steps - begin_step < steps ? plan.steps - begin_step : steps;
    return {tile, begin_step, begin_step + here, steps - here};
}

FASTATTN_HOST_DEVICE MatmulWork first_work(const MatmulPlan& plan, int32_t cta) {
    if (cta >= plan.num_ranges) return work_on_tile(plan, plan.shared_tiles + cta - plan.num_ranges, 0, plan.steps);
    const uint32_t begin = range_begin(plan, cta), end = range_begin(plan, cta + 1);
    return work_on_tile(plan, begin / plan.steps, begin % plan.steps, end - begin);
}

// Goes on to the CTA's next piece of work; false if there is none.
FASTATTN_HOST_DEVICE bool next_work(const MatmulPlan& plan, MatmulWork& work) {
    if (work.steps_left == 0) return false;
    work = work_on_tile(plan, work.tile + 1, 0, work.steps_left);
    return true;
}

FASTATTN_HOST_DEVICE bool is_whole(const MatmulPlan& plan, const MatmulWork& work) {
    return work.end_step - work.begin_step == plan.steps;
}

// The parts of a shared tile's sum, in the order of its steps: CTA first_cta + i makes part i, and leaves it in slot(i)
// of the workspace. A CTA has two slots at most: for the tile in which its range begins, and for that in which it ends.
struct SumParts {
    int32_t first_cta, count;
    int32_t first_slot;

    FASTATTN_HOST_DEVICE int32_t slot(int32_t part) const { return part == 0 ? first_slot : first_cta + part; }
};

FASTATTN_HOST_DEVICE SumParts sum_parts(const MatmulPlan& plan, int32_t tile) {
    const uint32_t begin = static_cast<uint32_t>(tile) * plan.steps;
    const int32_t first = range_with(plan, begin), last = range_with(plan, begin + plan.steps - 1);
    return {first, last - first + 1, range_begin(plan, first) < begin ? plan.num_ranges + first : first};
}

inline int64_t num_tiles(const MatmulPlan& plan) {
    return int64_t{plan.token_tiles} * plan.output_tiles;
}

inline int64_t num_ctas(const MatmulPlan& plan) {
    return num_tiles(plan) - plan.shared_tiles + plan.num_ranges;
}

// Whether every range is a part of one tile.
inline bool ranges_end_with_tiles(const MatmulPlan& plan) {
    return plan.num_ranges % plan.shared_tiles == 0;
}

// The most that a CTA has.
inline int64_t longest_steps(const MatmulPlan& plan) {
    const int64_t whole = num_tiles(plan) > plan.shared_tiles ? plan.steps : 0;
    return plan.num_ranges == 0
               ? whole
               : std::max(whole, (int64_t{shared_steps(plan)} + plan.num_ranges - 1) / plan.num_ranges);
}

// Slots of the workspace, each of the size of a tile.
inline int64_t num_slots(const MatmulPlan& plan) {
    if (plan.num_ranges == 0) return 0;
    return int64_t{plan.num_ranges} * (ranges_end_with_tiles(plan) ? 1 : 2);
}

// The most parts that a tile can have, and the most tiles of which a range can have a part.
inline int64_t most_parts(const MatmulPlan& plan) {
    if (ranges_end_with_tiles(plan)) return plan.num_ranges / plan.shared_tiles;
    const int64_t shortest = shared_steps(plan) / plan.num_ranges;
    return (plan.steps - 2) / shortest + 2;
}

inline int64_t most_pieces(const MatmulPlan& plan) {
    if (ranges_end_with_tiles(plan)) return 1;
    const int64_t longest = shared_steps(plan) / plan.num_ranges + 1;
    return (longest - 2) / plan.steps + 2;
}

// How long a plan takes, in clocks. A prediction for choosing between plans and tiles, not a measurement. It counts what
// comes one after the other, from the first instruction of a CTA to its last store:
//
//   piece   indices and addresses, 280 instructions of each of four warps       400
//           the first weights: a trip to memory, and its queue                 1000
//           sums through shared memory, two barriers                            200
//           scale, bias and residual: three trips, to memory at worst          1400
//   shared  its part into L2, and the fence's wait for that: a trip             300
//           the count: a trip                                                   300
//           other parts: a trip for each 16, or 8 of more than 4 tokens         300
//   part    of another CTA: its bytes, 512 of a token at 43 a clock              12 a token
//
// A trip to L2 takes 262 clocks on an A100 and 263 on an H100, to memory 466 and 479 (Luo et al., arXiv 2402.13499); 300
// is with a barrier. The counter has been opened during the first trip (device/arrivals.cuh).
struct MatmulClocks {
    double alone;         // of a step: what an SM needs for it where no other team runs on it,
    double together;      // and where as many run as it holds;
    double loaded;        // what an SM needs to load the bytes;
    double from_memory;   // what they take of all of the GPU's memory or L2
    double piece;         // beside its steps
    double shared;        // that its last CTA needs to collect a tile's parts,
    double trip;          // once more for each parts_at_once of them,
    double part;          // and for each that it adds
    int64_t teams_apart;  // so many teams have SMs of their own; where there are more, some share one
    int64_t parts_at_once;

    // Of a team, while so many run: few of them have more of the memory, each, than many.
    double step(int64_t teams) const {
        return std::max({teams > teams_apart ? together : alone, loaded, static_cast<double>(teams) * from_memory});
    }
};

// Of a matmul of so many tokens. Weights come no faster from L2, for the tokens of a second tile, than from DRAM. A team loads
// its tokens once for both of its CTAs.
inline MatmulClocks matmul_clocks(const MatmulTile& tile, int32_t tokens, const SmRates& rates,
                                  int32_t resident_teams) {
    // 44 instructions of a warp per 32 k of 32 outputs, and a wait for them: 64 clocks, as if nothing of it were hidden. With
    // wgmma it is hidden, but for the ports of the register file: what a simulation of the machine code predicts for a step is
    // a line over the tokens, with nine tenths of the tensor cores' rate. So is, on all GPUs, what scaling the sums of groups
    // adds: to a product of 128 tokens 280 to 290 clocks for 8192 weights, and half as much again where sums are int32.
    const double dequantised_in_a_clock = tile.uses_wgmma ? 42 : 64;
    const double reached = tile.uses_wgmma ? 0.9 : 1.0;
    constexpr double kBytesOfAnSm = 32;  // that an SM loads in a clock, of 64 that L2 can give it: an assumption
    constexpr double kAlone = 1.5;  // two CTAs of an SM take 2: one hides some of the other's waits, an assumption too
    const double weights = static_cast<double>(tile.outputs) / tile.ctas_per_team * tile.depth;  // of a CTA
    const double macs = tile.uses_wgmma ? (tile.dequantises ? rates.wgmma_macs_16bit : rates.wgmma_macs_int8)
                                        : (tile.dequantises ? rates.macs_16bit : rates.macs_int8);
    const double products = weights * tile.tokens / (reached * macs);
    const double scaled = tile.scales_groups ? weights * tile.tokens / (tile.dequantises ? 3600 : 2400) : 0;
    const int32_t rows = std::min(tokens, tile.tokens);
    const double token_bytes = static_cast<double>(rows) / tile.ctas_per_team * tile.depth * (tile.dequantises ? 2 : 1);
    const double bytes = weights + token_bytes;
    MatmulClocks clocks;
    clocks.teams_apart = std::max(resident_teams / tile.ctas_per_sm, 1);
    const double computed = products + scaled + (tile.dequantises ? weights / dequantised_in_a_clock : 0);
    clocks.alone = tile.ctas_per_sm > 1 ? kAlone * computed : computed;
    clocks.together = tile.ctas_per_sm * computed;
    clocks.loaded = bytes / std::max(kBytesOfAnSm, rates.l2_bytes);
    clocks.from_memory =
        std::max(weights / rates.dram_bytes, bytes / rates.l2_bytes) / static_cast<double>(clocks.teams_apart);
    clocks.piece = tile.uses_wgmma ? 3000 + 10.0 * tile.tokens : 3000;  // nothing else runs on the SM meanwhile
    clocks.shared = tile.uses_wgmma ? 0 : 600;
    clocks.trip = tile.uses_wgmma ? 0 : 300;
    clocks.part = (tile.uses_wgmma ? 600 : 0) + 12.0 * rows;  // a team loads part after part
    clocks.parts_at_once = rows <= 4 ? 16 : 8;
    return clocks;
}

// The steps of the busiest CTA: so many that take as long as its own where all that can run do.
inline double steps_of_full_gpu(const MatmulPlan& plan, const MatmulClocks& clocks, int32_t resident_ctas) {
    const int64_t whole_tiles = num_tiles(plan) - plan.shared_tiles, rest = whole_tiles % resident_ctas;
    const auto share = [&](int64_t ctas) { return clocks.step(ctas) / clocks.step(resident_ctas); };
    double steps = static_cast<double>(whole_tiles / resident_ctas) * plan.steps;
    if (rest > 0) steps += plan.steps * share(rest);
    if (plan.num_ranges > 0) steps += share(plan.num_ranges) * shared_steps(plan) / plan.num_ranges;
    return steps;
}

inline double predicted_clocks(const MatmulPlan& plan, const MatmulClocks& clocks, int32_t resident_ctas) {
    const int64_t waves = (num_tiles(plan) - plan.shared_tiles + resident_ctas - 1) / resident_ctas;
    const double stepping =
        plan.steps == 0 ? 0 : clocks.step(resident_ctas) * steps_of_full_gpu(plan, clocks, resident_ctas);
    const double whole = stepping + static_cast<double>(waves) * clocks.piece;
    if (plan.num_ranges == 0) return whole;
    const int64_t parts = most_parts(plan);
    return whole + clocks.piece * static_cast<double>(most_pieces(plan)) + clocks.shared +
           clocks.trip * static_cast<double>((parts + clocks.parts_at_once - 1) / clocks.parts_at_once) +
           clocks.part * static_cast<double>(parts - 1);
}

// The fewest steps of a range: enough to hide the trips to memory of all but the first.
inline int32_t least_steps(const MatmulTile& tile) {
    return ceil_div(256, tile.depth);
}

// Whether the ranges are long enough, and stay within 32 bits.
inline bool can_share(const MatmulPlan& plan, const MatmulTile& tile) {
    const int64_t steps = int64_t{plan.shared_tiles} * plan.steps;
    return steps >= int64_t{least_steps(tile)} * plan.num_ranges && steps * plan.num_ranges <= INT64_C(0xffffffff);
}

// The plan that is predicted to be the fastest: all tiles whole; or those beyond the last full wave cut into as many
// parts each, or into ranges, or into ranges together with a wave of tiles.
inline MatmulPlan matmul_plan(int32_t tokens, int32_t outputs, int32_t depth, const MatmulTile& tile,
                              const SmRates& rates, int32_t resident_ctas) {
    MatmulPlan best{ceil_div(tokens, tile.tokens), ceil_div(outputs, tile.outputs), ceil_div(depth, tile.depth), 0, 0};
    const MatmulClocks clocks = matmul_clocks(tile, tokens, rates, resident_ctas);
    const int64_t tiles = num_tiles(best);
    const int32_t rest = static_cast<int32_t>(tiles % resident_ctas);
    double best_clocks = predicted_clocks(best, clocks, resident_ctas);
    const auto try_sharing = [&](int32_t shared_tiles, int32_t num_ranges) {
        MatmulPlan plan = best;
        plan.shared_tiles = shared_tiles;
        plan.num_ranges = num_ranges;
        if (!can_share(plan, tile)) return;
        const double predicted = predicted_clocks(plan, clocks, resident_ctas);
        if (predicted >= best_clocks) return;
        best = plan;
        best_clocks = predicted;
    };
    if (rest == 0 || best.steps == 0) return best;
    const int32_t most_parts = std::min(resident_ctas / rest, best.steps / least_steps(tile));
    for (int32_t parts = 2; parts <= most_parts; ++parts) try_sharing(rest, rest * parts);
    if (!tile.goes_on) return best;
    try_sharing(rest, resident_ctas);
    if (tiles > resident_ctas) try_sharing(rest + resident_ctas, resident_ctas);
    return best;
}

struct MatmulChoice {
    size_t index;  // of the tile; behind the last one if no tile can be had
    MatmulTile tile;
    MatmulPlan plan;
    double clocks;  // predicted
};

// Of several tiles, those of a kind by their tokens in ascending order, that with the fastest plan. Of those of a kind that
// hold all tokens only the first is looked at: the others are not faster, or by less than a twentieth.
template <typename Tiles>
MatmulChoice fastest_tile(int32_t tokens, int32_t outputs, int32_t depth, const Tiles& tiles, const SmRates& rates,
                          int32_t num_sms) {
    MatmulChoice best{tiles.size(), {}, {}, std::numeric_limits<double>::infinity()};
    bool holds_all[2] = {};  // of tiles without wgmma, and with it
    for (size_t index = 0; index < tiles.size(); ++index) {
        const MatmulTile& tile = tiles[index];
        const int32_t teams = resident_teams(tile, num_sms);
        // A tensor map has no dimension without elements.
        if (teams == 0 || holds_all[tile.uses_wgmma] || (tile.uses_wgmma && depth == 0)) continue;
        holds_all[tile.uses_wgmma] = tile.tokens >= tokens;
        const MatmulPlan plan = matmul_plan(tokens, outputs, depth, tile, rates, teams);
        const double predicted = predicted_clocks(plan, matmul_clocks(tile, tokens, rates, teams), teams);
        if (predicted < best.clocks) best = {index, tile, plan, predicted};
    }
    return best;
}

}  // namespace fastattn
