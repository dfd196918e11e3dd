// st.shared of vectors that the compiler would split: stores of four bytes would have bank conflicts that stores of
// eight bytes do not have. PTX ISA, "Data Movement and Conversion Instructions: st".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void st_shared_v2_f32(uint32_t shared, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(first), "f"(second) : "memory");
}

}  // namespace fastattn::ptx
