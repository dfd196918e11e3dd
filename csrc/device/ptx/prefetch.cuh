// prefetch: brings a cache line of global memory into a cache. PTX ISA, "Data Movement and Conversion Instructions:
// prefetch".
#pragma once

namespace fastattn::ptx {

__device__ __forceinline__ void prefetch_global_L2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace fastattn::ptx
