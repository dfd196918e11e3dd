// Assigns work tiles to the CTAs of a matmul: whole tiles of the result, and splits of the tiles that would not fill
// the GPU (stream-K, Osama et al., 2023).
//
// A tile's sum over K takes a number of steps. The first tiles are split: their steps form a line, ordered by tile and
// then by step, which is cut into splits that differ by at most a step. A CTA takes one split: the end of one tile, a
// whole one, and the beginning of another. Each other tile is taken whole by one CTA, without partials. The number of
// these whole tiles is a multiple of the number of CTAs that are resident on the GPU. With 10 tiles and 4 resident
// CTAs:
//
//   split tiles    | 0      | 1      | 2      | 3      | 4      | 5      |   whole tiles   6, 7, 8, 9
//   CTAs           | 0          | 1          | 2          | 3            |   CTAs          4, 5, 6, 7
//
// In this example splits are longer than tiles, so that a tile has at most two partials. With fewer tiles than resident
// CTAs, a tile has many partials. Splits that end where tiles end are then often better than one split for each
// resident CTA, because each work tile fills the pipeline again, and each partial goes through L2. If a cluster
// computes a tile, read "cluster" for "CTA" in this file.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/min_max.h"

namespace fastattn {

// A kernel's tile of a product [M, N] over K, and the CTAs that compute it.
struct MatmulTile {
    int32_t block_m, block_n;         // of the result
    int32_t block_k;                  // of a step of the sum
    bool multiplies_in_16bit = true;  // false: int8 numbers are multiplied as they are
    bool is_persistent = true;        // whether a CTA may go on to another tile
    bool uses_wgmma = false;          // on Hopper's tensor cores
    int32_t cluster_size = 1;
    int32_t ctas_per_sm = 2;        // where only one fits (sm_86, sm_89), the second runs after it
    bool scales_weights = false;    // scales of groups multiply the weights instead of the groups' sums
    bool has_group_scales = false;  // each group of K has a scale: a fact of the call, not of the kernel
};
inline int32_t resident_clusters(const MatmulTile& tile, int32_t num_sms) {
    return num_sms * tile.ctas_per_sm / tile.cluster_size;
}

// Tiles [0, num_split_tiles) are cut into num_splits splits, of a step or more each.
struct MatmulSchedule {
    int32_t m_tiles, n_tiles, steps;  // steps: of each tile
    int32_t num_split_tiles, num_splits;
};

FASTATTN_HOST_DEVICE uint32_t split_steps(const MatmulSchedule& schedule) {
    return static_cast<uint32_t>(schedule.num_split_tiles) * schedule.steps;
}

// Returns a split's first step on the line. Its products fit in 32 bits, because matmul_schedule() makes only such
// schedules.
FASTATTN_HOST_DEVICE uint32_t first_step_of_split(const MatmulSchedule& schedule, uint32_t split) {
    return split * split_steps(schedule) / schedule.num_splits;
}
FASTATTN_HOST_DEVICE int32_t split_of_step(const MatmulSchedule& schedule, uint32_t step) {
    return static_cast<int32_t>(((step + 1) * schedule.num_splits - 1) / split_steps(schedule));
}

struct TilePosition {
    int32_t m_tile, n_tile;
};

// Returns the position of a tile in the order of tiles: all of M over kGroup tiles of N, whose weights stay in L2
// meanwhile, then all of M over the next kGroup tiles of N.
FASTATTN_HOST_DEVICE TilePosition tile_position(const MatmulSchedule& schedule, int32_t tile) {
    constexpr int32_t kGroup = 8;  // of 128 columns or more each
    const int32_t first_n_tile = tile / (kGroup * schedule.m_tiles) * kGroup;
    const int32_t left = schedule.n_tiles - first_n_tile, width = left < kGroup ? left : kGroup;
    const int32_t in_group = tile % (kGroup * schedule.m_tiles);
    return {in_group / width, first_n_tile + in_group % width};
}

// The steps that a CTA takes of one tile.
struct MatmulWorkTile {
    int32_t tile, begin_step, end_step;
    int32_t steps_left;  // the steps of the CTA's split in the tiles that follow
};

// Takes `steps` steps from begin_step on, or fewer where the tile ends.
FASTATTN_HOST_DEVICE MatmulWorkTile work_on_tile(const MatmulSchedule& schedule, int32_t tile, int32_t begin_step,
                                                 int32_t steps) {
    const int32_t here = schedule.steps - begin_step < steps ? schedule.steps - begin_step : steps;
    return {tile, begin_step, begin_step + here, steps - here};
}

FASTATTN_HOST_DEVICE MatmulWorkTile first_work_tile(const MatmulSchedule& schedule, int32_t cta) {
    if (cta >= schedule.num_splits)
        return work_on_tile(schedule, schedule.num_split_tiles + cta - schedule.num_splits, 0, schedule.steps);
    const uint32_t begin = first_step_of_split(schedule, cta), end = first_step_of_split(schedule, cta + 1);
    return work_on_tile(schedule, begin / schedule.steps, begin % schedule.steps, end - begin);
}

// Goes on to the next tile of the CTA's split, or returns false if there is none.
FASTATTN_HOST_DEVICE bool next_work_tile(const MatmulSchedule& schedule, MatmulWorkTile& work) {
    if (work.steps_left == 0) return false;
    work = work_on_tile(schedule, work.tile + 1, 0, work.steps_left);
    return true;
}

FASTATTN_HOST_DEVICE bool is_whole(const MatmulSchedule& schedule, const MatmulWorkTile& work) {
    return work.end_step - work.begin_step == schedule.steps;
}

// The partials of a split tile's sum, in the order of its steps: CTA first_cta + i leaves partial i in workspace slot
// slot(i). A CTA has at most two slots: one for the tile in which its split begins, and one for the tile in which it
// ends.
struct SumPartials {
    int32_t first_cta, count;
    int32_t first_slot;

    FASTATTN_HOST_DEVICE int32_t slot(int32_t partial) const { return partial == 0 ? first_slot : first_cta + partial; }
};

FASTATTN_HOST_DEVICE SumPartials sum_partials(const MatmulSchedule& schedule, int32_t tile) {
    const uint32_t begin = static_cast<uint32_t>(tile) * schedule.steps;
    const int32_t first = split_of_step(schedule, begin), last = split_of_step(schedule, begin + schedule.steps - 1);
    return {first, last - first + 1,
            first_step_of_split(schedule, first) < begin ? schedule.num_splits + first : first};
}

inline int64_t num_tiles(const MatmulSchedule& schedule) {
    return int64_t{schedule.m_tiles} * schedule.n_tiles;
}

inline int64_t num_ctas(const MatmulSchedule& schedule) {
    return num_tiles(schedule) - schedule.num_split_tiles + schedule.num_splits;
}
inline bool splits_end_with_tiles(const MatmulSchedule& schedule) {
    return schedule.num_splits % schedule.num_split_tiles == 0;
}
inline int64_t longest_steps(const MatmulSchedule& schedule) {
    const int64_t whole = num_tiles(schedule) > schedule.num_split_tiles ? schedule.steps : 0;
    return schedule.num_splits == 0 ? whole
                                    : std::max(whole, ceil_div(int64_t{split_steps(schedule)}, schedule.num_splits));
}

// Returns how many workspace slots there are, each of the size of a tile.
inline int64_t num_workspace_slots(const MatmulSchedule& schedule) {
    if (schedule.num_splits == 0) return 0;
    return int64_t{schedule.num_splits} * (splits_end_with_tiles(schedule) ? 1 : 2);
}

// The next two functions return the most partials of a tile, and the most work tiles of a split.
inline int64_t most_partials(const MatmulSchedule& schedule) {
    if (splits_end_with_tiles(schedule)) return schedule.num_splits / schedule.num_split_tiles;
    const int64_t shortest = split_steps(schedule) / schedule.num_splits;
    return (schedule.steps - 2) / shortest + 2;
}

inline int64_t most_work_tiles(const MatmulSchedule& schedule) {
    if (splits_end_with_tiles(schedule)) return 1;
    const int64_t longest = split_steps(schedule) / schedule.num_splits + 1;
    return (longest - 2) / schedule.steps + 2;
}

// Takes a whole tile, or returns false if it does not exist.
FASTATTN_HOST_DEVICE bool take_whole_tile(const MatmulSchedule& schedule, int64_t tile, MatmulWorkTile& work) {
    if (tile >= int64_t{schedule.m_tiles} * schedule.n_tiles) return false;
    work = work_on_tile(schedule, static_cast<int32_t>(tile), 0, schedule.steps);
    return true;
}

// Finds the first work tile of a persistent cluster, or returns false if it has none. A cluster takes its split, and
// then every num_clusters-th whole tile. So partials, for which others wait, are made first, and the loads of a tile
// are in flight while the tile before is finished.
FASTATTN_HOST_DEVICE bool first_cluster_tile(const MatmulSchedule& schedule, int32_t cluster, MatmulWorkTile& work) {
    if (cluster >= schedule.num_splits)
        return take_whole_tile(schedule, int64_t{schedule.num_split_tiles} + cluster, work);
    work = first_work_tile(schedule, cluster);
    return true;
}

FASTATTN_HOST_DEVICE bool next_cluster_tile(const MatmulSchedule& schedule, int32_t cluster, int32_t num_clusters,
                                            MatmulWorkTile& work) {
    if (next_work_tile(schedule, work)) return true;
    const int64_t next = work.tile < schedule.num_split_tiles ? int64_t{schedule.num_split_tiles} + cluster
                                                              : int64_t{work.tile} + num_clusters;
    return take_whole_tile(schedule, next, work);
}

// Returns how many of the resident clusters have work.
inline int32_t num_clusters(const MatmulSchedule& schedule, int32_t resident_clusters) {
    const int64_t whole_tiles = num_tiles(schedule) - schedule.num_split_tiles;
    return static_cast<int32_t>(
        std::min<int64_t>(resident_clusters, std::max<int64_t>(schedule.num_splits, whole_tiles)));
}
inline int64_t longest_steps_of_cluster(const MatmulSchedule& schedule, int32_t clusters) {
    const int64_t whole_tiles = num_tiles(schedule) - schedule.num_split_tiles;
    const int64_t whole_steps = ceil_div(whole_tiles, clusters) * schedule.steps;
    return whole_steps + (schedule.num_splits == 0 ? 0 : ceil_div(int64_t{split_steps(schedule)}, schedule.num_splits));
}

}  // namespace fastattn
