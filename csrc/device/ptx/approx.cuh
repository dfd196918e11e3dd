// ex2, rcp: approximate two to the power of x (2 ulp) and 1 / x (1 ulp).
// PTX ISA, "Floating Point Instructions: ex2, rcp".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace fastattn::ptx
