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

// The same with int8 activations.
using Int8MatmulS8BlockMs = std::integer_sequence<int, 16, 64, 128>;

template <int kBlockM>
struct Int8MatmulS8TileSm80;

// Bound by the weights' bytes, as above.
template <>
struct Int8MatmulS8TileSm80<16> {
    static constexpr int kBlockM = 16;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 128;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 4;
};

template <>
struct Int8MatmulS8TileSm80<64> {
    static constexpr int kBlockM = 64;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 128;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 3;
};

// 128 accumulators a thread. Per k of 32, a warp issues 32 IMMA, which take 256 clocks on sm_80, and 10 LDSM; the CTA's
// loads take 160 clocks of shared memory. With 64 outputs of 64 tokens a warp they would take 128, and groups' scales
// and operands would spill.
template <>
struct Int8MatmulS8TileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 128;
    static constexpr int kBlockK = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kNumStages = 4;
};

}  // namespace fastattn
