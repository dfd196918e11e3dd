// Splits the query rows of a tile of keys in the backward pass where whole tiles would leave CTAs idle: with few key
// heads (MQA, GQA), few sequences, or a last round with fewer tiles than CTAs.
//
// The steps of a tile of keys are the tiles of query rows that see it, last rows first, and for each of these the query
// heads of the key head. Splits divide the query heads and, where these are too few, the tiles of rows. The CTAs add
// their partial dK and dV up in fp32.
#pragma once

#include <cstdint>

#include "attention/query_sums.h"
#include "host/host_device.h"
#include "host/params.h"

namespace fastattn {

inline constexpr int32_t kMinStepsOfSplit = 4;
inline constexpr int32_t kMostConsumersOfTile = 3;  // each waits for its own semaphore to add its dK and dV
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

// Returns where a split begins when `count` is divided by num_splits. The first splits are longer by one.
FASTATTN_HOST_DEVICE int32_t split_begin(int32_t count, int32_t split, int32_t num_splits) {
    const int32_t longer = count % num_splits;
    return count / num_splits * split + (split < longer ? split : longer);
}

// Returns how many tiles of keys all heads have; for packed sequences, an upper bound.
FASTATTN_HOST_DEVICE int64_t num_key_tiles(const AttentionBackwardParams& params, int32_t block_n) {
    const bool is_packed = params.packed.cu_seqlens_k != nullptr;
    return int64_t{params.key.heads} *
           num_query_tiles(params.key.batch, params.key.rows, is_packed, params.packed.total_k, block_n);
}

// Returns how many of these tiles are split, and have sums in the workspace.
inline int64_t num_split_tiles(const AttentionBackwardParams& params, int32_t block_n) {
    return params.row_splits.over_heads * params.row_splits.over_rows > 1
               ? num_key_tiles(params, block_n) - params.row_splits.first_tile
               : 0;
}

}  // namespace fastattn
