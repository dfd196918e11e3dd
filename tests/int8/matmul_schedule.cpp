// Lets Python call the functions of the int8 matmul's schedule that the kernels compile: what every CTA of a launch
// does, and how long that takes by a model of a GPU.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "int8_matmul/tiles_sm80.h"
#include "int8_matmul/tiles_sm90.h"
#include "int8_matmul/ways.h"
#include "scheduler/choose_matmul_tile.h"

using namespace fastattn;

struct Gpu {
    int32_t compute_capability, resident_ctas;  // two CTAs share an SM
};

namespace {

template <template <int> typename Tile, int... kBlockMs>
MatmulTile fastest(const int32_t* sizes, int32_t compute_capability, int32_t num_sms,
                   std::integer_sequence<int, kBlockMs...>) {
    const std::vector<MatmulTile> tiles{Tile<kBlockMs>::kMatmulTile...};
    return fastest_tile(sizes[0], sizes[1], sizes[2], tiles, sm_rates(compute_capability), num_sms).tile;
}

}  // namespace

// Finds the tile of the forward pass or of the gradient for sizes M, N, K. BLOCK_MS is a list from instances.json.
extern "C" void fastest_tile_of(const int32_t* sizes, int32_t is_forward, int32_t compute_capability, int32_t num_sms,
                                int32_t* found) {
    using BlockMs = std::integer_sequence<int, BLOCK_MS>;
    const MatmulTile tile = is_forward ? fastest<Int8MatmulTileSm80>(sizes, compute_capability, num_sms, BlockMs{})
                                       : fastest<Int8GradInputTileSm80>(sizes, compute_capability, num_sms, BlockMs{});
    const int32_t values[] = {tile.block_m, tile.block_n, tile.block_k};
    std::copy(std::begin(values), std::end(values), found);
}

extern "C" int32_t dequantised_block_of(int32_t count, int32_t elements) {
    return dequantised_block(count, elements);
}

// Predicts the clocks of each tile of the forward pass, in the order of BLOCK_MS.
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

// Finds the tile of the forward pass on Hopper among those of both architectures, as api/kernel_choice.h does. Returns
// its predicted clocks. CLUSTER_BLOCK_MS is from instances.json; uses_wgmma: whether a cluster computes the tile.
extern "C" double fastest_on_hopper(const int32_t* sizes, int32_t num_sms, int32_t* found, int32_t* uses_wgmma) {
    std::vector<MatmulTile> tiles;
    for (const int32_t tokens : {CLUSTER_BLOCK_MS}) tiles.push_back(cluster_tile(tokens, 64, true));
    [&]<int... kBlockMs>(std::integer_sequence<int, kBlockMs...>) {
        (tiles.push_back(Int8MatmulTileSm80<kBlockMs>::kMatmulTile), ...);
    }(std::integer_sequence<int, BLOCK_MS>{});
    const MatmulChoice choice = fastest_tile(sizes[0], sizes[1], sizes[2], tiles, sm_rates(90), num_sms);
    const int32_t values[] = {choice.tile.block_m, choice.tile.block_n, choice.tile.block_k};
    std::copy(std::begin(values), std::end(values), found);
    *uses_wgmma = choice.tile.uses_wgmma;
    return choice.clocks;
}

namespace {

MatmulSchedule plan_of(const int32_t* sizes, const int32_t* tile, const Gpu& gpu) {
    return matmul_schedule(sizes[0], sizes[1], sizes[2], MatmulTile{tile[0], tile[1], tile[2]},
                           sm_rates(gpu.compute_capability), gpu.resident_ctas);
}

template <typename Function>
void for_each_work_tile(const MatmulSchedule& schedule, int32_t cta, const Function& function) {
    MatmulWorkTile work = first_work_tile(schedule, cta);
    do function(work);
    while (next_work_tile(schedule, work));
}

// Writes a row of matmul_work_tiles, and returns the address after it.
int64_t* write_work_tile(const MatmulSchedule& schedule, int32_t cta, const MatmulWorkTile& work, int64_t* row) {
    const TilePosition position = tile_position(schedule, work.tile);
    int64_t count = 1, own = 0, slot = -1;
    if (!is_whole(schedule, work)) {
        const SumPartials partials = sum_partials(schedule, work.tile);
        count = partials.count, own = cta - partials.first_cta, slot = partials.slot(static_cast<int32_t>(own));
    }
    const int64_t values[] = {cta, work.tile, position.m_tile, position.n_tile, work.begin_step, work.end_step, count,
                              own, slot};
    return std::copy(std::begin(values), std::end(values), row);
}

}  // namespace

// sizes: M, N, K. facts: tiles of M, tiles of N, steps, split tiles, splits, CTAs, slots.
extern "C" void matmul_schedule_facts(const int32_t* sizes, const int32_t* tile, const Gpu& gpu, int64_t* facts) {
    const MatmulSchedule schedule = plan_of(sizes, tile, gpu);
    const int64_t values[] = {schedule.m_tiles,
                              schedule.n_tiles,
                              schedule.steps,
                              schedule.num_split_tiles,
                              schedule.num_splits,
                              num_ctas(schedule),
                              num_workspace_slots(schedule)};
    std::copy(std::begin(values), std::end(values), facts);
}

// Writes one row of 9 numbers for each work tile of the CTAs [first_cta, end_cta): CTA, tile, tile of M, tile of N,
// begin step, end step, number of the tile's partials, index of this partial, its slot. A whole tile has 1, 0, -1 at
// the end. Returns the number of rows.
extern "C" int64_t matmul_work_tiles(const int32_t* sizes, const int32_t* tile, const Gpu& gpu, int32_t first_cta,
                                     int32_t end_cta, int64_t* rows) {
    const MatmulSchedule schedule = plan_of(sizes, tile, gpu);
    const int64_t* first_row = rows;
    for (int32_t cta = first_cta; cta < end_cta; ++cta) {
        for_each_work_tile(schedule, cta,
                           [&](const MatmulWorkTile& work) { rows = write_work_tile(schedule, cta, work, rows); });
    }
    return (rows - first_row) / 9;
}

// Does the same for all clusters of a launch on Hopper, with tiles of tile_tokens rows; resident_clusters run at a
// time. facts: as in matmul_schedule_facts, but with clusters instead of CTAs.
extern "C" int64_t cluster_work_tiles(const int32_t* sizes, int32_t tile_tokens, int32_t resident_clusters,
                                      int64_t* facts, int64_t* rows) {
    const MatmulSchedule schedule = matmul_schedule(sizes[0], sizes[1], sizes[2], cluster_tile(tile_tokens, 64, true),
                                                    sm_rates(90), resident_clusters);
    const int32_t clusters = num_clusters(schedule, resident_clusters);
    const int64_t values[] = {schedule.m_tiles,
                              schedule.n_tiles,
                              schedule.steps,
                              schedule.num_split_tiles,
                              schedule.num_splits,
                              clusters,
                              num_workspace_slots(schedule)};
    std::copy(std::begin(values), std::end(values), facts);
    const int64_t* first_row = rows;
    for (int32_t cluster = 0; cluster < clusters; ++cluster) {
        MatmulWorkTile work;
        for (bool has_work = first_cluster_tile(schedule, cluster, work); has_work;
             has_work = next_cluster_tile(schedule, cluster, clusters, work)) {
            rows = write_work_tile(schedule, cluster, work, rows);
        }
    }
    return (rows - first_row) / 9;
}

// Returns the clocks until the last CTA has ended, where gpu.resident_ctas run at a time and others start in order as
// these end. clocks: [0] a step of a CTA alone on its SM; [1] a step of a CTA that shares its SM; [2] a step's bytes at
// all of the GPU's bandwidth; [3] a work tile's overhead; [4] the last partial of a tile, which waits for the others;
// [5] each of the others.
extern "C" double simulated_clocks(const int32_t* sizes, const int32_t* tile, const Gpu& gpu, const double* clocks) {
    const MatmulSchedule schedule = plan_of(sizes, tile, gpu);
    const auto step_of = [&](int64_t running) {
        const int64_t num_sms = std::max(gpu.resident_ctas / 2, 1);
        return std::max(clocks[running > num_sms ? 1 : 0], clocks[2] * running);
    };
    std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
    for (int32_t cta = 0; cta < gpu.resident_ctas; ++cta) free_at.push(0);
    std::vector<int32_t> arrived(schedule.num_split_tiles);
    double end = 0;
    // All splits run in the first wave and advance at one speed: work tiles end in the order of their end times.
    struct WorkTile {
        double end;
        int32_t cta;
        MatmulWorkTile work;
    };
    std::vector<WorkTile> shared;
    std::vector<double> late(schedule.num_splits);  // when each CTA ends, combining partials included
    const double step_of_split = step_of(schedule.num_splits);
    for (int32_t cta = 0; cta < schedule.num_splits; ++cta) {
        double now = free_at.top();
        free_at.pop();
        for_each_work_tile(schedule, cta, [&](const MatmulWorkTile& work) {
            now += clocks[3] + step_of_split * (work.end_step - work.begin_step);
            shared.push_back({now, cta, work});
        });
        late[cta] = now;
    }
    std::sort(shared.begin(), shared.end(), [](const WorkTile& a, const WorkTile& b) { return a.end < b.end; });
    for (const WorkTile& work_tile : shared) {
        if (is_whole(schedule, work_tile.work)) continue;
        const int32_t count = sum_partials(schedule, work_tile.work.tile).count;
        if (++arrived[work_tile.work.tile] == count) late[work_tile.cta] += clocks[4] + clocks[5] * (count - 1);
    }
    for (const double ended : late) {
        free_at.push(ended);
        end = std::max(end, ended);
    }
    const int64_t whole_tiles = num_ctas(schedule) - schedule.num_splits;
    for (int64_t tile_idx = 0; tile_idx < whole_tiles; ++tile_idx) {
        const int64_t wave = tile_idx / gpu.resident_ctas * gpu.resident_ctas;
        const int64_t running = std::min<int64_t>(whole_tiles - wave, gpu.resident_ctas);
        const double ended = free_at.top() + clocks[3] + step_of(running) * schedule.steps;
        free_at.pop();
        free_at.push(ended);
        end = std::max(end, ended);
    }
    return end;
}
