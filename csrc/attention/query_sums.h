// The layout of the fp32 workspace in which the CTAs of all key tiles add up dQ: one block for each row tile of a head.
//
// The key-value kernels add (backward_key_value_*_sm80.cuh, backward_panels_sm90.cuh), the rows kernel zeroes
// (backward_rows_sm80.cuh), and the query kernels read the sums (backward_query_*.cuh). Sums lie in the order of the
// accumulators in registers. On sm_80 this is the order of a CTA (for_each_sum() in backward_config_sm80.cuh), so that
// a warp adds 128 adjacent bytes at a time. On Hopper a row tile has panels of 64 rows by 64 dims, each in the order of
// a warpgroup.
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

// A panel of the Hopper kernels, in fp32: [8 blocks of 8 columns, thread of a warpgroup, 4 values]. So a thread stores
// 16 bytes at a time, next to those of its neighbour.
inline constexpr int kPanelRows = 64, kPanelDims = 64;
inline constexpr int kPanelElements = kPanelRows * kPanelDims;
inline constexpr int kPanelBlockElements = kPanelRows * 8;

// Returns how many floats the block of one row tile of a head has.
FASTATTN_HOST_DEVICE constexpr int64_t query_tile_elements(bool in_panels, int32_t block_m, int32_t head_dim) {
    return int64_t{block_m} * (in_panels ? ceil_div(head_dim, kPanelDims) * kPanelDims : head_dim);
}

// Returns how many floats the sums of a split key tile have: panels [dK or dV, 64 keys each, 64 dims each]. dV has as
// much room as dK, though its head dim may be smaller.
FASTATTN_HOST_DEVICE constexpr int64_t key_tile_elements(int32_t block_n, int32_t head_dim) {
    return 2 * query_tile_elements(/*in_panels=*/true, block_n, head_dim);
}

}  // namespace fastattn
