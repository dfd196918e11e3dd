// The workspace in which CTAs of different keys add up dQ, in fp32: one block for each tile of query rows of a head.
//
// The kernels for sm_80 write it in the order in which the threads of a CTA hold it in registers, so that a warp adds
// 128 adjacent bytes at a time. Those for Hopper write panels of 64 rows by 64 dims.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/params.h"

namespace fastattn {

// Returns the index of the first tile of a sequence that starts at `begin`.
FASTATTN_HOST_DEVICE int32_t first_query_tile(int32_t batch, int32_t rows, bool is_packed, int32_t begin,
                                              int32_t block_m) {
    return is_packed ? first_packed_tile(batch, begin, block_m) : batch * ceil_div(rows, block_m);
}

// Returns how many tiles of block_m rows all sequences of one head need at most.
FASTATTN_HOST_DEVICE int32_t num_query_tiles(int32_t batch, int32_t rows, bool is_packed, int32_t total_rows,
                                             int32_t block_m) {
    return first_query_tile(batch, rows, is_packed, total_rows, block_m);
}

// A panel of a tile, as Hopper's kernels write it: [64 rows][64 dims]. Blocks of 8 columns of row r stand where block b
// ^ (r % 4) would, so that the lanes of an accumulator's rows reach all banks of shared memory.
inline constexpr int kPanelRows = 64, kPanelDims = 64;
inline constexpr int kPanelElements = kPanelRows * kPanelDims;

// How many numbers a tile of rows of a head has.
FASTATTN_HOST_DEVICE constexpr int64_t query_tile_elements(bool in_panels, int32_t block_m, int32_t head_dim) {
    return int64_t{block_m} * (in_panels ? ceil_div(head_dim, kPanelDims) * kPanelDims : head_dim);
}

FASTATTN_HOST_DEVICE int32_t panel_offset(int32_t row, int32_t block) {
    return row * kPanelDims + (block ^ row % 4) * 8;
}

// dK and dV of split tiles of keys are added up in panels too: [2: dK, dV][blocks of 64 keys][blocks of 64 dims][a
// panel].
FASTATTN_HOST_DEVICE constexpr int64_t key_tile_elements(int32_t block_n, int32_t head_dim) {
    return 2 * query_tile_elements(/*in_panels=*/true, block_n, head_dim);
}

}  // namespace fastattn
