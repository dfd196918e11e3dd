// The grid: CTAs in an order drawn from the seed, on as many threads as there are workers.
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "machine.h"

namespace emulator {

Report run_launch(const Launch& launch) {
    const uint64_t num_ctas = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    Random random(launch.seed);
    const uint64_t base_seed = random.next();
    std::vector<uint64_t> order(num_ctas);
    std::iota(order.begin(), order.end(), uint64_t{0});
    for (uint64_t i = num_ctas; i > 1; --i) std::swap(order[i - 1], order[random.next() % i]);

    Report total;
    total.operations.resize(launch.program->operations.size());
    std::atomic<uint64_t> next_cta{0};
    std::atomic<bool> has_failed{false};
    std::mutex mutex;
    std::optional<Fault> first_fault;
    const auto work = [&] {
        Report report;
        report.operations.resize(launch.program->operations.size());
        while (!has_failed) {
            const uint64_t place = next_cta++;
            if (place >= num_ctas) break;
            const uint64_t linear = order[place];
            const uint32_t index[3] = {static_cast<uint32_t>(linear % launch.grid[0]),
                                       static_cast<uint32_t>(linear / launch.grid[0] % launch.grid[1]),
                                       static_cast<uint32_t>(linear / launch.grid[0] / launch.grid[1])};
            try {
                Cta(launch, index, base_seed ^ (linear * 0xd1342543de82ef95), report).run();
            } catch (const Fault& fault) {
                const std::lock_guard lock(mutex);
                if (!first_fault) first_fault = fault;
                has_failed = true;
            }
        }
        const std::lock_guard lock(mutex);
        total.add(report);
    };
    std::vector<std::thread> helpers;
    for (int i = 1; i < launch.workers && static_cast<uint64_t>(i) < num_ctas; ++i) helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers) helper.join();
    if (first_fault) throw *first_fault;
    return total;
}

}  // namespace emulator
