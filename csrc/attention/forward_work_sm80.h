// What a CTA of the forward kernels for sm_80 computes: a tile of query rows, with all keys that these see or a part of
// them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/key_shares.h"
#include "attention/key_tiles.cuh"
#ifdef __CUDACC__
#include "attention/part_rows.cuh"
#endif
#include "attention/tile_order.h"
#include "device/paged_rows.cuh"
#include "device/sequence.cuh"
#include "host/params.h"

namespace fastattn {

// Without the workspace where no tile can be cut into parts.
inline AttentionForwardParams forward_work_sm80(const AttentionForwardParams& params, int32_t block_m,
                                                int32_t block_n) {
    AttentionForwardParams work = params;
    const int64_t entries = int64_t{ceil_div(params.query.rows, block_m)} * params.query.batch;
    if (!cuts_may_pay(params, block_m, block_n, entries * params.query.heads, entries, params.resident_ctas))
        work.parts = {};
    return work;
}

inline int64_t num_ctas_sm80(const AttentionForwardParams& work, int32_t block_m) {
    const int64_t tiles = int64_t{ceil_div(work.query.rows, block_m)} * work.query.heads * work.query.batch;
    if (work.parts.values == nullptr) return tiles;
    return std::max(tiles, int64_t{kMostSlotsPerCta} * work.resident_ctas);
}

#ifdef __CUDACC__
struct QueryTile {
    int32_t batch, head, idx;
};

// The last tiles of all heads come first: under a causal mask these are the longest.
__device__ __forceinline__ QueryTile query_tile(const AttentionForwardParams& params, int32_t block_m, uint32_t piece,
                                                bool in_line) {
    const int32_t num_tiles = ceil_div(params.query.rows, block_m), heads = params.query.heads;
    const HeadTile tile =
        head_tile(piece, params.query.batch, heads, in_line ? heads : params.heads_per_group, num_tiles);
    return {tile.batch, tile.head, num_tiles - 1 - tile.position};
}

__device__ __forceinline__ Sequence query_rows(const AttentionForwardParams& params, int32_t batch) {
    return sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
}

template <bool kPaged>
__device__ __forceinline__ Sequence keys_of_sequence(const AttentionForwardParams& params, int32_t batch) {
    if (kPaged) return {0, paged_keys(params.packed.cu_seqlens_k, batch, params.key.rows)};
    return sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
}

// A whole warp, where CTAs may share the keys of a tile. The portion goes into shared memory, and every thread reads it
// there. A call, and no copy in registers: either would cost the main loops their own.
template <int kBlockM, int kBlockN, bool kPaged>
__device__ __noinline__ void find_portion(KeyPortion& portion, const AttentionForwardParams& params) {
    const int lane = threadIdx.x % kWarpSize, num_tiles = ceil_div(params.query.rows, kBlockM);
    const auto steps_of = [&](uint32_t entry) {
        const int32_t batch = entry / num_tiles, first_row = (num_tiles - 1 - entry % num_tiles) * kBlockM;
        const Sequence rows = query_rows(params, batch);
        if (first_row >= rows.length) return 0;
        const Window window = window_of(params.scores, rows.length, keys_of_sequence<kPaged>(params, batch).length);
        const int32_t last_row = min(first_row + kBlockM, rows.length) - 1;
        const KeyTiles tiles(window.keys_of(first_row), window.keys_of(last_row), kBlockN);
        return max(tiles.num_tiles(), 1);
    };
    const KeyPortion found = key_portion(params.query.batch * num_tiles, params.query.heads, blockIdx.x,
                                         params.resident_ctas, lane, steps_of);
    if (lane == 0) portion = found;
}

// Where the rows of a tile stand in memory: see part_rows.cuh.
struct PlaceOfTile {
    QueryTile tile;
    Sequence rows;
    int32_t first_row;

    __device__ __forceinline__ int32_t num_rows() const { return rows.length - first_row; }
    __device__ __forceinline__ int32_t batch() const { return tile.batch; }
    __device__ __forceinline__ int32_t head_of(int) const { return tile.head; }
    __device__ __forceinline__ int32_t row_in_memory(int row) const { return rows.begin + first_row + row; }
};

// With more quads at a time, the plain kernel for 32 dims spills in its loops; the other CTAs of the SM hide the
// latency.
template <int kBlockM, int kHeadDim, DataType kDataType>
using PartRowsSm80 = PartRows<kBlockM, kHeadDim, kDataType, /*kSlotsPerCta=*/1, /*kQuadsAtOnce=*/2, PlaceOfTile>;
#endif

}  // namespace fastattn
