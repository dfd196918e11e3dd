// Attention backward with ranges of keys: finds which row tiles see which key tiles. The other kernels skip the rest.
//
//   one CTA of one warp owns a row tile:   each lane tests one of 32 key tiles → two ballots → two words of SeenTiles
//
// A bit of the first word says that some row sees some key of a key tile. A bit of the second word says that every row
// sees every key. The words of all row tiles form two matrices of bits, [row tiles, key tiles]. In the first matrix, a
// CTA of the key_value kernel reads a column to find the row tiles that see its keys, and part of a row to count the
// CTAs that add to a row tile's dQ before it. Because both uses read the same bits, no CTA waits for an addition that
// never comes, even if wrong cu_seqlens leave some bits wrong or unwritten. Preconditions: those of RowTileRanges.
#pragma once

#include <cstdint>

#include "attention/backward.h"
#include "attention/row_tile_ranges.cuh"

namespace fastattn {

__global__ void __launch_bounds__(kWarpSize)
    attention_backward_ranges_sm80(const __grid_constant__ AttentionBackwardParams params) {
    __shared__ RowTileRanges::Storage sRanges;
    const RowTileRanges rows(params, sRanges);
    if (rows.entries == nullptr) return;
    const int32_t num_tiles = ceil_div(rows.num_keys, params.seen_tiles.block_n), lane = threadIdx.x;
    for (int32_t first = 0; first < num_tiles; first += kWarpSize) {
        const SeenKeys keys = rows.look_at(first + lane);
        const uint32_t seen = __ballot_sync(0xffffffff, keys.some), full = __ballot_sync(0xffffffff, keys.all);
        if (lane == 0) reinterpret_cast<uint2*>(rows.entries)[first / kWarpSize] = {seen, full};
    }
}

inline void launch_attention_backward_ranges_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                                  Stream stream) {
    kernel.launch(attention_backward_ranges_sm80, launch_for_row_tiles(params), params, stream);
}

}  // namespace fastattn
