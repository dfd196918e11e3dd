// Counters of a launch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace emulator {

// Counters of one instruction of the program.
struct Counts {
    uint64_t warps = 0;                      // times that a warp executed it
    uint64_t lanes = 0;                      // lanes that took part, summed over those executions
    uint64_t bytes = 0;                      // moved from or to global memory
    uint64_t sectors = 0;                    // 32-byte sectors of global memory touched, summed over requests
    uint64_t wavefronts = 0, conflicts = 0;  // of shared memory; conflicts: wavefronts beyond the least possible

    void add(const Counts& other) {
        warps += other.warps, lanes += other.lanes, bytes += other.bytes, sectors += other.sectors;
        wavefronts += other.wavefronts, conflicts += other.conflicts;
    }
};

// A store, atomic or reduction of a warp to global memory.
struct GlobalWrite {
    uint32_t cta;      // linear index in the grid
    int line;          // in the PTX text
    uint64_t address;  // of the first lane that takes part
};

struct PastAccesses;

struct Report {
    std::vector<Counts> operations;  // one for each operation of the program
    // Times that a warp waited: at each barrier of its CTA, at the cluster's barrier, for a phase of an mbarrier.
    std::array<uint64_t, 16> barrier_waits{};
    uint64_t cluster_barrier_waits = 0, mbarrier_waits = 0;
    std::array<uint64_t, 16> unawaited{};    // CTAs that ended with threads arrived at a barrier that nobody waited for
    std::vector<GlobalWrite> writes;         // of the whole grid, in the order of execution; empty without `log_writes`
    std::shared_ptr<PastAccesses> accesses;  // for the race detector of the next launch; nullptr without `races`

    void add(const Report& other) {
        operations.resize(std::max(operations.size(), other.operations.size()));
        for (size_t i = 0; i < other.operations.size(); ++i) operations[i].add(other.operations[i]);
        for (size_t i = 0; i < barrier_waits.size(); ++i) barrier_waits[i] += other.barrier_waits[i];
        for (size_t i = 0; i < unawaited.size(); ++i) unawaited[i] += other.unawaited[i];
        cluster_barrier_waits += other.cluster_barrier_waits;
        mbarrier_waits += other.mbarrier_waits;
    }
};

}  // namespace emulator
