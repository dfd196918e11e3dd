// Tiles of the int8 matmul kernels for sm_80. instances.json lists the rows for which they exist.
#pragma once

#include <algorithm>
#include <cstdint>

#include "int8_matmul/work.h"

namespace fastattn {

// That is what launch bounds and shared memory of the kernels allow on sm_80 and sm_90: one hides the other's starts and
// ends.
inline constexpr int kCtasPerSm = MatmulTile{}.ctas_per_sm;

// Shared memory for the stages of a CTA: kCtasPerSm find room in the 164 KB of sm_80.
inline constexpr int kInt8StageBytes = 80 << 10;

// Four warps, each with 32 of the tile's 128 outputs and all of its tokens: every weight is loaded and dequantised by
// one warp alone. 128 accumulators a thread with 128 tokens. Per k of 32, a warp then issues 64 HMMA, which take 512
// clocks on sm_80, and 20 loads of 16 bytes a lane or less; the CTA's loads take 288 clocks of shared memory.
// Few tokens are bound by the weights' bytes: they are loaded in rows of 128, and 64 KB of them are on their way to a
// multiprocessor.
// kBlockM: tokens of a CTA's tile. Where the tensor cores bind, a tile's time is proportional to its tokens, so there
// is a tile for every multiple of 16: no more than 15 tokens' time is lost.
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

// The same, with columns of dX for outputs: a step takes kBlockN of the sum.
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

// The same with int8 activations. kWarpsN: how many warps lie along the outputs, where a row of weights has one scale.
//
// Of one step of a CTA, in clocks of its SM: what a scheduler issues (sm_80 code), IMMA and additions of scaled sums in
// their pipes, shared memory (LDSM and what copies write, 128 bytes a clock), and how long an H200's memory (18.4 bytes
// a clock and SM at 1.98 GHz) takes to bring the step's weights, which binds where no other tile reads them. These are predictions,
// not measurements: 8 clocks of an IMMA on an A100 are its data sheet's rate, and 6.4 on an H200, 5/8 of wgmma's rate,
// are an assumption.
//
//   tokens   k   scale of  issue  IMMA: A100  H200  sums: A100  H200  shared  weights
//       16  128   a row      170         128   102           0     0     336      890
//       16  128   64, 128    379         128   102         128    64     336      890
//       16  128   32         374         128   102         256   128     336      890
//       64  128   a row      257         512   410           0     0     576      890
//       64  128   64, 128    662         512   410         512   256     576      890
//       64  128   32         856         512   410        1024   512     576      890
//      128   64   a row      194         512   410           0     0     384      445
//      128   64   64, 128    532         512   410         512   256     448      445
//      128   64   32         757         512   410        1024   512     448      445
//
// So large matmuls are bound by IMMA where a row has one scale, and by the scaling of sums with groups of 32.
// Nothing is dequantised, and a CTA has one tile: the kernel has no registers left to go on to another.
constexpr MatmulTile s8_tile(int32_t tokens, int32_t outputs, int32_t depth) {
    return {tokens, outputs, depth, /*dequantises=*/false, /*goes_on=*/false};
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

// 128 accumulators a thread: 64 outputs of 64 tokens. 32 of 128, as with groups, would take 448 clocks of shared
// memory.
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
