// cvt: converts between fp32, 16-bit floats and fp8. PTX ISA, "Data Movement and Conversion Instructions: cvt".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

// The lower half of the result is `low`. Rounds to nearest even.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float high, float low) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float cvt_f32_f16(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// Converts pairs of fp8 numbers, the lower and the upper half of `four`. Needs sm_89.
__device__ __forceinline__ uint2 cvt_rn_f16x2_e4m3x2(uint32_t four) {
    uint2 pairs;
    asm("{\n"
        ".reg .b16 lower, upper;\n"
        "mov.b32 {lower, upper}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lower;\n"
        "cvt.rn.f16x2.e4m3x2 %1, upper;\n"
        "}\n"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(four));
    return pairs;
}

}  // namespace fastattn::ptx
