// Runs a cluster's warps alternately, in an order drawn from the seed, and implements barrier.cluster.
#include "cluster.h"

#include <algorithm>
#include <sstream>

namespace emulator {

Cluster::Cluster(const Launch& launch, const uint32_t (&cluster_index)[3], uint64_t seed, Report& report)
    : launch(launch), random(seed), async(random), report(report) {
    std::copy(cluster_index, cluster_index + 3, index);
    const uint32_t (&size)[3] = launch.cluster;
    for (uint32_t rank = 0; rank < size[0] * size[1] * size[2]; ++rank) {
        const uint32_t at[3] = {rank % size[0], rank / size[0] % size[1], rank / size[0] / size[1]};
        const uint32_t cta_index[3] = {index[0] * size[0] + at[0], index[1] * size[1] + at[1],
                                       index[2] * size[2] + at[2]};
        ctas_.push_back(std::make_unique<Cta>(*this, rank, cta_index));
        for (const auto& warp : ctas_.back()->warps()) warps_.push_back(warp.get());
    }
    if (launch.history == nullptr) return;
    std::vector<std::array<uint32_t, 3>> places;
    for (const auto& cta : ctas_) places.push_back({cta->index[0], cta->index[1], cta->index[2]});
    std::vector<uint32_t> lanes;
    for (const auto& warp : ctas_[0]->warps()) lanes.push_back(warp->lanes());
    order = std::make_unique<HappensBefore>(*launch.history, std::move(places), lanes, ctas_[0]->shared_bytes());
}

bool Cluster::run(int64_t budget) {
    const int64_t end_of_slice = clock + budget;
    while (clock < end_of_slice) {
        runnable_.clear();
        starved_.clear();
        bool all_ended = true;
        for (Warp* warp : warps_) {
            if (warp->has_ended()) continue;
            all_ended = false;
            const bool is_starved = warp->thread(0) / kWarpSize == launch.starved_warp;
            if (warp->is_runnable()) (is_starved ? starved_ : runnable_).push_back(warp);
        }
        if (all_ended) {
            end();
            return true;
        }
        const bool others_wait = runnable_.empty();
        if (others_wait && async.perform_one()) continue;
        if (others_wait && starved_.empty()) {
            if (!time_out()) fail_deadlock();
            continue;
        }
        constexpr uint32_t kTurnsOfOthers = 1024;  // finite, because the others may spin until the starved warp has run
        if (!starved_.empty() && (others_wait || random.below(kTurnsOfOthers) == 0)) runnable_.swap(starved_);
        Warp& warp = *runnable_[random.below(static_cast<uint32_t>(runnable_.size()))];
        warp.run(random.length(12));
    }
    return false;
}

// Lets blocked mbarrier.try_wait give up, because their threads may have other work. Returns false for a deadlock.
bool Cluster::time_out() {
    constexpr int kMostTimeOuts = 64;
    if (num_time_outs_++ == kMostTimeOuts) return false;
    bool any = false;
    for (Warp* warp : warps_) any = warp->time_out() || any;
    return any;
}

// Completes the operations that are still in flight when the last warp has ended.
void Cluster::end() {
    async.finish_all();
    for (const auto& cta : ctas_) cta->check_end();
}

void Cluster::arrive(Warp& warp, uint32_t mask) {
    if ((warp.cluster_arrived & mask) != 0) {
        throw Fault("barrier", "a second barrier.cluster.arrive without a wait after the first",
                    __builtin_ctz(warp.cluster_arrived & mask));
    }
    warp.cluster_arrived |= mask;
    each_lane(mask, [&](int lane) { warp.cluster_phase[lane] = barrier_phase_; });
    complete_barrier_if_full();
}

bool Cluster::wait(Warp& warp, uint32_t mask) {
    if ((mask & ~warp.cluster_arrived) != 0) {
        throw Fault("barrier", "barrier.cluster.wait without an arrive before it",
                    __builtin_ctz(mask & ~warp.cluster_arrived));
    }
    if (warp.cluster_phase[__builtin_ctz(mask)] == barrier_phase_) return false;
    warp.cluster_arrived &= ~mask;
    return true;
}

// Lanes that have exited count as arrived.
void Cluster::complete_barrier_if_full() {
    bool has_arrivals = false;
    for (Warp* warp : warps_) {
        uint32_t missing = 0;
        each_lane(warp->live(), [&](int lane) {
            const bool has_arrived =
                (warp->cluster_arrived >> lane & 1) != 0 && warp->cluster_phase[lane] == barrier_phase_;
            missing |= has_arrived ? 0 : 1u << lane;
            has_arrivals = has_arrivals || has_arrived;
        });
        if (missing != 0) return;
    }
    if (!has_arrivals) return;
    ++barrier_phase_;
    goes_on();
    if (order) order->complete_cluster();
    for (Warp* warp : warps_) warp->retry(Path::State::kCluster);
}

void Cluster::wake_waiters_at_mbarriers() {
    goes_on();
    for (Warp* warp : warps_) warp->retry(Path::State::kMbarrier);
}

void Cluster::fail_deadlock() {
    constexpr const char* kWaits[] = {"",
                                      "for lanes of the member mask",
                                      "at the barrier",
                                      "for a phase of an mbarrier",
                                      "at the cluster's barrier",
                                      "for registers that other warps give back",
                                      "for the other warps of the warpgroup"};
    std::ostringstream text;
    text << "no warp can go on:";
    const Operation* first = nullptr;
    const Warp* of = nullptr;
    int lane = -1;
    for (const auto& cta : ctas_) {
        const std::string name = ctas_.size() == 1 ? "" : "CTA " + std::to_string(cta->rank) + " of the cluster, ";
        for (const auto& warp : cta->warps()) {
            text << "\n  " << name << "warp " << warp->thread(0) / kWarpSize << ": ";
            if (warp->has_ended()) text << "has ended";
            for (const Path& path : warp->paths()) {
                const Operation& operation = launch.program->operations[path.pc];
                if (first == nullptr) first = &operation, of = warp.get(), lane = __builtin_ctz(path.mask);
                text << "lanes 0x" << std::hex << path.mask << std::dec << " at line " << operation.instruction->line
                     << " (" << operation.instruction->opcode << ") wait " << kWaits[static_cast<int>(path.state)]
                     << "; ";
            }
            if (!warp->has_ended() && warp->paths().empty()) text << "lanes wait for each other where branches meet";
        }
        for (int id = 0; id < 16; ++id) {
            const Barrier& barrier = cta->barrier(id);
            if (!barrier.is_used) continue;
            text << "\n  " << name << "barrier " << id << ": " << barrier.arrived << " threads have arrived";
            if (barrier.count != 0) text << " of " << barrier.count;
        }
        for (const auto& [offset, mbarrier] : cta->mbarriers()) {
            text << "\n  " << name << "mbarrier at offset " << offset << ": phase " << mbarrier.phase << " waits for "
                 << mbarrier.pending << " of " << mbarrier.expected << " arrivals and " << mbarrier.transactions
                 << " bytes";
        }
    }
    Fault fault("deadlock", text.str());
    fault.place = (of != nullptr ? of : warps_[0])->position_of(first, lane);
    throw fault;
}

}  // namespace emulator
