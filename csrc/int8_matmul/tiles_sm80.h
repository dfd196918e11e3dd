// Tiles of the int8 matmul kernels for sm_80, and the list of block sizes that they exist for.
#pragma once

#include <utility>

namespace fastattn {

// Tokens of a CTA's tile: the first that is not less than M, else the last.
using Int8MatmulBlockMs = std::integer_sequence<int, 16, 64, 96, 128>;

// Four warps, each with 32 of the tile's 128 outputs and all of its tokens: every weight is loaded and dequantised by
// one warp alone. A step takes kBlockK of the sum in the forward pass, and kBlockN in grad_input.
template <int kBlockM>
struct Int8MatmulTileSm80;

// Bound by the weights' bytes: 48 KB of them are on their way to each CTA, in rows of 128 bytes.
template <>
struct Int8MatmulTileSm80<16> {
    static constexpr int kBlockM = 16;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 128;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 4;
};

template <>
struct Int8MatmulTileSm80<64> {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 4;
};

// Between 64 and 128 tokens the tensor cores bind, and a tile takes as long as it is wide.
template <>
struct Int8MatmulTileSm80<96> {
    static constexpr int kBlockM = 96;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 4;
};

// 128 accumulators a thread. Per k of 32, a warp issues 64 HMMA, which take 512 clocks on sm_80, and 20 loads of
// 16 bytes a lane or less; the CTA's loads take 288 clocks of shared memory.
template <>
struct Int8MatmulTileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 3;
};

template <int kBlockM_>
struct Int8GradInputTileSm80 {
    static constexpr int kBlockM = kBlockM_;
    static constexpr int kBlockK = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = kBlockM == 16 ? 6 : kBlockM < 128 ? 4 : 3;
};

// The same with int8 activations. kWarpsN: how many warps lie along the outputs, where a row of weights has one scale.
//
// Of one step of a CTA, in clocks of its SM: what a scheduler issues (sm_80 code), IMMA and additions of scaled sums in
// their pipes, shared memory (LDSM and what copies write, 128 bytes a clock), and how long an H200's memory (18.4 bytes
// a clock and SM) takes to bring the step's weights, which binds where no other tile reads them. These are predictions,
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
using Int8MatmulS8BlockMs = std::integer_sequence<int, 16, 64, 128>;

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
};

template <>
struct Int8MatmulS8TileSm80<64> {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 128;
    static constexpr int kNumWarps = 4;
    static constexpr int kWarpsN = 4;
    static constexpr int kNumStages = 3;
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
};

}  // namespace fastattn
