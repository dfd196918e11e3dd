// Hides a value's origin from the compiler, which then computes what depends on the value again at each use instead of
// keeping it in registers during a loop.
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ int32_t opaque(int32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Reads threadIdx.x again at each call, so that no register holds it between calls. PTX ISA, "Special Registers: %tid".
__device__ __forceinline__ int32_t tid_x() {
    int32_t tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

}  // namespace fastattn::ptx
