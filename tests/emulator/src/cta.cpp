// A CTA: its shared memory, its warps, and their barriers.
#include <algorithm>

#include "cluster.h"
#include "families/barrier.h"
#include "wgmma.h"

namespace emulator {

Cta::Cta(Cluster& cluster, uint32_t rank, const uint32_t (&cta_index)[3])
    : cluster(cluster), rank(rank), launch(cluster.launch), random(cluster.random), report(cluster.report) {
    std::copy(cta_index, cta_index + 3, index);
    shared_.assign(launch.program->dynamic_shared_begin + launch.shared_bytes, std::byte{0xff});  // NaN of every type
    marks_.assign(shared_.size(), Mark::kUnwritten);
    const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
    for (uint32_t first = 0; first < threads; first += kWarpSize) {
        const uint32_t count = std::min<uint32_t>(kWarpSize, threads - first);
        const uint32_t lanes = count == kWarpSize ? kAllLanes : (1u << count) - 1;
        warps_.push_back(std::make_unique<Warp>(*this, static_cast<int>(first / kWarpSize), lanes));
    }
    warpgroup_logs_.resize((warps_.size() + 3) / 4);
}

Cta::~Cta() = default;

WarpgroupLog& Cta::warpgroup_log(int warpgroup) {
    return warpgroup_logs_[warpgroup];
}

bool Cta::has_ended() const {
    return std::all_of(warps_.begin(), warps_.end(), [](const auto& warp) { return warp->has_ended(); });
}

void Cta::check_end() {
    for (int id = 0; id < 16; ++id) {
        if (!barriers_[id].is_used) continue;
        ++report.unawaited[id];  // PTX allows it: the last arrival of a pipeline's barrier may have no waiter
        if (!launch.unawaited) continue;
        Fault fault("barrier", "the CTA has ended with " + std::to_string(barriers_[id].arrived) +
                                   " threads arrived at barrier " + std::to_string(id) + ", which nobody waited for");
        fault.place = warps_[0]->position_of(nullptr, -1);
        throw fault;
    }
    for (size_t i = 0; i < warpgroup_logs_.size(); ++i) {
        const WarpgroupLog& log = warpgroup_logs_[i];
        if (log.entries.empty()) continue;
        Fault fault("wgmma", "the CTA has ended with wgmma instructions that only some warps of warpgroup " +
                                 std::to_string(i) + " have executed");
        fault.place = warps_[4 * i]->position_of(log.entries.front().operation, 0);
        throw fault;
    }
}

bool Cta::arrive(const Operation& operation, Warp& warp, Frame* frame, uint32_t mask, bool waits) {
    const int lane = __builtin_ctz(mask);
    const BarrierRequest request = barrier_request(operation, warp, mask);
    if (request.id >= 16) throw Fault("barrier", "barrier " + std::to_string(request.id) + ": there are 0 to 15", lane);
    const uint32_t threads = static_cast<uint32_t>(warps_.size()) * kWarpSize;
    if (request.has_count && (request.count == 0 || request.count % kWarpSize != 0 || request.count > threads)) {
        throw Fault("barrier",
                    "a barrier for " + std::to_string(request.count) + " threads in a CTA of " +
                        std::to_string(threads) + ": it must be a multiple of 32, and not 0",
                    lane);
    }
    Barrier& barrier = barriers_[request.id];
    const uint32_t count = request.has_count ? request.count : 0;
    if (barrier.is_used && barrier.count != count) {
        const auto name = [](uint32_t n) { return n == 0 ? std::string("all") : std::to_string(n); };
        throw Fault("barrier",
                    "barrier " + std::to_string(request.id) + " is for " + name(count) + " threads here, but for " +
                        name(barrier.count) + " where others have arrived",
                    lane);
    }
    if (barrier.is_used && barrier.reduction != request.reduction && waits) {
        throw Fault("barrier", "warps meet at barrier " + std::to_string(request.id) + " with different reductions",
                    lane);
    }
    barrier.is_used = true;
    barrier.count = count;
    if (waits) barrier.reduction = request.reduction;
    barrier.arrived += operation.is_aligned ? kWarpSize : __builtin_popcount(mask);
    barrier.ones += __builtin_popcount(request.predicate & mask);
    if (waits) barrier.waiting.push_back({&warp, frame, mask, &operation});
    if (cluster.order) cluster.order->arrive_at_barrier(warp.acting(mask), static_cast<int>(request.id));
    const bool is_complete = complete_if_full(static_cast<int>(request.id));
    if (!is_complete && waits) ++report.barrier_waits[request.id];
    return is_complete;
}

bool Cta::complete_if_full(int id) {
    Barrier& barrier = barriers_[id];
    uint32_t expected = barrier.count;
    if (expected == 0) {
        const bool by_warp = !barrier.waiting.empty() && barrier.waiting[0].operation->is_aligned;
        for (const auto& warp : warps_) {
            if (!warp->has_ended()) expected += by_warp ? kWarpSize : __builtin_popcount(warp->live());
        }
    }
    if (barrier.arrived < expected) return false;
    if (barrier.arrived > expected) {
        throw Fault("barrier", "barrier " + std::to_string(id) + ": " + std::to_string(barrier.arrived) +
                                   " threads have arrived, " + std::to_string(expected) + " were expected");
    }
    uint32_t threads = 0;
    for (const Barrier::Waiting& waiting : barrier.waiting) threads += __builtin_popcount(waiting.mask);
    for (const Barrier::Waiting& waiting : barrier.waiting) {
        finish_barrier(*waiting.operation, waiting.frame->registers.get(), waiting.mask, barrier.ones, threads);
        if (cluster.order) {
            cluster.order->leave_barrier({waiting.warp->number(), waiting.mask}, id, barrier.count == 0);
        }
        waiting.warp->release(waiting.mask);  // has no effect on the path that arrived last, which is running
    }
    if (cluster.order) cluster.order->reset_barrier(rank, id);
    barrier = Barrier{};
    cluster.goes_on();
    return true;
}

// A barrier for all threads does not wait for threads that have exited.
void Cta::lanes_exited() {
    for (int id = 0; id < 16; ++id) {
        if (barriers_[id].is_used && barriers_[id].count == 0) complete_if_full(id);
    }
}

}  // namespace emulator
