// IDs by which a launch recognises what it has itself left in memory. scheduler/arrivals.cuh and
// scheduler/launch_counter.cuh say why no other launch takes that for its own.
#pragma once

#include <cstdint>

namespace fastattn {

// The lowest bits of a launch ID are zero: counters count CTAs or tokens in them.
inline constexpr int kLaunchCountBits = 24;
inline constexpr uint64_t kLaunchCountMask = (uint64_t{1} << kLaunchCountBits) - 1;

// Returns a new ID for each launch of this process, never zero. IDs start at random, so that memory of another program
// or kernel holds one with a probability of 2^-40. After 2^40 launches IDs repeat, which is harmless: a launch that is
// over leaves its ID nowhere.
uint64_t launch_id();

}  // namespace fastattn
