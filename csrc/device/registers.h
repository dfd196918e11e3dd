// Kernels whose warpgroups exchange registers (ptx::setmaxnreg_inc()) assert that the CTA has enough for all.
#pragma once

namespace fastattn {

// Returns whether a CTA that has an SM to itself has enough registers. `registers`: those of one thread of each of its
// warpgroups, added up. At the start all threads have equally many, a multiple of 8.
constexpr bool has_registers_for(int num_warpgroups, int registers) {
    constexpr int kRegistersOfSm = 65536, kThreadsOfWarpgroup = 128;
    return registers <= num_warpgroups * (kRegistersOfSm / (kThreadsOfWarpgroup * num_warpgroups) / 8 * 8);
}

}  // namespace fastattn
