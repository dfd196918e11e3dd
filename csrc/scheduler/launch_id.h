// IDs by which a launch recognises values in memory that it has written itself. scheduler/arrivals.cuh and
// scheduler/launch_counter.cuh say why no other launch mistakes such a value for its own.
#pragma once

#include <cstdint>

namespace fastattn {

// The lowest bits of a launch ID are zero. Counters keep their counts in them: of CTAs, nodes of a tree, steps, tokens
// or claimed work tiles.
inline constexpr int kLaunchCountBits = 24;
inline constexpr uint64_t kLaunchCountMask = (uint64_t{1} << kLaunchCountBits) - 1;

// Returns a new ID for each launch of this process, never zero. IDs start at a random number, so that memory of another
// program or kernel holds a given ID with a probability of 2^-40. IDs repeat after 2^40 launches, which is harmless,
// because a launch that has ended leaves its ID nowhere.
uint64_t launch_id();

}  // namespace fastattn
