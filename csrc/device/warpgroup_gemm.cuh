// The products of attention, as one warpgroup computes its 64 rows of them. They are started here, and run on.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tma_tile.cuh"

namespace fastattn {

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kWarpgroupM = 64;

// Where wgmma finds an operand in a TmaTile: PTX ISA, "Shared Memory Matrix Layout". Addresses and strides count 16 bytes.
struct OperandDescriptor {
    static constexpr uint32_t kPatternBytes = 1024;  // of the swizzle: 8 rows of 128 bytes
    uint32_t low;                                    // address, and from bit 16 on the stride between blocks

    // K contiguous: a block of 64 columns holds 64 of K, and products reach no further.
    __device__ __forceinline__ static OperandDescriptor of_rows(uint32_t shared) { return {shared >> 4 | 1 << 16}; }

    // N contiguous: a block holds 64 of N, and the next 64 are in the next block.
    __device__ __forceinline__ static OperandDescriptor of_columns(uint32_t shared, uint32_t block_bytes) {
        return {shared >> 4 | block_bytes >> 4 << 16};
    }

    // Of what lies so many bytes further on. The address has bits to spare: adding to it carries into nothing else.
    __device__ __forceinline__ uint64_t at(int bytes) const {
        constexpr uint32_t kSwizzle128 = 1u << 30;
        return uint64_t{kPatternBytes >> 4 | kSwizzle128} << 32 | (low + (bytes >> 4));
    }
};

// The sums of one row of m16 tiles as wgmma counts them.
template <int kTiles>
__device__ __forceinline__ float (&flat(float (&sums)[1][kTiles][4]))
    [kTiles * 4] { return reinterpret_cast<float (&)[kTiles * 4]>(sums); }

// rS = Q · Kᵀ. sQ [64, kHeadDim], sK [8 * kTilesN, kHeadDim], both TmaTile.
template <DataType kDataType, int kHeadDim, int kTilesN>
__device__ __forceinline__ void start_gemm_qk(float (&rS)[1][kTilesN][4], OperandDescriptor sQ, OperandDescriptor sK) {
    constexpr int kBlockN = kTilesN * kMmaN;
    using QueryTile = TmaTile<kWarpgroupM, kHeadDim>;
    using KeyTile = TmaTile<kBlockN, kHeadDim>;
#pragma unroll
    for (int k = 0; k < kHeadDim / kMmaK; ++k) {
        const int block = k * kMmaK / KeyTile::kBlockColumns, column_bytes = k * kMmaK % KeyTile::kBlockColumns * 2;
        ptx::Wgmma<kBlockN, kDataType>::ss(flat(rS), sQ.at(block * QueryTile::kBlockBytes + column_bytes),
                                           sK.at(block * KeyTile::kBlockBytes + column_bytes), k > 0);
    }
}

// rO += P · V. sV [16 * kTilesK, 8 * kTilesD], a TmaTile.
template <DataType kDataType, int kTilesK, int kTilesD>
__device__ __forceinline__ void start_gemm_pv(float (&rO)[1][kTilesD][4], const uint32_t (&rP)[kTilesK][4],
                                              OperandDescriptor sV) {
#pragma unroll
    for (int k = 0; k < kTilesK; ++k) {
        ptx::Wgmma<kTilesD * kMmaN, kDataType>::rs(
            flat(rO), rP[k], sV.at(k * kMmaK * TmaTile<kTilesK * kMmaK, kTilesD * kMmaN>::kRowBytes), true);
    }
}

}  // namespace fastattn
