// Counters of one launch, in memory that nobody has to zero, as in arrivals.cuh; for many CTAs that count at once. Each
// adds in one round trip, where all that compare and swap would make each other repeat it.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"
#include "device/ptx/red.cuh"
#include "host/launch_token.h"

namespace fastattn {

// A counter is of this launch where its upper bits are those of the launch's token (host/launch_token.h), and what else
// stands there counts as none. A CUDA graph replays the token: the launch has to leave another value behind, as zero.
struct LaunchCounter {
    static constexpr uint64_t kCountMask = (uint64_t{1} << kLaunchCountBits) - 1;

    uint64_t* value;
    uint64_t token;

    __device__ __forceinline__ LaunchCounter(uint64_t* value, uint64_t token) : value(value), token(token) {}

    __device__ __forceinline__ bool is_ours(uint64_t found) const { return (found & ~kCountMask) == token; }

    // Counts one more, and returns how many there were before. kOrdered: what this thread has done, or has seen done,
    // before is seen by whoever counts so or waits later. Otherwise it only gets a number that nobody else gets.
    template <bool kOrdered = true>
    __device__ __forceinline__ uint32_t count() const {
        for (;;) {
            const uint64_t found = kOrdered ? ptx::atom_add_acq_rel_b64(value, 1) : ptx::atom_add_relaxed_b64(value, 1);
            if (is_ours(found)) return static_cast<uint32_t>(found & kCountMask);
            // Who replaces what is not ours has counted the first; the others, who also added to it, count once more.
            for (uint64_t expected = found + 1; !is_ours(expected);) {
                const uint64_t now = kOrdered ? ptx::atom_cas_acq_rel_b64(value, expected, token + 1)
                                              : ptx::atom_cas_relaxed_b64(value, expected, token + 1);
                if (now == expected) return 0;
                expected = now;
            }
        }
    }

    __device__ __forceinline__ void wait(uint32_t expected) const {
        while (ptx::ld_acquire_b64(value) != token + expected) {
        }
    }
};

}  // namespace fastattn
