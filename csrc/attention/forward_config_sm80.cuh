// The config of the forward kernels for sm_80: how their warps divide a tile.
#pragma once

#include "attention/tiles_sm80.h"
#include "device/fragment.cuh"

namespace fastattn {

template <int kHeadDim_, typename Tile_ = ForwardTileSm80<kHeadDim_>>
struct ForwardConfigSm80 : Tile_ {
    using Tile = Tile_;
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kNumThreads = Tile::kNumWarps * kWarpSize;
    static constexpr int kWarpM = Tile::kBlockM / Tile::kNumWarps;
    static constexpr int kTilesM = kWarpM / kMmaM;
    static constexpr int kTilesN = Tile::kBlockN / kMmaN;
    static constexpr int kTilesD = kHeadDim / kMmaN;
    static_assert(kWarpM % kMmaM == 0, "a warp owns whole MMA tiles of rows");
    static_assert(Tile::kBlockN % kMmaK == 0, "P·V takes 16 keys at a time");
    static_assert(kHeadDim % kMmaK == 0, "Q·Kᵀ takes 16 dims at a time");
};

}  // namespace fastattn
