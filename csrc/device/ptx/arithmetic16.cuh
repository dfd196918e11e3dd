// sub, fma on two 16-bit floats in one register. PTX ISA, "Half Precision Floating Point Instructions".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ uint32_t sub_rn_f16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ uint32_t fma_rn_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

}  // namespace fastattn::ptx
