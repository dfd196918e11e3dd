// st.shared of vectors that the compiler would split: stores of four bytes would have bank conflicts that wider stores
// do not have. PTX ISA, "Data Movement and Conversion Instructions: st".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void st_shared_v4_f32(uint32_t shared, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(values[0]), "f"(values[1]),
                 "f"(values[2]), "f"(values[3])
                 : "memory");
}

}  // namespace fastattn::ptx
