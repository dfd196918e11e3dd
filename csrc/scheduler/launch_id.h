// IDs by which a launch knows what it has itself left in memory. scheduler/arrivals.cuh and
// scheduler/launch_counter.cuh say why no other launch takes that for its own.
#pragma once

#include <cstdint>

namespace fastattn {

// The lowest bits of a launch ID are zero: there CTAs and tokens are counted.
inline constexpr int kLaunchCountBits = 24;
inline constexpr uint64_t kLaunchCountMask = (uint64_t{1} << kLaunchCountBits) - 1;

// Returns a new ID for each launch of this process, never zero, from a random start: so memory that another program or
// kernel left behind holds one by an accident of 1 in 2^40. After 2^40 launches launch IDs come again, which is
// harmless: a launch that is over leaves its launch ID nowhere.
uint64_t launch_id();

}  // namespace fastattn
