// Computes the two products of attention on 8-bit keys and values, which are decoded exactly to 16-bit floats in
// registers (cache_decoding.cuh). The caller multiplies both results by Decoding::kFactor.
//
// Copies, swizzles and ldmatrix treat a row as 16-bit elements that hold two neighbouring dims each. So a lane receives
// four neighbouring dims where a matrix of 16-bit elements would give it two. The order of dims is free as long as both
// operands of a product agree:
//   Q·Kᵀ  of each 16 dims, lane l holds dims 4 * (l % 4) + 0 … 3 as its elements of the MMA's k dim. Queries are staged
//         in this order.
//   P·V   of each 16 dims, one MMA takes the even dims and another MMA the odd dims. In the two MMAs together, lane l
//         accumulates dims 4 * (l % 4) + 0 … 3.
#pragma once

#include <cstdint>

#include "decode/cache_decoding.cuh"
#include "device/fragment.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

// Computes rS = sQ · sKᵀ, without the keys' scales. sQ: addressed as by ldmatrix_lane, with dims in the order above.
// sK: [kTilesN * 8, kHeadDim] bytes, addressed as by ldmatrix_lane_b.
template <typename Decoding, int kHeadDim, int kTilesN>
FASTATTN_DEVICE void gemm_qk_8bit(float (&rS)[1][kTilesN][4], const SwizzledBlocks<kHeadDim>& sQ,
                                  const SwizzledBlocks<kHeadDim / 2>& sK) {
    set_zero(rS);
#pragma unroll
    for (int pair = 0; pair < kHeadDim / 2; pair += kMmaK) {
        uint32_t rK[kTilesN / 2][4];
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) ptx::ldmatrix_m8n8_x4(rK[n / 2], sK.address(n * kMmaN, pair));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t rQ[4];
            ptx::ldmatrix_m8n8_x4(rQ, sQ.address(0, 2 * pair + half * kMmaK));
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                const uint2 dims = Decoding::template pairs<kNeighbours>(rK[n / 2][n % 2 * 2 + half]);
                mma_m16n8k16<Decoding::kDataType>(rS[0][n], rQ, dims.x, dims.y);
            }
        }
    }
}

// Computes rO += rP · sV, with rP rounded to 16 bits. sV: [kTilesN * 8, kHeadDim] bytes, addressed as by ldmatrix_lane.
// rO[0][2 * i] and rO[0][2 * i + 1] are the even and the odd dims of 16 * i … 16 * i + 15.
template <typename Decoding, int kHeadDim, int kTilesN>
FASTATTN_DEVICE void gemm_pv_8bit(float (&rO)[1][kHeadDim / kMmaN][4], const float (&rP)[1][kTilesN][4],
                                  const SwizzledBlocks<kHeadDim / 2>& sV) {
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
        uint32_t rA[4];
        accumulators_to_a<Decoding::kDataType>(rA, rP[0][n], rP[0][n + 1]);
#pragma unroll
        for (int pair = 0; pair < kHeadDim / 2; pair += kMmaK) {
            uint32_t rV[4];
            ptx::ldmatrix_m8n8_x4_trans(rV, sV.address(n * kMmaN, pair));
#pragma unroll
            for (int right = 0; right < 2; ++right) {
                const uint2 upper = Decoding::template pairs<kEvenAndOdd>(rV[2 * right]);
                const uint2 lower = Decoding::template pairs<kEvenAndOdd>(rV[2 * right + 1]);
                float (&rEven)[4] = rO[0][pair / 4 + 2 * right];
                float (&rOdd)[4] = rO[0][pair / 4 + 2 * right + 1];
                mma_m16n8k16<Decoding::kDataType>(rEven, rA, upper.x, lower.x);
                mma_m16n8k16<Decoding::kDataType>(rOdd, rA, upper.y, lower.y);
            }
        }
    }
}

}  // namespace fastattn
