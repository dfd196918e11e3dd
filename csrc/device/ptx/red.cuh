// red: an operation in global memory whose result the thread does not wait for.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void red_add_f32(float value, float* global) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

// What this thread has done, or has seen done, before, is seen by a thread that acquires the sum.
__device__ __forceinline__ void red_release_add_s32(int32_t* global, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// PTX has no maximum of floats. Their bits grow with them as signed integers where they are not negative, and shrink as
// unsigned ones where they are, and then lie above all others.
__device__ __forceinline__ void red_max_f32(float value, float* global) {
    const uint32_t bits = __float_as_uint(value);
    if (bits >> 31 == 0) {
        asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(global), "r"(bits) : "memory");
    } else {
        asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(global), "r"(bits) : "memory");
    }
}

}  // namespace fastattn::ptx
