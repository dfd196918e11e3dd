// Counts within one launch, in memory that nobody has to zero, as arrivals.cuh does. This counter is for CTAs that
// count as soon as they start, for which opening the counter first would be one more trip. Instead, a thread adds one,
// and sees from the value before whether the counter already had this launch's ID.
//
// What arrivals.cuh says of launch IDs, replays and streams holds here too. In addition:
// - Resetting. The count does not show that it is complete. The users of a counter agree on a last thread, which knows
//   that all others have counted for the last time (see leave_queue() in int8_matmul/quantize_tokens.cuh), and which
//   stores 0. No thread is within count() then, so none can put the launch ID back.
// - Old contents. An addition to old contents is lost when the launch ID replaces them. The thread that made this
//   addition counts again, unless it replaces the old contents itself. Additions may also carry the old contents up to
//   this launch's ID with a count of 0. Threads that then find the launch ID count from there. A thread whose addition
//   did not find the launch ID counts again in this case too.
#pragma once

#include <cstdint>

#include "device/ptx/atom.cuh"
#include "device/ptx/ld_acquire.cuh"
#include "host/host_device.h"
#include "scheduler/launch_id.h"

namespace fastattn {

struct LaunchCounter {
    uint64_t* value;
    uint64_t launch_id;

    FASTATTN_DEVICE LaunchCounter(uint64_t* value, uint64_t launch_id) : value(value), launch_id(launch_id) {}

    FASTATTN_DEVICE bool is_ours(uint64_t found) const { return (found & ~kLaunchCountMask) == launch_id; }

    // Adds one, and returns the count before, which no other thread gets. kOrdered: a thread that later waits, or
    // counts with kOrdered, sees all writes that this thread has made or has seen. Otherwise no other accesses are
    // ordered.
    template <bool kOrdered = true>
    FASTATTN_DEVICE uint32_t count() const {
        for (;;) {
            const uint64_t found = kOrdered ? ptx::atom_add_acq_rel_b64(value, 1) : ptx::atom_add_relaxed_b64(value, 1);
            if (is_ours(found)) return static_cast<uint32_t>(found & kLaunchCountMask);
            for (uint64_t expected = found + 1; !is_ours(expected);) {
                const uint64_t now = kOrdered ? ptx::atom_cas_acq_rel_b64(value, expected, launch_id + 1)
                                              : ptx::atom_cas_relaxed_b64(value, expected, launch_id + 1);
                if (now == expected) return 0;
                expected = now;
            }
        }
    }

    // Waits until exactly `expected` threads have counted. No more threads may count afterwards, because the wait would
    // miss the number.
    FASTATTN_DEVICE void wait(uint32_t expected) const {
        while (ptx::ld_acquire_b64(value) != launch_id + expected) {
        }
    }
};

}  // namespace fastattn
