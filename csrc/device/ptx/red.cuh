// red: an addition in global memory whose result the thread does not wait for.
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

}  // namespace fastattn::ptx
