// The work tile of a CTA of the forward kernels for sm_80: a row tile, with all keys that it sees or a split of them.
#pragma once

#include <cstdint>

#include "attention/key_tiles.cuh"
#include "host/min_max.h"
#include "scheduler/key_splits.h"
#ifdef __CUDACC__
#include "device/ptx/opaque.cuh"
#endif
#include "device/paged_rows.cuh"
#include "device/sequence.cuh"
#include "host/params.h"
#include "scheduler/work_tile.h"

namespace fastattn {

// Returns the parameters with which the kernel is launched: `params`, but without a workspace if no tile can be split.
inline AttentionForwardParams launched_params_sm80(const AttentionForwardParams& params, int32_t block_m,
                                                   int32_t block_n) {
    AttentionForwardParams launched = params;
    const int64_t entries = int64_t{ceil_div(params.query.rows, block_m)} * params.query.batch;
    if (!splitting_may_pay(params, block_m, block_n, entries * params.query.heads, entries, params.resident_ctas))
        launched.partials = {};
    return launched;
}

inline int64_t num_ctas_sm80(const AttentionForwardParams& params, int32_t block_m) {
    const int64_t tiles = int64_t{ceil_div(params.query.rows, block_m)} * params.query.heads * params.query.batch;
    if (params.partials.values == nullptr) return tiles;
    return std::max(tiles, int64_t{kMostSlotsPerCta} * params.resident_ctas);
}

#ifdef __CUDACC__
struct QueryTile {
    int32_t batch, head, idx;
};

// Returns the row tile of a work tile. The last row tiles of all heads come first: under a causal mask they take
// longest. in_split_order: whether tile_idx counts in the order of key_splits.h, in which heads form no groups.
FASTATTN_DEVICE QueryTile query_tile(const AttentionForwardParams& params, int32_t block_m, uint32_t tile_idx,
                                     bool in_split_order) {
    const int32_t num_tiles = ceil_div(params.query.rows, block_m), heads = params.query.heads;
    const WorkTile tile =
        work_tile(tile_idx, params.query.batch, heads, in_split_order ? heads : params.heads_per_group, num_tiles);
    return {tile.batch, tile.head, num_tiles - 1 - tile.position};
}

FASTATTN_DEVICE Sequence query_rows(const AttentionForwardParams& params, int32_t batch) {
    return sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
}

template <bool kPaged>
FASTATTN_DEVICE Sequence keys_of_sequence(const AttentionForwardParams& params, int32_t batch) {
    if (kPaged) return {0, paged_keys(params.packed.cu_seqlens_k, batch, params.key.rows)};
    return sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
}

// Finds the CTA's split, and writes it to shared memory, where every thread reads it. Not inlined, and returns nothing,
// because its code or a copy of the split would take registers from the main loops. Called by a whole warp.
template <int kBlockM, int kBlockN, bool kPaged>
__device__ __noinline__ void find_split(KeySplit& split, const AttentionForwardParams& params) {
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
    const KeySplit found =
        key_split(params.query.batch * num_tiles, params.query.heads, blockIdx.x, params.resident_ctas, lane, steps_of);
    if (lane == 0) split = found;
}

// Finds the CTA's split, writes it to shared memory, and returns it. Called by all threads.
template <int kBlockM, int kBlockN, bool kPaged>
FASTATTN_DEVICE KeySplit own_split(KeySplit& shared_split, const AttentionForwardParams& params, int warp) {
    if (params.partials.values == nullptr) {
        if (ptx::tid_x() == 0) shared_split = {false, true, blockIdx.x, 0, 1};
    } else if (warp == 0) {
        find_split<kBlockM, kBlockN, kPaged>(shared_split, params);
    }
    __syncthreads();  // waits until the split is in shared memory
    return shared_split;
}
#endif

}  // namespace fastattn
