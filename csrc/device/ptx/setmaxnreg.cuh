// setmaxnreg: a warpgroup gives registers back to its CTA, or takes more. PTX ISA, "Miscellaneous Instructions:
// setmaxnreg".
#pragma once

namespace fastattn::ptx {

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until the CTA has enough free registers.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace fastattn::ptx
