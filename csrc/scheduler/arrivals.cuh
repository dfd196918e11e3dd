// Finds which of several CTAs arrives last, by counting in memory that nobody has to zero. A memset before each launch
// would be one more node of a CUDA graph, and so would a kernel that combines after it.
//
// Every CTA opens the counter long before it arrives there. Opening replaces the counter's value by the launch's ID
// (scheduler/launch_id.h), unless the value already has the ID's upper bits. So each arrival is one addition, a single
// trip to L2, which returns the launch ID plus the number of earlier arrivals. The last CTA to arrive stores 0.
//
//   a CTA    open: compare and swap, while its first loads come    …    arrive: add    and, if it is the last: store 0
//
// Why this is right:
// - Old contents. Each launch has a launch ID of its own, and a launch that is over leaves 0, which has no launch ID's
//   upper bits. So no launch takes what another one left for its own, and a CUDA graph may replay a launch ID as often
//   as it likes. Launch IDs start at random: numbers of other kernels match one with a probability of 2^-40.
// - Two streams. Every launch gets its workspace from PyTorch's allocator, which hands memory out again only to the
//   same stream, after this launch: two launches never use a counter at the same time. Replays of one graph follow each
//   other too. Counters that a device or a stream keeps at zero would need no opening. But two graphs that were
//   captured on one stream may be replayed on two at a time, and a launch that is cut off would spoil all later ones.
// - Counting. A swap stores the launch ID only over a number of another launch, so no arrival is lost. A CTA adds only
//   to a counter in which it has seen this launch's ID. Exactly one CTA sees the count become complete.
// - Leaving 0. The last CTA to arrive stores 0 after all have arrived, and all have opened before that: no CTA puts the
//   launch ID back.
// - Visibility. One thread of each CTA counts, after a barrier that all its threads have reached with their stores
//   done. Its addition releases these stores at the scope of the GPU. The last addition reads from the chain of all
//   others and acquires their stores. The barrier that follows passes them on to the last CTA's threads.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"
#include "device/ptx/ld_acquire.cuh"
#include "host/host_device.h"
#include "scheduler/launch_id.h"

namespace fastattn {

// Opens a counter. The thread that will count calls it before it counts. Takes one trip to L2, or two where another
// kernel left a number: overlap it with other trips.
FASTATTN_DEVICE void open_arrivals(uint64_t* arrivals, uint64_t launch_id) {
    for (uint64_t expected = 0; (expected & ~kLaunchCountMask) != launch_id;) {
        const uint64_t found = ptx::atom_cas_relaxed_b64(arrivals, expected, launch_id);
        if (found == expected) return;
        expected = found;
    }
}

// Counts `num_arriving` more of `all` arrivals, at most 2^kLaunchCountBits. Returns true to the CTA that completes
// them.
FASTATTN_DEVICE bool arrives_last(uint64_t* arrivals, int32_t all, int32_t num_arriving = 1) {
    const uint64_t found = ptx::atom_add_acq_rel_b64(arrivals, num_arriving);
    const bool is_last = (found & kLaunchCountMask) + num_arriving == static_cast<uint64_t>(all);
    if (is_last) *arrivals = 0;
    return is_last;
}

// Counts one more in an opened counter, and returns the count before: a number that no other caller gets. It orders no
// other accesses.
FASTATTN_DEVICE uint32_t take_ticket(uint64_t* counter) {
    return static_cast<uint32_t>(ptx::atom_add_relaxed_b64(counter, 1) & kLaunchCountMask);
}

// Sets the counter back to 0. Called by the CTA that took the last ticket.
FASTATTN_DEVICE void reset_tickets(uint64_t* counter, uint64_t launch_id, uint32_t last) {
    ptx::atom_cas_relaxed_b64(counter, launch_id + last + 1, 0);
}

// Arrives if all others have, and returns whether it did: this CTA is then the last, and need not leave a partial.
FASTATTN_DEVICE bool arrives_if_last(uint64_t* arrivals, uint64_t launch_id, int32_t num_ctas) {
    const bool is_last = ptx::ld_acquire_b64(arrivals) == launch_id + static_cast<uint64_t>(num_ctas - 1);
    if (is_last) *arrivals = 0;
    return is_last;
}

}  // namespace fastattn
