// Tiles of the int8 matmul kernels for sm_80. instances.json lists the rows for which they exist.
#pragma once

#include <cstdint>

#include "host/min_max.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// The CTAs that the kernels' launch bounds and shared memory allow on an SM of sm_80 and sm_90: each hides the starts
// and ends of the other.
inline constexpr int kCtasPerSm = MatmulTile{}.ctas_per_sm;

// Shared memory for the stages of a CTA: kCtasPerSm CTAs fit in the 164 KB of sm_80.
inline constexpr int kInt8StageBytes = 80 << 10;

// Each of four warps has 32 of the tile's 128 columns of N and all of its rows of M, so that a weight is loaded and
// dequantised by one warp only. With kBlockM of 128 a thread has 128 accumulators, and for 32 of K a warp issues 64
// HMMA and 20 loads of 16 bytes a lane. With few rows, loading the weights takes longest: rows of a stage have 128
// bytes, and 64 KB are in flight to an SM. With many, the tensor cores do: a tile's time is proportional to kBlockM.
// There is a tile for every multiple of 16, so that at most 15 rows' time is lost.
template <int kBlockM_>
struct Int8MatmulTileSm80 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = kBlockM <= 32 ? 128 : 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kStageBytes = kBlockN * kBlockK + kBlockM * kBlockK * 2 + kBlockK / 32 * kBlockN * 4;
    static constexpr int kNumStages = std::min(6, kInt8StageBytes / kStageBytes);
    static constexpr MatmulTile kMatmulTile{kBlockM, kBlockN, kBlockK};
};

// The input gradient's tile. N of the product is the columns of dX: a step takes kBlockN of the sum.
template <int kBlockM_>
struct Int8GradInputTileSm80 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockK = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kStageBytes = kBlockN * kBlockK + kBlockM * kBlockN * 2 + kBlockK / 32 * kBlockN * 4;
    static constexpr int kNumStages = std::min(6, kInt8StageBytes / kStageBytes);
    static constexpr MatmulTile kMatmulTile{kBlockM, kBlockK, kBlockN};
};

// The tile with int8 activations. kWarpsN: how many warps lie along N, where a row of weights has one scale. IMMA binds
// large matmuls where a row has one scale, and the scaling of sums those with groups of 32. Nothing is dequantised, and
// a CTA has one tile: the kernel has no registers left to go on to another.
constexpr MatmulTile s8_tile(int32_t block_m, int32_t block_n, int32_t block_k) {
    return {block_m, block_n, block_k, /*dequantises=*/false, /*goes_on=*/false};
}

template <int kBlockM>
struct Int8MatmulS8TileSm80;

template <>
struct Int8MatmulS8TileSm80<16> {
    static constexpr int kBlockM = 16;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 128;
    static constexpr int kNumWarps = 4;
    static constexpr int kWarpsN = 4;
    static constexpr int kNumStages = 4;
    static constexpr MatmulTile kMatmulTile = s8_tile(kBlockM, kBlockN, kBlockK);
};

template <>
struct Int8MatmulS8TileSm80<64> {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 128;
    static constexpr int kNumWarps = 4;
    static constexpr int kWarpsN = 4;
    static constexpr int kNumStages = 3;
    static constexpr MatmulTile kMatmulTile = s8_tile(kBlockM, kBlockN, kBlockK);
};

// A thread has 128 accumulators, a warp 64 of N by 64 of M: 32 by 128, as with groups, would load more.
template <>
struct Int8MatmulS8TileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kWarpsN = 2;
    static constexpr int kNumStages = 4;
    static constexpr MatmulTile kMatmulTile = s8_tile(kBlockM, kBlockN, kBlockK);
};

}  // namespace fastattn
