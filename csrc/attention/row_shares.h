// How many CTAs share the query rows of a tile of keys in the backward pass, where whole tiles would leave CTAs idle: few
// key heads (MQA, GQA), few sequences, or a last round of tiles that only some CTAs have one of.
//
// A CTA goes through the steps of a tile: the tiles of rows, the last ones first, and of each those of all query heads of the
// key head. CTAs that share a tile divide the query heads among themselves, and where these are too few, the tiles of rows;
// they add what they find of dK and dV up in fp32.
#pragma once

#include <cstdint>

#include "attention/query_gradient.h"
#include "host/host_device.h"
#include "host/params.h"

namespace fastattn {

inline constexpr int32_t kLeastStepsOfShare = 4;
inline constexpr int32_t kMostConsumersOfTile = 3;  // who wait for turns to add their parts of dK and dV

// One of the CTAs that share a tile.
struct RowShare {
    uint32_t tile;
    int32_t share;
};

FASTATTN_HOST_DEVICE RowShare nth_share(const RowShares& shares, uint32_t item) {
    if (item < shares.first_tile) return {item, 0};
    const uint32_t behind = item - shares.first_tile, most = shares.of_heads * shares.of_rows;
    return {shares.first_tile + behind / most, static_cast<int32_t>(behind % most)};
}

// Into how many parts the query heads and the tiles of rows of a tile of keys are divided: into less where these are short.
struct RowParts {
    int32_t of_heads, of_rows;

    FASTATTN_HOST_DEVICE RowParts(const RowShares& shares, uint32_t tile, int32_t group_size, int32_t num_row_tiles)
        : of_heads(1), of_rows(1) {
        if (tile < shares.first_tile) return;
        const int32_t steps_of_heads = group_size / shares.of_heads * num_row_tiles;
        if (steps_of_heads < kLeastStepsOfShare) return;
        of_heads = shares.of_heads;
        const int32_t long_enough = steps_of_heads / kLeastStepsOfShare;
        of_rows = long_enough < num_row_tiles ? long_enough : num_row_tiles;
        of_rows = of_rows < shares.of_rows ? of_rows : shares.of_rows;
    }

    FASTATTN_HOST_DEVICE int32_t num() const { return of_heads * of_rows; }
};

// Where part i of so many begins.
FASTATTN_HOST_DEVICE int32_t begin_of_part(int32_t count, int32_t part, int32_t num_parts) {
    const int32_t longer = count % num_parts;
    return count / num_parts * part + (part < longer ? part : longer);
}

// Tiles of keys of all heads; of packed sequences, at most.
FASTATTN_HOST_DEVICE int64_t num_key_tiles(const AttentionBackwardParams& params, int32_t block_n) {
    const bool is_packed = params.packed.cu_seqlens_k != nullptr;
    return int64_t{params.key.heads} *
           num_query_tiles(params.key.batch, params.key.rows, is_packed, params.packed.total_k, block_n);
}

// Of these, the tiles that have sums: where they are cut.
inline int64_t num_shared_tiles(const AttentionBackwardParams& params, int32_t block_n) {
    return params.shares.of_heads * params.shares.of_rows > 1
               ? num_key_tiles(params, block_n) - params.shares.first_tile
               : 0;
}

}  // namespace fastattn
