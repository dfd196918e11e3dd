// Finds which of several CTAs arrives last, with a counter in memory that nobody has to zero. A memset before each
// launch would be one more node of a CUDA graph, and so would a second kernel that combines the results.
//
// Every CTA opens the counter long before it arrives. Opening replaces the counter's value by the launch's ID
// (scheduler/launch_id.h), unless the value already has the ID's upper bits. So each arrival is one addition, a single
// trip to L2, which returns the launch ID plus the number of earlier arrivals. The last CTA to arrive stores 0.
//
//   a CTA    open: compare and swap, while its first loads come    …    arrive: add    and, if it is the last: store 0
//
// Why this is right:
// - Old contents. Each launch has its own launch ID. A launch that has ended leaves 0, and the upper bits of a launch
//   ID are never 0. So no launch mistakes a value that another launch has left for its own, and a CUDA graph may replay
//   a launch with the same ID any number of times. Launch IDs start at a random number, so that a value of another
//   kernel has a launch ID's upper bits with a probability of 2^-40.
// - Two streams. Every launch gets its workspace from PyTorch's allocator, which reuses the memory only for later
//   launches on the same stream. So two launches never use a counter at the same time. Replays of one graph also run
//   one after the other. Counters that are kept at zero for each device or stream would need no opening. But two graphs
//   that were captured on one stream may be replayed on two streams at the same time, and a launch that is aborted
//   would leave wrong counts for all later launches.
// - Counting. A swap stores the launch ID only over a number of another launch, so no arrival is lost. A CTA adds only
//   to a counter in which it has seen this launch's ID. Exactly one CTA sees the count become complete.
// - Leaving 0. The last CTA to arrive stores 0 after all have arrived, and all have opened before that: no CTA puts the
//   launch ID back.
// - Visibility. One thread of each CTA counts, after a barrier that all threads of the CTA reach after their stores.
//   Its addition releases these stores at GPU scope. The last addition reads a value that all earlier additions have
//   contributed to (a release sequence), and acquires their stores. The barrier that follows makes the stores visible
//   to all threads of the last CTA.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"
#include "device/ptx/ld_acquire.cuh"
#include "host/host_device.h"
#include "scheduler/launch_id.h"

namespace fastattn {

// Opens a counter. Called by the thread that will count, before it counts. Takes one trip to L2, or two if another
// kernel left a number there. Callers should overlap this with other trips.
FASTATTN_DEVICE void open_arrivals(uint64_t* arrivals, uint64_t launch_id) {
    for (uint64_t expected = 0; (expected & ~kLaunchCountMask) != launch_id;) {
        const uint64_t found = ptx::atom_cas_relaxed_b64(arrivals, expected, launch_id);
        if (found == expected) return;
        expected = found;
    }
}

// Adds num_arriving arrivals to an opened counter. Returns true to the CTA that makes the arrivals complete. all: the
// number of arrivals in total, at most 2^kLaunchCountBits.
FASTATTN_DEVICE bool arrives_last(uint64_t* arrivals, int32_t all, int32_t num_arriving = 1) {
    const uint64_t found = ptx::atom_add_acq_rel_b64(arrivals, num_arriving);
    const bool is_last = (found & kLaunchCountMask) + num_arriving == static_cast<uint64_t>(all);
    if (is_last) *arrivals = 0;
    return is_last;
}

// Adds one to an opened counter, and returns the count before, which no other caller gets. Orders no other accesses.
FASTATTN_DEVICE uint32_t take_ticket(uint64_t* counter) {
    return static_cast<uint32_t>(ptx::atom_add_relaxed_b64(counter, 1) & kLaunchCountMask);
}

// Sets the counter back to 0. Called by the CTA that took the last ticket, `last`.
FASTATTN_DEVICE void reset_tickets(uint64_t* counter, uint64_t launch_id, uint32_t last) {
    ptx::atom_cas_relaxed_b64(counter, launch_id + last + 1, 0);
}

// If all of the num_ctas - 1 other CTAs have arrived, arrives as the last and returns true: this CTA need not leave a
// partial. Otherwise returns false and does not arrive.
FASTATTN_DEVICE bool arrives_if_last(uint64_t* arrivals, uint64_t launch_id, int32_t num_ctas) {
    const bool is_last = ptx::ld_acquire_b64(arrivals) == launch_id + static_cast<uint64_t>(num_ctas - 1);
    if (is_last) *arrivals = 0;
    return is_last;
}

}  // namespace fastattn
