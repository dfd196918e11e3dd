// The registers of a CTA whose warpgroups exchange them (ptx::setmaxnreg_inc()): kernels assert that it has as many as
// they take.
#pragma once

namespace fastattn {

// Whether a CTA that has an SM for itself has so many registers. `registers`: those of a thread of each of its
// warpgroups, added up. It starts with as many as all its threads can have alike, which comes in steps of 8.
constexpr bool has_registers_for(int num_warpgroups, int registers) {
    constexpr int kRegistersOfSm = 65536, kThreadsOfWarpgroup = 128;
    return registers <= num_warpgroups * (kRegistersOfSm / (kThreadsOfWarpgroup * num_warpgroups) / 8 * 8);
}

}  // namespace fastattn
