// min.NaN, max.NaN: the lesser and the greater of two numbers, or NaN if one of them is NaN.
// PTX ISA, "Floating Point Instructions: min, max".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ float min_nan_f32(float a, float b) {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
}

__device__ __forceinline__ float max_nan_f32(float a, float b) {
    float greatest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(a), "f"(b));
    return greatest;
}

}  // namespace fastattn::ptx
