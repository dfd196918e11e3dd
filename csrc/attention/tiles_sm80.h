// Tiles of the attention kernels for sm_80, and the list of head dims that they exist for.
#pragma once

#include <utility>

namespace fastattn {

// Adding a head dim: this list, a row below, and its instance files.
using ForwardHeadDims = std::integer_sequence<int, 64, 128>;

template <int kHeadDim>
struct ForwardTileSm80;

template <>
struct ForwardTileSm80<64> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
};

template <>
struct ForwardTileSm80<128> {
    static constexpr int kBlockM = 128;
    static constexpr int kBlockN = 64;
    static constexpr int kNumWarps = 4;
    static constexpr int kMinCtasPerSm = 2;
};

}  // namespace fastattn
