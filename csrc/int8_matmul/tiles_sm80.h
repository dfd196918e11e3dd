// Tiles of the int8 matmul kernels for sm_80. instances.json lists the values of kBlockM for which they exist.
#pragma once

#include <cstdint>

#include "host/min_max.h"
#include "scheduler/stream_k.h"

namespace fastattn {

// How many CTAs the kernels' launch bounds and shared memory allow on an SM of sm_80 and sm_90. With two, one CTA
// computes while the other starts or ends.
inline constexpr int kCtasPerSm = MatmulTile{}.ctas_per_sm;

// Shared memory for the stages of a CTA: kCtasPerSm CTAs fit in the 164 KB of sm_80.
inline constexpr int kInt8StageBytes = 80 << 10;

// Each of the four warps has 32 of the tile's 128 columns of N and all of its rows of M, so that only one warp loads
// and multiplies_in_16bit a given weight. With kBlockM = 128 a thread has 128 accumulators, and for 32 of K a warp
// issues 64 HMMA and 20 loads from shared memory: 16 of 16 bytes a lane, and 4 of 8 bytes. With few rows, loading the
// weights takes longest. A row of a stage then has 128 bytes, and 64 KB of weights are in flight to an SM. With many
// rows, the tensor cores take longest, so a tile's time is proportional to kBlockM. There is a tile for every multiple
// of 16, so that at most 15 rows of a tile are computed in vain.
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

// The input gradient's tile: kBlockM rows and kBlockK columns of dX. The sum runs over N; a step takes kBlockN of it.
template <int kBlockM_>
struct Int8GradInputTileSm80 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockK = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kStageBytes = kBlockN * kBlockK + kBlockM * kBlockN * 2 + kBlockK / 32 * kBlockN * 4;
    static constexpr int kNumStages = std::min(6, kInt8StageBytes / kStageBytes);
    static constexpr MatmulTile kMatmulTile{
        .block_m = kBlockM, .block_n = kBlockK, .block_k = kBlockN, .scales_weights = true};
};

// Tiles with int8 activations. kWarpsN is the number of warps along N if a row of weights has one scale; with a scale
// for each group, all warps are along N (S8Warp in gemm_s8_sm80.cuh). In large matmuls, IMMA takes longest if a row has
// one scale, and scaling the sums takes longest if groups have 32 columns. Nothing is dequantised. A CTA computes only
// one tile, because a loop over tiles would need more registers than a thread has left.
constexpr MatmulTile s8_tile(int32_t block_m, int32_t block_n, int32_t block_k) {
    return {block_m, block_n, block_k, /*multiplies_in_16bit=*/false, /*is_persistent=*/false};
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

// A warp has 64 of N by 64 of M, which are 128 accumulators of a thread. With 32 of N by 128 of M, as with groups, the
// warps would load more operands.
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
