// red: an addition in global memory whose result nobody waits for; and the two sides of taking turns on one address.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red", "ld.acquire".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void red_add_f32(float value, float* global) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

// What this thread has done, or has seen done, before, is seen by whoever acquires the sum.
__device__ __forceinline__ void red_release_add_s32(int32_t* global, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

__device__ __forceinline__ int32_t ld_acquire_s32(const int32_t* global) {
    int32_t value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(global) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_acquire_b64(const uint64_t* global) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(global) : "memory");
    return value;
}

}  // namespace fastattn::ptx
