// The bulk async-groups of a warp's lanes: copies out of shared memory that a thread waits for.
#pragma once

#include <vector>

#include "access_history.h"
#include "async_engine.h"
#include "types.h"

namespace emulator {

class BulkGroups {
  public:
    // A copy reads its source first, and is complete when `write` is done; and the same two for the race detector.
    struct Copy {
        AsyncEngine::Handle read, write;
        AsyncId reading, writing;
    };
    void add(int lane, const Copy& copy) { lanes_[lane].copies.push_back({copy, lanes_[lane].committed}); }
    void commit(int lane) { ++lanes_[lane].committed; }

    // Until no more than the `most_pending` latest groups are under way; `only_reads`: in so far as they read. Calls
    // waited(AsyncId) for each part of a copy that has been waited for.
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
