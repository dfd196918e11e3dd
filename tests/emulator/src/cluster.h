// A cluster: CTAs that run at the same time and see each other's shared memory. Without clusters, each CTA forms one.
#pragma once

#include <memory>
#include <vector>

#include "async_engine.h"
#include "happens_before.h"
#include "machine.h"

namespace emulator {

class Cluster {
  public:
    // `index` is that of the cluster in the grid of clusters.
    Cluster(const Launch& launch, const uint32_t (&index)[3], uint64_t seed, Report& report);

    // Runs its warps for about `budget` instructions, in an order drawn from the seed. Returns true if all have ended.
    bool run(int64_t budget);

    Cta& cta(uint32_t rank) { return *ctas_[rank]; }
    uint32_t num_ctas() const { return static_cast<uint32_t>(ctas_.size()); }

    // barrier.cluster. `wait` returns false if the phase in which the lanes arrived is not complete yet.
    void arrive(Warp& warp, uint32_t mask);
    bool wait(Warp& warp, uint32_t mask);
    // Makes all paths that wait for an mbarrier retry.
    void wake_waiters_at_mbarriers();
    // Notes progress: a warp's wait has ended, so that this is no deadlock.
    void goes_on() { num_time_outs_ = 0; }
    void lanes_exited() { complete_barrier_if_full(); }

    const Launch& launch;
    uint32_t index[3];
    Random random;
    AsyncEngine async;
    std::unique_ptr<HappensBefore> order;  // nullptr without `races`
    Report& report;
    int64_t clock = 0;  // instructions that its warps have executed

  private:
    void complete_barrier_if_full();
    bool time_out();
    void end();
    [[noreturn]] void fail_deadlock();

    std::vector<std::unique_ptr<Cta>> ctas_;
    std::vector<Warp*> warps_;  // of all CTAs
    std::vector<Warp*> runnable_, starved_;
    uint64_t barrier_phase_ = 0;
    int num_time_outs_ = 0;  // since the last progress
};

}  // namespace emulator
