// The fp32 workspace in which the CTAs of all key tiles add up dQ: one block for each row tile of a head.
//
// The sm_80 kernels lay out a block in the order of the accumulators in a CTA's registers, so that a warp adds 128
// adjacent bytes at a time. The Hopper kernels lay it out in panels of 64 rows by 64 dims.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/params.h"

namespace fastattn {

// Returns the index of the first row tile of sequence `batch`, which starts at row `begin`.
FASTATTN_HOST_DEVICE int32_t first_query_tile(int32_t batch, int32_t rows, bool is_packed, int32_t begin,
                                              int32_t block_m) {
    return is_packed ? first_packed_tile(batch, begin, block_m) : batch * ceil_div(rows, block_m);
}

// Returns an upper bound of the number of tiles, of block_m rows each, that all sequences of one head need.
FASTATTN_HOST_DEVICE int32_t num_query_tiles(int32_t batch, int32_t rows, bool is_packed, int32_t total_rows,
                                             int32_t block_m) {
    return first_query_tile(batch, rows, is_packed, total_rows, block_m);
}

// A panel of the Hopper kernels: [64 rows, 64 dims] fp32. Row r holds its block b of 8 columns at b ^ (r % 4), so that
// a warp that stores accumulators reaches all banks of shared memory.
inline constexpr int kPanelRows = 64, kPanelDims = 64;
inline constexpr int kPanelElements = kPanelRows * kPanelDims;

// Returns how many floats the block of one row tile of a head has.
FASTATTN_HOST_DEVICE constexpr int64_t query_tile_elements(bool in_panels, int32_t block_m, int32_t head_dim) {
    return int64_t{block_m} * (in_panels ? ceil_div(head_dim, kPanelDims) * kPanelDims : head_dim);
}

FASTATTN_HOST_DEVICE int32_t panel_offset(int32_t row, int32_t block) {
    return row * kPanelDims + (block ^ row % 4) * 8;
}

// Returns how many floats the sums of a split key tile have. dK and dV are added up in panels too: [dK or dV, block of
// 64 keys, block of 64 dims, panel].
FASTATTN_HOST_DEVICE constexpr int64_t key_tile_elements(int32_t block_n, int32_t head_dim) {
    return 2 * query_tile_elements(/*in_panels=*/true, block_n, head_dim);
}

}  // namespace fastattn
