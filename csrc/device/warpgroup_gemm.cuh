// Starts the products of attention, of 64 rows for each warpgroup. The products run asynchronously until wait_gemm().
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/tma_tile.cuh"

namespace fastattn {

inline constexpr int kWarpgroupSize = 128;
inline constexpr int kWarpgroupM = 64;

// Describes to wgmma where an operand is in a TmaTile: PTX ISA, "Shared Memory Matrix Layout". Addresses and strides
// count 16 bytes.
struct OperandDescriptor {
    uint32_t low;  // address, and from bit 16 on the stride between blocks

    // Returns the address's field. In a cluster, the bits of `shared` from 24 on are the CTA's rank, which must not get
    // into the field of the stride.
    FASTATTN_DEVICE static uint32_t address_field(uint32_t shared) { return (shared & 0x3ffff) >> 4; }

    // For an operand with K contiguous. A block holds 64 or 32 elements along K, and no product crosses blocks.
    FASTATTN_DEVICE static OperandDescriptor k_major(uint32_t shared) { return {address_field(shared) | 1 << 16}; }

    // For an operand with M or N contiguous. A block holds 64 or 32 elements along M or N, and the next block holds the
    // elements that follow.
    FASTATTN_DEVICE static OperandDescriptor mn_major(uint32_t shared, uint32_t block_bytes) {
        return {address_field(shared) | block_bytes >> 4 << 16};
    }

    // Returns the descriptor of what is `bytes` bytes further on, in blocks whose rows have kRowBytes bytes. The
    // address's field has spare bits, so that the addition carries into no other field.
    template <int kRowBytes = 128>
    FASTATTN_DEVICE uint64_t at(int bytes) const {
        static_assert(kRowBytes == 128 || kRowBytes == 64, "the swizzles that tiles have");
        constexpr uint32_t kSwizzle = (kRowBytes == 128 ? 1u : 2u) << 30;
        constexpr uint32_t kPatternBytes = 8 * kRowBytes;
        return uint64_t{kPatternBytes >> 4 | kSwizzle} << 32 | (low + (bytes >> 4));
    }
};

// Waits until at most kInFlight groups of products are in flight. rC are the sums of a group that is then complete, and
// can be read after the call.
template <int kInFlight, typename Sums>
FASTATTN_DEVICE void wait_gemm(Sums& rC) {
    ptx::wgmma_wait_group<kInFlight>();
    ptx::written_by_wgmma(rC);
}

// Returns a row of m16 tiles as the flat array that wgmma takes.
template <int kTiles>
FASTATTN_DEVICE float (&flat(float (&sums)[1][kTiles][4]))
    [kTiles * 4] { return reinterpret_cast<float (&)[kTiles * 4]>(sums); }

// Returns the descriptor of the columns from `column` on, for rows of a tile with K contiguous.
template <typename Tile>
FASTATTN_DEVICE uint64_t at_column(OperandDescriptor rows, int column) {
    return rows.at<Tile::kRowBytes>(column / Tile::kBlockColumns * Tile::kBlockBytes +
                                    column % Tile::kBlockColumns * 2);
}

// rC = A · Bᵀ over kSumK columns, or with kAdds rC += A · Bᵀ. sA: 64 rows of a TileA, sB: the 8 * kTilesN rows of a
// TileB.
template <DataType kDataType, int kSumK, typename TileA, typename TileB, bool kAdds = false, int kTilesN>
FASTATTN_DEVICE void start_gemm_rows(float (&rC)[1][kTilesN][4], OperandDescriptor sA, OperandDescriptor sB) {
#pragma unroll
    for (int k = 0; k < kSumK / kMmaK; ++k) {
        ptx::Wgmma<kTilesN * kMmaN, kDataType>::ss(flat(rC), at_column<TileA>(sA, k * kMmaK),
                                                   at_column<TileB>(sB, k * kMmaK), kAdds || k > 0);
    }
}

// rS = Q · Kᵀ. sQ [64, kHeadDim], sK [8 * kTilesN, kHeadDim], both TmaTile.
template <DataType kDataType, int kHeadDim, int kTilesN>
FASTATTN_DEVICE void start_gemm_qk(float (&rS)[1][kTilesN][4], OperandDescriptor sQ, OperandDescriptor sK) {
    start_gemm_rows<kDataType, kHeadDim, TmaTile<kWarpgroupM, kHeadDim>, TmaTile<kTilesN * kMmaN, kHeadDim>>(rS, sQ,
                                                                                                             sK);
}

// rC = Aᵀ · B over kSumK rows. sA: 64 columns, one block of a TmaTile. sB: 8 * kTilesN columns of another TmaTile.
template <DataType kDataType, int kSumK, int kTilesN>
FASTATTN_DEVICE void start_gemm_columns(float (&rC)[1][kTilesN][4], OperandDescriptor sA, OperandDescriptor sB) {
    using TileB = TmaTile<kSumK, kTilesN * kMmaN>;
    static_assert(TileB::kBlockColumns == kWarpgroupM, "blocks of A and B are alike");
    constexpr int kStepBytes = kMmaK * TileB::kRowBytes;
#pragma unroll
    for (int k = 0; k < kSumK / kMmaK; ++k) {
        ptx::Wgmma<kTilesN * kMmaN, kDataType>::ss_columns(flat(rC), sA.at(k * kStepBytes), sB.at(k * kStepBytes),
                                                           k > 0);
    }
}

// rO += P · V. sV [16 * kTilesK, 8 * kTilesD], a TmaTile.
template <DataType kDataType, int kTilesK, int kTilesD>
FASTATTN_DEVICE void start_gemm_pv(float (&rO)[1][kTilesD][4], const uint32_t (&rP)[kTilesK][4], OperandDescriptor sV) {
#pragma unroll
    for (int k = 0; k < kTilesK; ++k) {
        constexpr int kRowBytes = TmaTile<kTilesK * kMmaK, kTilesD * kMmaN>::kRowBytes;
        ptx::Wgmma<kTilesD * kMmaN, kDataType>::rs(flat(rO), rP[k], sV.at<kRowBytes>(k * kMmaK * kRowBytes), true);
    }
}

}  // namespace fastattn
