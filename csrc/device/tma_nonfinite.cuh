// Searches tiles that TMA has copied for NaN and infinity: see device/nonfinite.cuh.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/nonfinite.cuh"
#include "device/tma_tile.cuh"

namespace fastattn {

// Returns whether this thread finds NaN or infinity in its part of the tile, which kThreads threads divide. kUnroll:
// how many of its 16-byte chunks the thread reads at once, by default all.
template <DataType kDataType, typename Tile, int kThreads, int kUnroll = Tile::kBytes / kChunkBytes>
FASTATTN_DEVICE bool tile_has_nonfinite(const uint16_t* sTile, int thread) {
    constexpr int kChunks = Tile::kBytes / kChunkBytes;
    SearchForNonfinite<kDataType> search;
#pragma unroll kUnroll
    for (int i = 0; i < ceil_div(kChunks, kThreads); ++i) {
        if (kChunks % kThreads != 0 && i * kThreads + thread >= kChunks) break;
        const uint4 pairs = reinterpret_cast<const uint4*>(sTile)[i * kThreads + thread];
        search.look_at(pairs.x, 0);
        search.look_at(pairs.y, 1);
        search.look_at(pairs.z, 2);
        search.look_at(pairs.w, 3);
    }
    return search.has_found();
}

}  // namespace fastattn
