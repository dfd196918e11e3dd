// A value whose origin the compiler does not see: what is computed from it is computed where it stands, and not kept in
// registers over a loop.
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ int32_t opaque(int32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// threadIdx.x, read anew: it then takes no register before. PTX ISA, "Special Registers: %tid".
__device__ __forceinline__ int32_t tid_x() {
    int32_t tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}

}  // namespace fastattn::ptx
