// Counts which of several CTAs is the last to arrive, in memory that nobody has to zero: a memset before each launch
// would be one more node of a CUDA graph, and so would a kernel that combines after it.
//
// A counter is opened, by every CTA that will arrive there and long before it does: the number that stands in it
// becomes the launch's ID (scheduler/launch_id.h), unless it already has the launch ID's upper bits. So each arrival is
// one addition, a single trip to L2, which finds the launch ID plus how many have arrived before; the last one leaves
// 0.
//
//   a CTA    open: compare and swap, while its first loads come    …    arrive: add    and, if it is the last: store 0
//
// Why this is right:
// - Old contents. Each launch has a launch ID of its own, and what is over leaves 0, which has no launch ID's upper
//   bits. So it leaves nothing behind that any launch, a replay of itself included, takes for its own: a CUDA graph may
//   replay the launch ID as often as it likes. Numbers that other kernels left there match a launch ID by an accident
//   of one in 2^40, since launch IDs start at random.
// - Two streams. Every launch gets its workspace from PyTorch's allocator, which hands memory out again to the same
//   stream only, where the next launch touches memory after this one; two launches never count in one counter at a
//   time. Two replays of one graph follow each other too. Counters that a device or a stream kept at zero would need no
//   opening, but two graphs that were captured on one stream may be replayed on two at a time, and a launch that is cut
//   off would spoil all that follow.
// - Counting. A swap puts a launch ID only where no number of this launch stands, so that none is lost. A CTA adds
//   only to a counter in which it has seen this launch's ID. One CTA alone sees the count become complete.
// - Leaving 0. The last CTA to arrive does so when all have arrived, and before that they have opened: nobody puts the
//   launch ID back.
// - What the last one sees. One thread of each CTA counts, after a barrier that all threads of the CTA have reached
//   with their stores done. Its addition releases these at the scope of the GPU; the last one's reads from the chain of
//   all the others', acquires them, and passes them on to its CTA by the barrier that follows.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"
#include "device/ptx/ld_acquire.cuh"
#include "host/host_device.h"
#include "scheduler/launch_id.h"

namespace fastattn {

// Called by the thread that will count, before it does. Takes one trip to L2 if the last launch there has counted, else
// two: hide it behind other trips.
FASTATTN_DEVICE void open_arrivals(uint64_t* arrivals, uint64_t launch_id) {
    for (uint64_t expected = 0; (expected & ~kLaunchCountMask) != launch_id;) {
        const uint64_t found = ptx::atom_cas_relaxed_b64(arrivals, expected, launch_id);
        if (found == expected) return;
        expected = found;
    }
}

// Counts `brought` more of `all`, at most 2^kLaunchCountBits. Returns true for the CTA that completes them.
FASTATTN_DEVICE bool arrives_last(uint64_t* arrivals, int32_t all, int32_t brought = 1) {
    const uint64_t found = ptx::atom_add_acq_rel_b64(arrivals, brought);
    const bool is_last = (found & kLaunchCountMask) + brought == static_cast<uint64_t>(all);
    if (is_last) *arrivals = 0;
    return is_last;
}

// Counts one more in an opened counter, and returns how many came before: a number that nobody else gets. It orders
// nothing else.
FASTATTN_DEVICE uint32_t take_number(uint64_t* counter) {
    return static_cast<uint32_t>(ptx::atom_add_relaxed_b64(counter, 1) & kLaunchCountMask);
}

// Leaves 0. Called by the one that took the last number.
FASTATTN_DEVICE void reset_numbers(uint64_t* counter, uint64_t launch_id, uint32_t last) {
    ptx::atom_cas_relaxed_b64(counter, launch_id + last + 1, 0);
}

// Returns whether all others have arrived: then this CTA is the last, counts as arrived, and need not leave a partial.
FASTATTN_DEVICE bool others_have_arrived(uint64_t* arrivals, uint64_t launch_id, int32_t num_ctas) {
    const bool is_last = ptx::ld_acquire_b64(arrivals) == launch_id + static_cast<uint64_t>(num_ctas - 1);
    if (is_last) *arrivals = 0;
    return is_last;
}

}  // namespace fastattn
