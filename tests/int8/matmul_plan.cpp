// The plan of the int8 matmul as Python calls it: what every CTA of a launch does, from the functions that the kernels
// compile, and how long that takes by a model of a GPU.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "int8_matmul/team_work.h"
#include "int8_matmul/tiles_sm80.h"
#include "int8_matmul/tiles_sm90.h"
#include "int8_matmul/ways.h"
#include "int8_matmul/work.h"

using namespace fastattn;

struct Gpu {
    int32_t compute_capability, resident_ctas;  // of which two share an SM
};

namespace {

template <template <int> typename Tile, int... kBlockMs>
MatmulTile fastest(const int32_t* sizes, int32_t compute_capability, int32_t num_sms,
                   std::integer_sequence<int, kBlockMs...>) {
    const std::vector<MatmulTile> tiles{Tile<kBlockMs>::kMatmulTile...};
    return fastest_tile(sizes[0], sizes[1], sizes[2], tiles, sm_rates(compute_capability), num_sms).tile;
}

}  // namespace

// The tile that the forward pass takes, or the gradient: tokens, outputs, depth. BLOCK_MS: of instances.json.
extern "C" void fastest_tile_of(const int32_t* sizes, int32_t is_forward, int32_t compute_capability, int32_t num_sms,
                                int32_t* found) {
    using BlockMs = std::integer_sequence<int, BLOCK_MS>;
    const MatmulTile tile = is_forward ? fastest<Int8MatmulTileSm80>(sizes, compute_capability, num_sms, BlockMs{})
                                       : fastest<Int8GradInputTileSm80>(sizes, compute_capability, num_sms, BlockMs{});
    const int32_t values[] = {tile.tokens, tile.outputs, tile.depth};
    std::copy(std::begin(values), std::end(values), found);
}

extern "C" int32_t dequantised_block_of(int32_t count, int32_t elements) {
    return dequantised_block(count, elements);
}

// The predicted clocks of each tile of the forward pass, in the order of BLOCK_MS.
extern "C" void clocks_of_tiles(const int32_t* sizes, int32_t compute_capability, int32_t num_sms, double* found) {
    [&]<int... kBlockMs>(std::integer_sequence<int, kBlockMs...>) {
        const auto clocks = [&](const MatmulTile& tile) {
            return fastest_tile(sizes[0], sizes[1], sizes[2], std::vector{tile}, sm_rates(compute_capability), num_sms)
                .clocks;
        };
        const double values[] = {clocks(Int8MatmulTileSm80<kBlockMs>::kMatmulTile)...};
        std::copy(std::begin(values), std::end(values), found);
    }(std::integer_sequence<int, BLOCK_MS>{});
}

// The same for the forward pass on Hopper, which has tiles of both architectures, as api/kernel_choice.h offers them. Returns
// the predicted clocks. TEAM_BLOCK_MS: of instances.json. uses_wgmma: whether the tile is a team's.
extern "C" double fastest_on_hopper(const int32_t* sizes, int32_t num_sms, int32_t* found, int32_t* uses_wgmma) {
    std::vector<MatmulTile> tiles;
    for (const int32_t tokens : {TEAM_BLOCK_MS}) tiles.push_back(team_tile(tokens, 64, true));
    [&]<int... kBlockMs>(std::integer_sequence<int, kBlockMs...>) {
        (tiles.push_back(Int8MatmulTileSm80<kBlockMs>::kMatmulTile), ...);
    }(std::integer_sequence<int, BLOCK_MS>{});
    const MatmulChoice choice = fastest_tile(sizes[0], sizes[1], sizes[2], tiles, sm_rates(90), num_sms);
    const int32_t values[] = {choice.tile.tokens, choice.tile.outputs, choice.tile.depth};
    std::copy(std::begin(values), std::end(values), found);
    *uses_wgmma = choice.tile.uses_wgmma;
    return choice.clocks;
}

namespace {

MatmulPlan plan_of(const int32_t* sizes, const int32_t* tile, const Gpu& gpu) {
    return matmul_plan(sizes[0], sizes[1], sizes[2], MatmulTile{tile[0], tile[1], tile[2]},
                       sm_rates(gpu.compute_capability), gpu.resident_ctas);
}

template <typename Function>
void for_each_piece(const MatmulPlan& plan, int32_t cta, const Function& function) {
    MatmulWork work = first_work(plan, cta);
    do function(work);
    while (next_work(plan, work));
}

// Behind the row.
int64_t* write_piece(const MatmulPlan& plan, int32_t cta, const MatmulWork& work, int64_t* row) {
    const TilePosition position = tile_position(plan, work.tile);
    int64_t count = 1, own = 0, slot = -1;
    if (!is_whole(plan, work)) {
        const SumParts parts = sum_parts(plan, work.tile);
        count = parts.count, own = cta - parts.first_cta, slot = parts.slot(static_cast<int32_t>(own));
    }
    const int64_t values[] = {
        cta, work.tile, position.token_tile, position.output_tile, work.begin_step, work.end_step, count, own, slot};
    return std::copy(std::begin(values), std::end(values), row);
}

}  // namespace

// sizes: tokens, outputs, depth. facts: token tiles, output tiles, steps, shared tiles, ranges, CTAs, slots.
extern "C" void matmul_plan_facts(const int32_t* sizes, const int32_t* tile, const Gpu& gpu, int64_t* facts) {
    const MatmulPlan plan = plan_of(sizes, tile, gpu);
    const int64_t values[] = {plan.token_tiles, plan.output_tiles, plan.steps,     plan.shared_tiles,
                              plan.num_ranges,  num_ctas(plan),    num_slots(plan)};
    std::copy(std::begin(values), std::end(values), facts);
}

// One row of 9 numbers a piece, of the CTAs [first_cta, end_cta): CTA, tile, token tile, output tile, begin step, end
// step, and of the parts of its tile: how many, which one this is, where it goes; 1, 0, -1 of a whole tile. Returns how
// many rows.
extern "C" int64_t matmul_pieces(const int32_t* sizes, const int32_t* tile, const Gpu& gpu, int32_t first_cta,
                                 int32_t end_cta, int64_t* rows) {
    const MatmulPlan plan = plan_of(sizes, tile, gpu);
    const int64_t* first_row = rows;
    for (int32_t cta = first_cta; cta < end_cta; ++cta) {
        for_each_piece(plan, cta, [&](const MatmulWork& work) { rows = write_piece(plan, cta, work, rows); });
    }
    return (rows - first_row) / 9;
}

// The same of all teams of a launch on Hopper, of which so many run at a time, with tiles of so many tokens. facts: as of
// matmul_plan_facts, but teams instead of CTAs.
extern "C" int64_t team_pieces(const int32_t* sizes, int32_t tile_tokens, int32_t resident_teams, int64_t* facts,
                               int64_t* rows) {
    const MatmulPlan plan =
        matmul_plan(sizes[0], sizes[1], sizes[2], team_tile(tile_tokens, 64, true), sm_rates(90), resident_teams);
    const int32_t teams = num_teams(plan, resident_teams);
    const int64_t of_plan[] = {
        plan.token_tiles, plan.output_tiles, plan.steps, plan.shared_tiles, plan.num_ranges, teams, num_slots(plan)};
    std::copy(std::begin(of_plan), std::end(of_plan), facts);
    const int64_t* first_row = rows;
    for (int32_t team = 0; team < teams; ++team) {
        MatmulWork work;
        for (bool has_work = first_piece(plan, team, work); has_work; has_work = next_piece(plan, team, teams, work)) {
            rows = write_piece(plan, team, work, rows);
        }
    }
    return (rows - first_row) / 9;
}

// Clocks until the last CTA has ended, if CTAs start in order as others end, so many at a time. clocks: of a step by a CTA
// that has its SM for itself, and by each of two that share it; of a step's bytes, if one CTA had all of the GPU's memory; of
// a piece of work beside its steps; and of the last part of a tile, which waits for the others: once, and for each of them.
extern "C" double simulated_clocks(const int32_t* sizes, const int32_t* tile, const Gpu& gpu, const double* clocks) {
    const MatmulPlan plan = plan_of(sizes, tile, gpu);
    const auto step_of = [&](int64_t running) {
        const int64_t num_sms = std::max(gpu.resident_ctas / 2, 1);
        return std::max(clocks[running > num_sms ? 1 : 0], clocks[2] * running);
    };
    std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
    for (int32_t cta = 0; cta < gpu.resident_ctas; ++cta) free_at.push(0);
    std::vector<int32_t> arrived(plan.shared_tiles);
    double end = 0;
    // Ranges are all in the first wave, and move in step: pieces end in the order of their ends in the range.
    struct Piece {
        double end;
        int32_t cta;
        MatmulWork work;
    };
    std::vector<Piece> shared;
    std::vector<double> late(plan.num_ranges);  // that a CTA spent on adding up parts
    const double step_of_range = step_of(plan.num_ranges);
    for (int32_t cta = 0; cta < plan.num_ranges; ++cta) {
        double now = free_at.top();
        free_at.pop();
        for_each_piece(plan, cta, [&](const MatmulWork& work) {
            now += clocks[3] + step_of_range * (work.end_step - work.begin_step);
            shared.push_back({now, cta, work});
        });
        late[cta] = now;
    }
    std::sort(shared.begin(), shared.end(), [](const Piece& a, const Piece& b) { return a.end < b.end; });
    for (const Piece& piece : shared) {
        if (is_whole(plan, piece.work)) continue;
        const int32_t count = sum_parts(plan, piece.work.tile).count;
        if (++arrived[piece.work.tile] == count) late[piece.cta] += clocks[4] + clocks[5] * (count - 1);
    }
    for (const double ended : late) {
        free_at.push(ended);
        end = std::max(end, ended);
    }
    const int64_t whole_tiles = num_ctas(plan) - plan.num_ranges;
    for (int64_t tile_idx = 0; tile_idx < whole_tiles; ++tile_idx) {
        const int64_t wave = tile_idx / gpu.resident_ctas * gpu.resident_ctas;
        const int64_t running = std::min<int64_t>(whole_tiles - wave, gpu.resident_ctas);
        const double ended = free_at.top() + clocks[3] + step_of(running) * plan.steps;
        free_at.pop();
        free_at.push(ended);
        end = std::max(end, ended);
    }
    return end;
}
