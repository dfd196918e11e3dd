// The bulk async-groups of a warp's lanes: copies out of shared memory that a thread waits for.
#pragma once

#include <vector>

#include "async_engine.h"
#include "types.h"

namespace emulator {

class BulkGroups {
  public:
    // A copy reads its source first, and is complete when `write` is done.
    void add(int lane, AsyncEngine::Handle read, AsyncEngine::Handle write) {
        lanes_[lane].copies.push_back({lanes_[lane].committed, read, write});
    }
    void commit(int lane) { ++lanes_[lane].committed; }

    // Until no more than the `most_pending` latest groups are under way; `only_reads`: in so far as they read.
    void wait(AsyncEngine& engine, int lane, uint32_t most_pending, bool only_reads) {
        Lane& of = lanes_[lane];
        std::vector<Copy> left;
        for (const Copy& copy : of.copies) {
            if (copy.group + uint64_t{most_pending} < of.committed) engine.finish(only_reads ? copy.read : copy.write);
            if (!engine.is_done(copy.write)) left.push_back(copy);
        }
        of.copies = std::move(left);
    }

  private:
    struct Copy {
        uint32_t group;
        AsyncEngine::Handle read, write;
    };
    struct Lane {
        uint32_t committed = 0;
        std::vector<Copy> copies;
    };
    Lane lanes_[kWarpSize];
};

}  // namespace emulator
