// A value whose origin the compiler does not see: what is computed from it is computed where it stands, and not kept in
// registers over a loop.
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ int32_t opaque(int32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace fastattn::ptx
