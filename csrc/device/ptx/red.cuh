// red: an operation in global memory whose result the thread does not wait for.
// PTX ISA, "Parallel Synchronization and Communication Instructions: red".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void red_add_f32(float value, float* global) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
}

// Adds to four adjacent floats. Each addition is atomic, but not the four together. Needs sm_90.
__device__ __forceinline__ void red_add_v4_f32(const float (&values)[4], float* global) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(values[0]),
                 "f"(values[1]), "f"(values[2]), "f"(values[3])
                 : "memory");
}

// Adds. A thread that reads the sum with acquire semantics then sees every write that this thread made, or saw, before.
__device__ __forceinline__ void red_release_add_s32(int32_t* global, int32_t value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// Replaces the float in global memory by `value` if `value` is larger. PTX has red.max for integers, but not for fp32,
// so the bits are compared. As signed integers, the bits of a float that is not negative are larger than those of any
// smaller float. As unsigned integers, the bits of a negative float are smaller than those of any smaller float, and
// larger than those of any float that is not negative.
__device__ __forceinline__ void red_max_f32(float value, float* global) {
    const uint32_t bits = __float_as_uint(value);
    if (bits >> 31 == 0) {
        asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(global), "r"(bits) : "memory");
    } else {
        asm volatile("red.relaxed.gpu.global.min.u32 [%0], %1;" ::"l"(global), "r"(bits) : "memory");
    }
}

}  // namespace fastattn::ptx
