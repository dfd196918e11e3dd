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

}  // namespace fastattn
