// Provides the check that a CTA has enough registers. Kernels whose warpgroups exchange registers
// (ptx::setmaxnreg_inc()) assert it.
#pragma once

namespace fastattn {

// Returns whether a CTA that has an SM to itself has enough registers. `registers` is a sum over the CTA's warpgroups,
// of the registers that one thread of the warpgroup will have. At the start all threads have the same number of
// registers, a multiple of 8.
constexpr bool has_registers_for(int num_warpgroups, int registers) {
    constexpr int kRegistersOfSm = 65536, kThreadsOfWarpgroup = 128;
    return registers <= num_warpgroups * (kRegistersOfSm / (kThreadsOfWarpgroup * num_warpgroups) / 8 * 8);
}

}  // namespace fastattn
