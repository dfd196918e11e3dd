// The workspace in which CTAs of different keys add up dQ, in fp32: one block for each tile of query rows of a head. Inside,
// numbers stand in the order in which the threads of a CTA hold them in registers, so that a warp adds 128 neighbouring
// bytes at a time.
#pragma once

#include <cstdint>

#include "host/host_device.h"

namespace fastattn {

// Tiles of block_m rows that all sequences of one head need at most. A packed sequence starts a tile of its own.
FASTATTN_HOST_DEVICE int32_t num_query_tiles(int32_t batch, int32_t rows, bool is_packed, int32_t total_rows,
                                             int32_t block_m) {
    return is_packed ? total_rows / block_m + batch : batch * ceil_div(rows, block_m);
}

// Index of the first tile of a sequence that starts at `begin`. Those of different sequences are disjoint: one of
// `length` rows needs at most length / block_m + 1, rounded as the starts are.
FASTATTN_HOST_DEVICE int32_t first_query_tile(int32_t batch, int32_t rows, bool is_packed, int32_t begin,
                                              int32_t block_m) {
    return is_packed ? begin / block_m + batch : batch * ceil_div(rows, block_m);
}

}  // namespace fastattn
