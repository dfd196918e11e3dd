// Runs the grid: clusters start in an order drawn from the seed, on several worker threads. Each worker alternates
// between several clusters, so that CTAs can wait for other CTAs of the grid. Some clusters begin late, as on a GPU
// whose SMs are still busy: this reveals a kernel whose scheduler assumes that all CTAs begin together.
#include <exception>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "cluster.h"
#include "races.h"

namespace emulator {
namespace {

// A worker runs a cluster for kLeastSlice to kLeastSlice * 2^kLogMostSlices instructions at a time, drawn anew.
constexpr int64_t kLeastSlice = 64;
constexpr int kLogMostSlices = 11;
// One cluster of kLateOneOf begins late: when its worker has executed up to 2^kLogMostDelay instructions of others.
constexpr uint32_t kLateOneOf = 4;
constexpr int kLogMostDelay = 17;

struct Resident {
    std::unique_ptr<Cluster> cluster;
    int64_t begins_at;  // by the worker's clock
};

// The clusters of a grid that have not started, the sum of the reports, and the first failure.
class Grid {
  public:
    explicit Grid(const Launch& launch) : launch_(launch) {
        for (int i = 0; i < 3; ++i) size_[i] = launch.grid[i] / launch.cluster[i];
        Random random(launch.seed);
        base_seed_ = random.next();
        order_.resize(uint64_t{size_[0]} * size_[1] * size_[2]);
        std::iota(order_.begin(), order_.end(), uint64_t{0});
        for (uint64_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random.next() % i]);
        total_.operations.resize(launch.program->operations.size());
    }

    uint64_t num_clusters() const { return order_.size(); }

    void work(uint64_t most_resident) {
        Report report;
        report.operations.resize(launch_.program->operations.size());
        std::vector<Resident> resident;
        try {
            size_t turn = 0;
            int64_t clock = 0;  // instructions that this worker's clusters have executed
            while (!has_failed_) {
                if (resident.size() < most_resident) {
                    if (auto cluster = next_cluster(report)) {
                        Random& random = cluster->random;
                        const bool is_late = random.below(kLateOneOf) == 0;
                        turn = resident.size();
                        resident.push_back({std::move(cluster), clock + (is_late ? random.length(kLogMostDelay) : 0)});
                    }
                }
                if (resident.empty()) break;
                turn = next_turn(resident, turn, clock);
                clock = std::max(clock, resident[turn].begins_at);  // if none has begun, skip to the first beginning
                Cluster& cluster = *resident[turn].cluster;
                const int64_t before = cluster.clock;
                const bool has_ended = cluster.run(kLeastSlice * cluster.random.length(kLogMostSlices));
                clock += cluster.clock - before;
                if (has_ended) {
                    resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(turn));
                } else {
                    ++turn;
                }
            }
        } catch (...) {  // a Fault or bad_alloc, which must not end in a thread: finish rethrows it
            const std::lock_guard lock(mutex_);
            if (!first_failure_) first_failure_ = std::current_exception();
            has_failed_ = true;
        }
        const std::lock_guard lock(mutex_);
        total_.add(report);
    }

    const Report& finish() const {
        if (first_failure_) std::rethrow_exception(first_failure_);
        return total_;
    }

  private:
    // Returns the next cluster that has begun, else the one that begins first.
    static size_t next_turn(const std::vector<Resident>& resident, size_t turn, int64_t clock) {
        size_t first = turn % resident.size();
        for (size_t i = 0; i < resident.size(); ++i) {
            const size_t place = (turn + i) % resident.size();
            if (resident[place].begins_at <= clock) return place;
            if (resident[place].begins_at < resident[first].begins_at) first = place;
        }
        return first;
    }

    std::unique_ptr<Cluster> next_cluster(Report& report) {
        const uint64_t place = next_++;
        if (place >= order_.size()) return nullptr;
        const uint64_t linear = order_[place];
        const uint32_t index[3] = {static_cast<uint32_t>(linear % size_[0]),
                                   static_cast<uint32_t>(linear / size_[0] % size_[1]),
                                   static_cast<uint32_t>(linear / size_[0] / size_[1])};
        return std::make_unique<Cluster>(launch_, index, base_seed_ ^ (linear * 0xd1342543de82ef95), report);
    }

    const Launch& launch_;
    uint32_t size_[3];  // in clusters
    uint64_t base_seed_;
    std::vector<uint64_t> order_;
    std::atomic<uint64_t> next_{0};
    std::atomic<bool> has_failed_{false};
    std::mutex mutex_;
    Report total_;
    std::exception_ptr first_failure_;
};

std::mutex ran_mutex;
std::set<std::string> ran;

}  // namespace

Report run_launch(const Launch& requested) {
    Launch launch = requested;
    launch.ordered_sums = launch.ordered_sums && launch.races;
    std::optional<LaunchHistory> history;
    if (launch.races) {
        if (launch.program->operations.size() > kMostRecordedOperations) {
            throw Fault("unsupported", "the race detector takes kernels of up to " +
                                           std::to_string(kMostRecordedOperations) + " instructions: pass races=False");
        }
        launch.history = &history.emplace([&](const Conflict& conflict) { return fault_of(launch, conflict); },
                                          launch.strict_proxy_reads);
        if (launch.before != nullptr) history->follow(std::move(*launch.before));
    }
    WriteLog log;
    if (launch.log_writes) launch.write_log = &log;
    Grid grid(launch);
    const uint64_t cluster_ctas = uint64_t{launch.cluster[0]} * launch.cluster[1] * launch.cluster[2];
    const uint64_t most_resident = std::max<uint64_t>(1, launch.num_resident / cluster_ctas);
    // Workers divide the CTAs that fit on the device at the same time. More workers than clusters would be idle.
    const uint64_t workers =
        std::max<uint64_t>(1, std::min({static_cast<uint64_t>(launch.workers), grid.num_clusters(), most_resident}));
    const auto share = [&](uint64_t worker) { return most_resident / workers + (worker < most_resident % workers); };
    std::vector<std::thread> helpers;
    for (uint64_t i = 1; i < workers; ++i) helpers.emplace_back([&grid, i, &share] { grid.work(share(i)); });
    grid.work(share(0));
    for (std::thread& helper : helpers) helper.join();
    Report report = grid.finish();
    report.writes = std::move(log.writes);
    if (history) report.accesses = history->take_accesses(launch.program->name);
    const std::lock_guard lock(ran_mutex);
    ran.insert(launch.program->name);
    return report;
}

std::set<std::string> take_kernels_that_ran() {
    const std::lock_guard lock(ran_mutex);
    return std::exchange(ran, {});
}

}  // namespace emulator
