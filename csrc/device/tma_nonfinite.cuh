// Tiles that TMA has copied, for device/nonfinite.cuh.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/fma.cuh"
#include "device/tma_tile.cuh"

namespace fastattn {

// Returns whether one of kThreads threads finds NaN or infinity among its elements: times 0 they are NaN, which stays.
// kUnroll: how many chunks of 16 bytes it reads at once, if not all of its own.
template <DataType kDataType, typename Tile, int kThreads, int kUnroll = Tile::kBytes / kChunkBytes>
FASTATTN_DEVICE bool tile_has_nonfinite(const uint16_t* sTile, int thread) {
    constexpr int kChunks = Tile::kBytes / kChunkBytes;
    uint32_t sums[4] = {};
#pragma unroll kUnroll
    for (int i = 0; i < ceil_div(kChunks, kThreads); ++i) {
        if (kChunks % kThreads != 0 && i * kThreads + thread >= kChunks) break;
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

}  // namespace fastattn
