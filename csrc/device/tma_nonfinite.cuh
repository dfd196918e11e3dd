// What device/nonfinite.cuh needs to know of tiles that TMA has copied.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/fma.cuh"
#include "device/tma_tile.cuh"

namespace fastattn {

// Whether a thread's share, among those of a warpgroup, holds NaN or infinity: times 0 they are NaN, which stays.
template <DataType kDataType, typename Tile>
__device__ __forceinline__ bool tile_has_nonfinite(const uint16_t* sTile, int thread) {
    constexpr int kThreads = 128;
    static_assert(Tile::kBytes % (kThreads * kChunkBytes) == 0, "the same number of chunks for every thread");
    uint32_t sums[4] = {};
#pragma unroll
    for (int i = 0; i < Tile::kBytes / kChunkBytes / kThreads; ++i) {
        const uint4 pairs = reinterpret_cast<const uint4*>(sTile)[i * kThreads + thread];
        const uint32_t each[] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[e] = kDataType == DataType::kFloat16 ? ptx::fma_rn_f16x2(each[e], 0, sums[e])
                                                      : ptx::fma_rn_bf16x2(each[e], 0, sums[e]);
        }
    }
    // Zeros, of either sign, unless something was not finite.
    return ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7fff7fff) != 0;
}

// A tile as separate_nonfinite() takes it: each of kThreads threads has a share.
template <typename Tile, int kRows, int kThreads>
struct SharedTile {
    using Layout = Tile;
    static constexpr int kNumRows = kRows;
    uint16_t* sTile;

    template <typename Function>
    __device__ __forceinline__ void for_own_pairs(Function&& function) const {
        Tile::for_pairs_of(sTile, threadIdx.x, kThreads, function);
    }
};

}  // namespace fastattn
