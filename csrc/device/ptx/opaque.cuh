// Hides a value's origin from the compiler: it then computes what follows from the value at each use, and keeps none of
// it in registers during a loop.
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ int32_t opaque(int32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Returns threadIdx.x, read anew: it takes no register before. PTX ISA, "Special Registers: %tid".
__device__ __forceinline__ int32_t tid_x() {
    int32_t tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

}  // namespace fastattn::ptx
