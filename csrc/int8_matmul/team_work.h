// Which pieces of a matmul's work a team computes, where teams stay for the whole launch: first its range of the shared
// tiles, then whole tiles, of which every team takes one in turn. So what others wait for, parts of sums, is made first,
// and the loads of a tile are on their way while the tile before is finished.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/host_device.h"
#include "int8_matmul/work.h"

namespace fastattn {

// Where a team stands that goes on to whole tiles; false if none is left for it.
FASTATTN_HOST_DEVICE bool take_whole_tile(const MatmulPlan& plan, int64_t tile, MatmulWork& work) {
    if (tile >= int64_t{plan.token_tiles} * plan.output_tiles) return false;
    work = work_on_tile(plan, static_cast<int32_t>(tile), 0, plan.steps);
    return true;
}

// A team's first piece of work; false if it has none.
FASTATTN_HOST_DEVICE bool first_piece(const MatmulPlan& plan, int32_t team, MatmulWork& work) {
    if (team >= plan.num_ranges) return take_whole_tile(plan, int64_t{plan.shared_tiles} + team, work);
    work = first_work(plan, team);
    return true;
}

FASTATTN_HOST_DEVICE bool next_piece(const MatmulPlan& plan, int32_t team, int32_t num_teams, MatmulWork& work) {
    if (next_work(plan, work)) return true;
    const int64_t next =
        work.tile < plan.shared_tiles ? int64_t{plan.shared_tiles} + team : int64_t{work.tile} + num_teams;
    return take_whole_tile(plan, next, work);
}

// Teams that have work, of so many that run at a time.
inline int32_t num_teams(const MatmulPlan& plan, int32_t resident_teams) {
    const int64_t whole_tiles = num_tiles(plan) - plan.shared_tiles;
    return static_cast<int32_t>(std::min<int64_t>(resident_teams, std::max<int64_t>(plan.num_ranges, whole_tiles)));
}

// The most that a team has.
inline int64_t longest_steps_of_team(const MatmulPlan& plan, int32_t teams) {
    const int64_t whole_tiles = num_tiles(plan) - plan.shared_tiles;
    const int64_t of_whole = (whole_tiles + teams - 1) / teams * plan.steps;
    return of_whole +
           (plan.num_ranges == 0 ? 0 : (int64_t{shared_steps(plan)} + plan.num_ranges - 1) / plan.num_ranges);
}

}  // namespace fastattn
