// Counts within one launch, in memory that nobody has to zero, as arrivals.cuh does. It is for CTAs that count as soon
// as they start: opening a counter before would be one more trip. A CTA adds, and sees whether the number was this
// launch's.
//
// All that arrivals.cuh says of launch IDs, replays and streams holds here too. Beyond that:
// - Resetting. The count alone does not say that it is complete. Its users agree on a last one, which has seen all
//   others count for the last time (see leave_queue() in int8_matmul/quantize_tokens.cuh), and which stores 0. No
//   thread is within count() then, so none can put the launch's number back.
// - Old contents. An addition to old contents is lost when they are replaced. A thread that added to them counts again,
//   unless it replaces them itself. Additions may carry the old number up into this launch's. The count there is then
//   0, or that of the threads that found the launch's number: each thread that did not find it counts again here too.
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

    // Counts one more, and returns how many there were before. kOrdered: a thread that later waits, or counts with
    // kOrdered, sees all that this thread has done, or has seen done. Otherwise this thread only gets a number that no
    // other gets.
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

    // Waits until `expected` threads have counted. No more may count afterwards, as it waits for equality.
    FASTATTN_DEVICE void wait(uint32_t expected) const {
        while (ptx::ld_acquire_b64(value) != launch_id + expected) {
        }
    }
};

}  // namespace fastattn
