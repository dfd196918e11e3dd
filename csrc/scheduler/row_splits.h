// Splits the query rows of a tile of keys in the backward pass if whole tiles would leave CTAs idle: with few key heads
// (MQA, GQA), few sequences, or a last wave with fewer tiles than CTAs.
//
// A step of a tile of keys is one tile of query rows in one query head. The steps go through the tiles of rows that see
// the tile of keys, last rows first, and for each tile of rows through the query heads of the key head. Splits divide
// the query heads and, if there are too few query heads, also the tiles of rows. The CTAs of a split tile add their dK
// and dV to sums in fp32.
#pragma once

#include <cstdint>

#include "attention/query_sums.h"
#include "host/host_device.h"
#include "host/params.h"

namespace fastattn {

inline constexpr int32_t kMinStepsOfSplit = 4;
inline constexpr int32_t kMostConsumersOfTile = 2;  // each orders its additions of dK and dV by its own semaphore
struct RowSplit {
    uint32_t tile;
    int32_t idx;
};

FASTATTN_HOST_DEVICE RowSplit nth_row_split(const RowSplits& splits, uint32_t index) {
    if (index < splits.first_tile) return {index, 0};
    const uint32_t behind = index - splits.first_tile, most = splits.over_heads * splits.over_rows;
    return {splits.first_tile + behind / most, static_cast<int32_t>(behind % most)};
}

// How many splits one tile of keys has, over the query heads and over the tiles of rows. Short tiles have fewer.
struct TileRowSplits {
    int32_t over_heads, over_rows;

    FASTATTN_HOST_DEVICE TileRowSplits(const RowSplits& splits, uint32_t tile, int32_t group_size,
                                       int32_t num_row_tiles)
        : over_heads(1), over_rows(1) {
        if (tile < splits.first_tile) return;
        const int32_t head_steps = group_size / splits.over_heads * num_row_tiles;
        if (head_steps < kMinStepsOfSplit) return;
        over_heads = splits.over_heads;
        const int32_t long_enough = head_steps / kMinStepsOfSplit;
        over_rows = long_enough < num_row_tiles ? long_enough : num_row_tiles;
        over_rows = over_rows < splits.over_rows ? over_rows : splits.over_rows;
    }

    FASTATTN_HOST_DEVICE int32_t num() const { return over_heads * over_rows; }
};

// Returns where split `split` begins if `count` is divided into num_splits splits. The first splits are longer by one.
FASTATTN_HOST_DEVICE int32_t begin_of_even_split(int32_t count, int32_t split, int32_t num_splits) {
    const int32_t longer = count % num_splits;
    return count / num_splits * split + (split < longer ? split : longer);
}

// Returns how many tiles of keys all heads have. For packed sequences, this is an upper bound.
FASTATTN_HOST_DEVICE int64_t num_key_tiles(const AttentionBackwardParams& params, int32_t block_n) {
    const bool is_packed = params.packed.cu_seqlens_k != nullptr;
    return int64_t{params.key.heads} *
           num_query_tiles(params.key.batch, params.key.rows, is_packed, params.packed.total_k, block_n);
}

// Returns how many of the num_key_tiles() tiles are split, and so have sums in the workspace.
inline int64_t num_split_tiles(const AttentionBackwardParams& params, int32_t block_n) {
    return params.row_splits.over_heads * params.row_splits.over_rows > 1
               ? num_key_tiles(params, block_n) - params.row_splits.first_tile
               : 0;
}

}  // namespace fastattn
