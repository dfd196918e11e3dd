// st.shared of vectors, where the compiler would split them: stores of four bytes would meet in banks that those of
// eight do not. PTX ISA, "Data Movement and Conversion Instructions: st".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

__device__ __forceinline__ void st_shared_v2_f32(uint32_t shared, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(first), "f"(second) : "memory");
}

}  // namespace fastattn::ptx
