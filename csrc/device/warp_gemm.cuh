// Computes the products of attention, by one warp. In the comments, sX [rows, columns] at ldmatrix_lane means that the
// SwizzledBlocks sX of such a tile were constructed with ldmatrix_lane() of the warp's lanes.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

// Loads a warp's rows of Q as operands A, once for all tiles of keys. sQ [kTilesM * 16, kHeadDim] at ldmatrix_lane.
template <int kTilesM, int kTilesK, int kHeadDim>
FASTATTN_DEVICE void load_operands_a(uint32_t (&rQ)[kTilesM][kTilesK][4], const SwizzledBlocks<kHeadDim>& sQ) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int k = 0; k < kTilesK; ++k) ptx::ldmatrix_m8n8_x4(rQ[m][k], sQ.address(m * kMmaM, k * kMmaK));
    }
}

// rC[*][n], rC[*][n + 1] += rA · rB, where rB holds the operands B of two neighbouring tiles as ldmatrix loads them.
// The MMAs are ordered such that consecutive ones share an operand, which is then not read from the register file
// again: B where m changes, else A, also from one pair of tiles to the next.
template <DataType kDataType, int kTilesM, int kTilesN>
FASTATTN_DEVICE void multiply_pair(float (&rC)[kTilesM][kTilesN][4], const uint32_t (&rA)[kTilesM][4],
                                   const uint32_t (&rB)[4], int n) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
        const int m = n / 2 % 2 == 0 ? i : kTilesM - 1 - i;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int right = (i + j) % 2;
            mma_m16n8k16<kDataType>(rC[m][n + right], rA[m], rB[2 * right], rB[2 * right + 1]);
        }
    }
}

// rS += Q · sKᵀ. sK [kTilesN * 8, kHeadDim] at ldmatrix_lane_b; load_q(rQ, m, k) loads the operand A of a block.
template <DataType kDataType, int kTilesM, int kTilesN, int kHeadDim, typename LoadQ>
FASTATTN_DEVICE void accumulate_loaded_qk(float (&rS)[kTilesM][kTilesN][4], const SwizzledBlocks<kHeadDim>& sK,
                                          LoadQ&& load_q) {
#pragma unroll
    for (int k = 0; k < kHeadDim / kMmaK; ++k) {
        uint32_t rQ[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) load_q(rQ[m], m, k);
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
            uint32_t rK[4];
            ptx::ldmatrix_m8n8_x4(rK, sK.address(n * kMmaN, k * kMmaK));
            multiply_pair<kDataType>(rS, rQ, rK, n);
        }
    }
}

// rS += Q·Kᵀ, with sQ [kTilesM * 16, kHeadDim] at ldmatrix_lane.
template <DataType kDataType, int kTilesM, int kTilesN, int kHeadDim>
FASTATTN_DEVICE void accumulate_qk(float (&rS)[kTilesM][kTilesN][4], const SwizzledBlocks<kHeadDim>& sQ,
                                   const SwizzledBlocks<kHeadDim>& sK) {
    accumulate_loaded_qk<kDataType>(rS, sK, [&](uint32_t (&block)[4], int m, int k) {
        ptx::ldmatrix_m8n8_x4(block, sQ.address(m * kMmaM, k * kMmaK));
    });
}

// rS = Q·Kᵀ, with operands as in accumulate_qk().
template <DataType kDataType, int kTilesM, int kTilesN, int kHeadDim>
FASTATTN_DEVICE void gemm_qk(float (&rS)[kTilesM][kTilesN][4], const SwizzledBlocks<kHeadDim>& sQ,
                             const SwizzledBlocks<kHeadDim>& sK) {
    set_zero(rS);
    accumulate_qk<kDataType>(rS, sQ, sK);
}

// rS = Q·Kᵀ, with Q's operands in registers.
template <DataType kDataType, int kTilesM, int kTilesN, int kTilesK, int kHeadDim>
FASTATTN_DEVICE void gemm_qk(float (&rS)[kTilesM][kTilesN][4], const uint32_t (&rQ)[kTilesM][kTilesK][4],
                             const SwizzledBlocks<kHeadDim>& sK) {
    set_zero(rS);
    accumulate_loaded_qk<kDataType>(rS, sK, [&](uint32_t (&block)[4], int m, int k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) block[i] = rQ[m][k][i];
    });
}

// rO += rP · sV, with rP rounded to 16 bits. sV [kTilesN * 8, kHeadDim] at ldmatrix_lane.
template <DataType kDataType, int kTilesM, int kTilesN, int kHeadDim>
FASTATTN_DEVICE void gemm_pv(float (&rO)[kTilesM][kHeadDim / kMmaN][4], const float (&rP)[kTilesM][kTilesN][4],
                             const SwizzledBlocks<kHeadDim>& sV) {
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
        uint32_t rA[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) accumulators_to_a<kDataType>(rA[m], rP[m][n], rP[m][n + 1]);
#pragma unroll
        for (int d = 0; d < kHeadDim / kMmaN; d += 2) {
            uint32_t rV[4];
            ptx::ldmatrix_m8n8_x4_trans(rV, sV.address(n * kMmaN, d * kMmaN));
            multiply_pair<kDataType>(rO, rA, rV, d);
        }
    }
}

// rC += sA · sB, or with kTransposeA rC += sAᵀ · sB. Both operands are in shared memory. For the backward pass, where a
// warp computes only some columns of sB: blocks of 16 columns, kColumnStep apart, from kFirstColumn on.
// sA [kTilesM * 16, kSumK] at ldmatrix_lane, or with kTransposeA [kSumK, kTilesM * 16] at ldmatrix_lane_b. sB has kSumK
// rows, at ldmatrix_lane.
template <DataType kDataType, bool kTransposeA, int kSumK, int kColumnStep, int kFirstColumn = 0, int kTilesM,
          int kTilesN, int kColumnsA, int kColumnsB>
FASTATTN_DEVICE void gemm_accumulate(float (&rC)[kTilesM][kTilesN][4], const SwizzledBlocks<kColumnsA>& sA,
                                     const SwizzledBlocks<kColumnsB>& sB) {
    static_assert(kTilesN % 2 == 0, "B comes in blocks of two tiles");
#pragma unroll
    for (int k = 0; k < kSumK; k += kMmaK) {
        uint32_t rA[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            if constexpr (kTransposeA) {
                ptx::ldmatrix_m8n8_x4_trans(rA[m], sA.address(k, m * kMmaM));
            } else {
                ptx::ldmatrix_m8n8_x4(rA[m], sA.address(m * kMmaM, k));
            }
        }
#pragma unroll
        for (int n = 0; n < kTilesN; n += 2) {
            uint32_t rB[4];
            ptx::ldmatrix_m8n8_x4_trans(rB, sB.address(k, kFirstColumn + n / 2 * kColumnStep));
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                mma_m16n8k16<kDataType>(rC[m][n], rA[m], rB[0], rB[1]);
                mma_m16n8k16<kDataType>(rC[m][n + 1], rA[m], rB[2], rB[3]);
            }
        }
    }
}

}  // namespace fastattn
