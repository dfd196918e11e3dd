// Which of several CTAs is the last to arrive, counted in memory that nobody has to zero: a memset before each launch
// would be one more node of a CUDA graph, and so would a kernel that merges after it.
//
// A counter holds the launch's token plus how many have arrived (host/launch_token.h); whatever does not have the
// token's upper bits counts as none. Why this is right:
// - Old contents. Each launch has a token of its own, and the last CTA to arrive leaves 0, which has no token's upper
//   bits. So a launch that is over leaves nothing behind that any launch, a replay of itself included, takes for its own:
//   a CUDA graph may replay the token as often as it likes. Numbers that other kernels left there match a token by an
//   accident of one in 2^40, since tokens start at random.
// - Two streams. Every launch gets its workspace from PyTorch's allocator, which hands memory out again to the same
//   stream only, where the next launch starts after this one; two launches never count in one counter at a time. Two
//   replays of one graph follow each other too.
// - Counting. Every change is a compare-and-swap of the whole number, so that no arrival is lost, and one CTA alone sees
//   the count become complete.
// - What the last one sees. One thread of each CTA counts, after a barrier that all threads of the CTA have reached with
//   their stores done. Its swap releases these at the scope of the GPU; the last one's swap reads from the chain of all
//   the others', acquires them, and passes them on to its CTA by the barrier that follows.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"
#include "host/launch_token.h"

namespace fastattn {

// Counts `brought` more of `all`, at most 2^kLaunchCountBits. True for the CTA that completes them.
__device__ __forceinline__ bool arrives_last(uint64_t* arrivals, uint64_t token, int32_t all, int32_t brought = 1) {
    for (uint64_t expected = 0;;) {
        const uint64_t arrived = (expected & ~kLaunchCountMask) == token ? expected & kLaunchCountMask : 0;
        const bool is_last = arrived + brought == static_cast<uint64_t>(all);
        const uint64_t found = ptx::atom_cas_acq_rel_b64(arrivals, expected, is_last ? 0 : token + arrived + brought);
        if (found == expected) return is_last;
        expected = found;
    }
}

// Whether all others have arrived: then this CTA is the last, counts as arrived, and need not leave anything for others.
__device__ __forceinline__ bool others_have_arrived(uint64_t* arrivals, uint64_t token, int32_t num_ctas) {
    const uint64_t others = token + static_cast<uint64_t>(num_ctas - 1);
    return ptx::atom_cas_acq_rel_b64(arrivals, others, 0) == others;
}

}  // namespace fastattn
