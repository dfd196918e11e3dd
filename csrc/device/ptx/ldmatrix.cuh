// ldmatrix: four 8x8 matrices of 16-bit elements from shared memory into the registers of a warp.
// Lane l passes the address of row l % 8 of matrix l / 8, and receives one register of each matrix: elements
// [l / 4][2 * (l % 4) + 0, 1], or with .trans elements [2 * (l % 4) + 0, 1][l / 4].
// PTX ISA, "Warp-level Matrix Instructions: ldmatrix".
#pragma once

#include <cstdint>

namespace fastattn::ptx {

// volatile and the clobber keep the loads between the barriers that make their data valid.
__device__ __forceinline__ void ldmatrix_m8n8_x4(uint32_t (&r)[4], uint32_t shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_m8n8_x4_trans(uint32_t (&r)[4], uint32_t shared_address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address)
                 : "memory");
}

}  // namespace fastattn::ptx
