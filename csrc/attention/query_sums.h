// The layout of the fp32 workspace in which the CTAs of all key tiles add up dQ: one block for each row tile of a head.
//
// The rows kernel zeroes the sums (backward_rows_sm80.cuh), the key-value kernels add to them
// (backward_key_value_*_sm80.cuh, backward_panels_sm90.cuh), and the query kernels read them (backward_query_*.cuh). A
// block has its sums in the order in which threads hold accumulators. On sm_80, for_each_sum() in
// backward_config_sm80.cuh defines this order for a whole CTA: a warp adds 128 adjacent bytes at a time. On Hopper, a
// block consists of panels of 64 rows by 64 dims, and each panel has the order of one warpgroup's accumulators.
#pragma once

#include <cstdint>

#include "host/host_device.h"
#include "host/params.h"

namespace fastattn {

// Returns the index of the first row tile of sequence `batch`, among all row tiles of a head. The sequence starts at
// row `begin`.
FASTATTN_HOST_DEVICE int32_t first_query_tile(int32_t batch, int32_t rows, bool is_packed, int32_t begin,
                                              int32_t block_m) {
    return is_packed ? first_packed_tile(batch, begin, block_m) : batch * ceil_div(rows, block_m);
}

// Returns an upper bound of the number of tiles, of block_m rows each, that all sequences of one head need.
FASTATTN_HOST_DEVICE int32_t num_query_tiles(int32_t batch, int32_t rows, bool is_packed, int32_t total_rows,
                                             int32_t block_m) {
    return first_query_tile(batch, rows, is_packed, total_rows, block_m);
}

// The layout of a panel of the Hopper kernels, in fp32: [8 blocks of 8 columns, 128 threads of a warpgroup, 4
// accumulators]. So a thread stores 16 bytes at a time, and the threads of a warp store adjacent bytes.
inline constexpr int kPanelRows = 64, kPanelDims = 64;
inline constexpr int kPanelElements = kPanelRows * kPanelDims;
inline constexpr int kPanelBlockElements = kPanelRows * 8;

// Returns how many floats the block of one row tile of a head has.
FASTATTN_HOST_DEVICE constexpr int64_t query_tile_elements(bool in_panels, int32_t block_m, int32_t head_dim) {
    return int64_t{block_m} * (in_panels ? ceil_div(head_dim, kPanelDims) * kPanelDims : head_dim);
}

// Returns how many floats of workspace the sums of dK and dV of a split key tile take: [dK or dV, panels of 64 keys by
// 64 dims]. dV has as much room as dK, though its head dim may be smaller.
FASTATTN_HOST_DEVICE constexpr int64_t key_tile_elements(int32_t block_n, int32_t head_dim) {
    return 2 * query_tile_elements(/*in_panels=*/true, block_n, head_dim);
}

}  // namespace fastattn
