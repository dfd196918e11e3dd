// Defines how the warps of a backward CTA on sm_80 divide its matrix products, and the order of the sums of dQ in
// memory. The kernels that add to these sums and the kernel that reads them rely on the same order.
#pragma once

#include <cstdint>

#include "attention/tiles_sm80.h"
#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/store_rows.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

// Divides a product [kRows, kHeadDim] among warps: kRowWarps groups of warps divide its rows, and the warps of a group
// take alternate blocks of 16 columns.
template <int kRows, int kHeadDim, int kRowWarps, int kNumWarps>
struct HeadDimGrid {
    static constexpr int kWarpRows = kRows / kRowWarps;
    static constexpr int kDimWarps = kNumWarps / kRowWarps;
    static constexpr int kColumnStep = kDimWarps * kMmaK;  // from a warp's block of columns to its next
    static constexpr int kTilesM = kWarpRows / kMmaM;
    static constexpr int kTilesD = kHeadDim / kDimWarps / kMmaN;
    static_assert(kRows % (kRowWarps * kMmaM) == 0, "a warp owns whole MMA tiles of rows");
    static_assert(kHeadDim % kColumnStep == 0, "warps have the same number of blocks of columns");

    using Accumulators = float[kTilesM][kTilesD][4];

    FASTATTN_DEVICE static int first_row(int warp) { return warp % kRowWarps * kWarpRows; }
    FASTATTN_DEVICE static int first_column(int warp) { return warp / kRowWarps * kMmaK; }

    // Calls function(accumulator, address) for each accumulator of this lane in tiles [kFirst, kFirst + kTiles).
    // `address` points to the accumulator's element in `sums`, which hold the product in fp32. `sums` consist of blocks
    // of 16x16 elements, row-major, and a block has the layout [8 accumulators of a lane, 32 lanes]. So the layout does
    // not depend on how warps divide the product.
    template <int kFirst, int kTiles, typename Number, typename Function>
    FASTATTN_DEVICE static void for_each_sum(Number* sums, float (&rC)[kTilesM][kTiles][4], int warp, int lane,
                                             Function&& function) {
        constexpr int kBlocksPerRow = kHeadDim / kMmaK, kBlockElements = kMmaM * kMmaK;
        sums += (first_row(warp) / kMmaM * kBlocksPerRow + first_column(warp) / kMmaK) * kBlockElements + lane;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int d = 0; d < kTiles; ++d) {
                const int block = m * kBlocksPerRow + (kFirst + d) / 2 * kDimWarps;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    function(rC[m][d][e], sums + block * kBlockElements + (d % 2 * 4 + e) * kWarpSize);
                }
            }
        }
    }

    // Adds a warp's accumulators, times factor, to fp32 rows of head_dim elements. row_at(row) returns the address of a
    // row, or null if the row does not exist.
    template <typename RowAt>
    FASTATTN_DEVICE static void add_to(RowAt&& row_at, const Accumulators& rC, float factor, int head_dim, int warp,
                                       int lane) {
        // Opaque: otherwise the compiler derives values from lane and warp before the main loop, and they take
        // registers in the loop.
        const int own_lane = ptx::opaque(lane), own_warp = ptx::opaque(warp);
        for_own_rows<kTilesM>(own_lane, [&](int m, int half, int row) {
            float* gRow = row_at(first_row(own_warp) + row);
            if (gRow == nullptr) return;
#pragma unroll
            for (int d = 0; d < kTilesD; ++d) {
                const int column = first_column(own_warp) + d / 2 * kColumnStep + d % 2 * kMmaN;
                if (column >= head_dim) continue;
                AddPair{}(gRow + column + accumulator_column(own_lane), rC[m][d][2 * half] * factor,
                          rC[m][d][2 * half + 1] * factor);
            }
        });
    }

    // Stores a warp's accumulators, times factor, in a tile [kRows, kHeadDim] of 16-bit elements in shared memory.
    template <DataType kDataType>
    FASTATTN_DEVICE static void stage(uint16_t* sTile, const Accumulators& rC, float factor, int warp, int lane) {
        using Layout = Swizzle<kHeadDim>;
        for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
#pragma unroll
            for (int d = 0; d < kTilesD; ++d) {
                const int column = first_column(warp) + d / 2 * kColumnStep + d % 2 * kMmaN;
                char* chunk =
                    reinterpret_cast<char*>(sTile) + Layout::offset(first_row(warp) + row, column / kChunkElements);
                reinterpret_cast<uint32_t*>(chunk)[lane % kLanesPerRow] =
                    pack<kDataType>(rC[m][d][2 * half] * factor, rC[m][d][2 * half + 1] * factor);
            }
        });
    }
};

template <int kHeadDim_>
struct BackwardConfigSm80 : BackwardTileSm80<kHeadDim_> {
    using Tile = BackwardTileSm80<kHeadDim_>;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kRowElements = Swizzle<kHeadDim>::kRowElements;         // of Q, dO, K, V
    static constexpr int kScoreElements = Swizzle<Tile::kBlockN>::kRowElements;  // of P, dS

    // A warp's block of S and dP: [kWarpM, kWarpN].
    static constexpr int kWarpM = Tile::kBlockM / Tile::kRowWarpsOfS;
    static constexpr int kWarpN = Tile::kBlockN / (Tile::kNumWarps / Tile::kRowWarpsOfS);
    static constexpr int kTilesM = kWarpM / kMmaM;
    static constexpr int kTilesN = kWarpN / kMmaN;
    static_assert(kTilesN % 2 == 0 && kWarpM % kMmaM == 0, "a warp owns whole MMA tiles of S");

    using KeyGrid = HeadDimGrid<Tile::kBlockN, kHeadDim, Tile::kKeyWarps, Tile::kNumWarps>;       // dK, dV
    using QueryGrid = HeadDimGrid<Tile::kBlockM, kHeadDim, Tile::kRowWarpsOfQ, Tile::kNumWarps>;  // dQ
    static constexpr int kQuerySums = Tile::kBlockM * kHeadDim;  // floats in a tile of params.query_sums
};

}  // namespace fastattn
