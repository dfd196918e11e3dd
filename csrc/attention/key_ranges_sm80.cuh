// For the forward kernels: lists the key tiles that each row tile sees through its ranges of keys. Full tiles, of which
// every row sees every key, come first. Then come the other tiles of which some row sees some key. Both groups are in
// ascending order.
//
// A CTA is a single warp. It writes the list of one row tile (KeyTileList) to SeenTiles.
//
//   pass over full tiles, then over the others:   each lane tests one key tile → ballot → lanes append their tiles
//
// Preconditions: those of RowTileRanges.
#pragma once

#include "attention/forward.h"
#include "attention/key_tiles.cuh"
#include "attention/row_tile_ranges.cuh"

namespace fastattn {

__global__ void __launch_bounds__(kWarpSize)
    attention_key_ranges_sm80(const __grid_constant__ AttentionForwardParams params) {
    __shared__ RowTileRanges::Storage sRanges;
    const RowTileRanges rows(params, sRanges);
    if (rows.entries == nullptr) return;
    const KeyTileList list{rows.entries};
    const int32_t num_tiles = ceil_div(rows.num_keys, params.seen_tiles.block_n), lane = threadIdx.x;
    int32_t count = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const bool takes_full = pass == 0;
        for (int32_t first = 0; first < num_tiles; first += kWarpSize) {
            const SeenKeys seen = rows.look_at(first + lane);
            const bool is_listed = takes_full ? seen.all : seen.some && !seen.all;
            const uint32_t listed = __ballot_sync(0xffffffff, is_listed);
            if (is_listed) list.tile(count + __popc(listed & ((1u << lane) - 1))) = first + lane;
            count += __popc(listed);
        }
        if (lane == 0) (takes_full ? list.num_full() : list.num_tiles()) = count;
    }
}

inline void launch_attention_key_ranges_sm80(LaunchedKernel& kernel, const AttentionForwardParams& params,
                                             Stream stream) {
    kernel.launch(attention_key_ranges_sm80, launch_for_row_tiles(params), params, stream);
}

}  // namespace fastattn
