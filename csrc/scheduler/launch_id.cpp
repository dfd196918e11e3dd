#include "scheduler/launch_id.h"

#include <atomic>
#include <random>

namespace fastattn {

uint64_t launch_id() {
    static std::atomic<uint64_t> next = [] {
        std::random_device random;
        return uint64_t{random()} << 32 | random();
    }();
    uint64_t id = 0;
    while (id == 0) id = next.fetch_add(1, std::memory_order_relaxed) << kLaunchCountBits;
    return id;
}

}  // namespace fastattn
