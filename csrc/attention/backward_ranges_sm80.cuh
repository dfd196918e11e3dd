// Attention backward with ranges of keys: tells which tiles of rows and keys meet, so that no others are visited.
//
// A CTA takes a tile of rows and writes two words for every 32 tiles of keys (SeenTiles): a bit for each tile of which
// some row sees some key, and one for each that every row sees all of. A CTA of key_value then finds in a column of
// these bits which tiles of rows see its keys, and in a line of them how many CTAs add to a tile's dQ before it.
// Because both are the same bits, no CTA waits for one that does not come, whatever wrong offsets of packed sequences
// leave in them. Preconditions: those of RowTileRanges.
#pragma once

#include <cstdint>

#include "attention/backward.h"
#include "attention/row_tile_ranges.cuh"

namespace fastattn {

__global__ void __launch_bounds__(kWarpSize)
    attention_backward_ranges_sm80(const __grid_constant__ AttentionBackwardParams params) {
    __shared__ RowTileRanges::Storage sRanges;
    const RowTileRanges rows(params, sRanges);
    if (rows.numbers == nullptr) return;
    const int32_t num_tiles = ceil_div(rows.num_keys, params.seen_tiles.block_n), lane = threadIdx.x;
    for (int32_t first = 0; first < num_tiles; first += kWarpSize) {
        const SeenKeys keys = rows.look_at(first + lane);
        const uint32_t seen = __ballot_sync(0xffffffff, keys.some), full = __ballot_sync(0xffffffff, keys.all);
        if (lane == 0) reinterpret_cast<uint2*>(rows.numbers)[first / kWarpSize] = {seen, full};
    }
}

inline void launch_attention_backward_ranges_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                                  Stream stream) {
    kernel.launch(attention_backward_ranges_sm80, launch_for_row_tiles(params), params, stream);
}

}  // namespace fastattn
