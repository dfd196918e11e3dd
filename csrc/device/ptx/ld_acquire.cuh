// ld.acquire: a load that also makes all writes visible that precede the release of the number that it reads. PTX ISA,
// "Data Movement and Conversion Instructions: ld".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

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
