// stmatrix: a warp stores 8x8 matrices of 16-bit elements to shared memory. PTX ISA, "Warp Level Matrix
// Multiply-Accumulate Instructions: stmatrix". sm_90.
#pragma once

#include <cstdint>

namespace fastattn::ptx {

// Stores four matrices, with the same fragments as mma: r[i] of lane l holds elements [l / 4][2 * (l % 4) + 0, 1] of
// matrix i. Lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Stores transposed matrices: r[i] of lane l holds elements [2 * (l % 4) + 0, 1][l / 4] of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace fastattn::ptx
