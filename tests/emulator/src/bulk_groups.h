// The bulk async-groups of a warp's lanes: copies out of shared memory, which the thread that started them waits for.
#pragma once

#include <vector>

#include "access_history.h"
#include "async_engine.h"
#include "types.h"

namespace emulator {

class BulkGroups {
  public:
    // A copy reads its source first, and is complete when its write is done.
    struct Copy {
        AsyncEngine::Handle read, write;
        AsyncId reading, writing;  // the race detector's ids of the two
    };
    void add(int lane, const Copy& copy) { lanes_[lane].copies.push_back({copy, lanes_[lane].committed}); }
    void commit(int lane) { ++lanes_[lane].committed; }

    // Waits until at most the `most_pending` latest groups are in flight; with `only_reads`, until the others have read
    // their sources. Calls waited(AsyncId) for each read and each write that this wait covers.
    template <typename Function>
    void wait(AsyncEngine& engine, int lane, uint32_t most_pending, bool only_reads, Function&& waited) {
        Lane& of = lanes_[lane];
        std::vector<Member> left;
        for (Member& member : of.copies) {
            const bool is_covered = member.group + uint64_t{most_pending} < of.committed;
            if (is_covered) {
                engine.finish(only_reads ? member.copy.read : member.copy.write);
                if (!member.is_read) waited(member.copy.reading);
                if (!only_reads) waited(member.copy.writing);
                member.is_read = true;
            }
            if (!is_covered || only_reads) left.push_back(member);
        }
        of.copies = std::move(left);
    }

  private:
    struct Member {
        Copy copy;
        uint32_t group;
        bool is_read = false;
    };
    struct Lane {
        uint32_t committed = 0;
        std::vector<Member> copies;
    };
    Lane lanes_[kWarpSize];
};

}  // namespace emulator
