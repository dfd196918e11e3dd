// Tiles of the attention kernels for sm_80, and the list of head dims that they exist for.
#pragma once

#include <utility>

namespace fastattn {

// Adding a head dim: this list, a row below, and its instance files.
using ForwardHeadDims = std::integer_sequence<int, 64, 128>;

// A warp owns 32 query rows, so that each ldmatrix of K or V feeds two rows of MMA tiles: with 16 rows, shared memory
// would have to deliver 128 bytes a clock, all it has on sm_80, to keep the tensor cores busy.
template <int kHeadDim>
struct ForwardTileSm80;

// Counts are of the SASS for sm_80 (nvcc 13.0), per warp and unmasked step of 32 rows by kBlockN keys; a step of 64
// rows by 64 keys takes two. Nothing of it spills.

// 603 instructions: 128 HMMA, 68 EX2, 40 LDSM. 237 registers, 32 KB. kBlockN = 96 and 112 take 7 and 8% fewer
// instructions per key, but mask up to 95 and 111 columns at the end of every sequence and more at the diagonal; three
// CTAs on an SM (168 registers) spill 100 bytes.
template <>
struct ForwardTileSm80<64> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
};

// 890 instructions: 256 HMMA, 68 EX2, 80 LDSM. 255 registers (128 of them O, 64 S), 64 KB: two CTAs fit in an SM's
// registers, and on sm_80 and sm_90 in its shared memory.
template <>
struct ForwardTileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
};

// The kernel with every option. A tile of bias, as large as S, is in registers beside S and O: 32 keys leave room for it,
// 16 above 128 dims, and above 64 dims a warp owns 16 rows. Up to 255 registers, nothing spills; 32 rows of 128 dims
// spilled 456 bytes, 32 keys of 256 dims 40.
using ForwardOptionsHeadDims = std::integer_sequence<int, 32, 64, 96, 128, 192, 256>;

template <int kHeadDim>
struct ForwardOptionsTileSm80 {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = kHeadDim <= 128 ? 32 : 16;
    static constexpr int kNumWarps = kHeadDim <= 64 ? 4 : 8;
    static constexpr int kMinCtasPerSm = kHeadDim <= 64 ? 2 : 1;
};

// The backward kernel. Three products have three shapes, and the warps divide each in their own way: S and dP by
// kRowWarpsOfS times the rest along the keys, dK and dV by kKeyWarps times the rest along the head dim, dQ by
// kRowWarpsOfQ times the rest. With 32x32 of S a warp, and 32x64 of dK, dV and dQ at 128 dims, shared memory delivers 288
// KB for a step of 64x64, 2250 clocks of it beside 2560 of the tensor cores (sm_80).
using BackwardHeadDims = std::integer_sequence<int, 32, 64, 96, 128, 192, 256>;

template <int kHeadDim, bool kOptions>
struct BackwardTileSm80 {
    static constexpr int kBlockM = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kBlockN = kHeadDim <= 128 ? 64 : 32;
    static constexpr int kNumWarps = kOptions && kHeadDim > 64 && kHeadDim <= 128 ? 8 : 4;
    static constexpr int kRowWarpsOfS = 2;
    static constexpr int kKeyWarps = kHeadDim > 128 ? 1 : kNumWarps / 2;
    static constexpr int kRowWarpsOfQ = kHeadDim > 128 ? 1 : kNumWarps / 2;
    static constexpr int kMinCtasPerSm = kNumWarps == 8 ? 1 : kHeadDim == 32 && !kOptions ? 3 : 2;
};

}  // namespace fastattn
