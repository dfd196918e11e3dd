// How the tiles of query rows are dealt to the CTAs of the forward kernel for sm_90.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "attention/key_tiles.cuh"
#include "attention/tile_order.h"
#include "device/sequence.cuh"
#include "host/params.h"
#include "host/tensor_map.h"

namespace fastattn {

// A cluster takes one piece of work after the other. Its CTAs need the same tiles of keys: two heads that read one key head,
// or two tiles of one head's rows, side by side.
struct ForwardWorkSm90 {
    int32_t heads_per_cluster, tiles_per_cluster;  // 1 and 1, 2 and 1, or 1 and 2
    uint32_t num;                                  // pieces of work

    FASTATTN_HOST_DEVICE int cluster_size() const { return heads_per_cluster * tiles_per_cluster; }
};

// What the launch tells the kernel.
struct AttentionForwardParamsSm90 {
    AttentionForwardParams attention;
    ForwardWorkSm90 work;
    TensorMap query, key, value;
};

// shares_keys: whether sharing the copies of keys pays at all, because the L2 cache could not deliver them to each CTA.
inline ForwardWorkSm90 forward_work_sm90(const AttentionForwardParams& params, int32_t block_m, bool shares_keys,
                                         int32_t num_sms) {
    ForwardWorkSm90 work{1, 1, 0};
    const int32_t tiles = ceil_div(params.query.rows, block_m), group = params.query.heads / params.key.heads;
    const bool fills_gpu = int64_t{tiles} * params.query.heads * params.query.batch >= num_sms;
    if (shares_keys && fills_gpu && num_sms % 2 == 0) {
        // Under a mask two tiles of rows see different keys: both then take what either sees.
        const bool is_masked = params.scores.window_left >= 0 || params.scores.window_right >= 0;
        constexpr int32_t kManyTiles = 64;  // of rows, so that a few tiles of keys too many do not count
        if (group % 2 == 0) {
            work.heads_per_cluster = 2;
        } else if (!is_masked ? tiles % 2 == 0 || tiles >= 16 : tiles >= kManyTiles) {
            work.tiles_per_cluster = 2;
        }
    }
    const int64_t num = int64_t{ceil_div(tiles, work.tiles_per_cluster)} *
                        (params.query.heads / work.heads_per_cluster) * params.query.batch;
    if (num > 0x7fffffff) throw std::runtime_error("fastattn: attention_forward_sm90: more than 2147483647 tiles");
    work.num = static_cast<uint32_t>(num);
    return work;
}

#ifdef __CUDACC__
// The rows of a CTA in one piece of work of its cluster, where it is number `rank`. They may lie behind the last one.
struct RowsOfCta {
    int32_t batch, head, kv_head, first_row;
    int32_t cluster_begin, cluster_end;  // rows of all of the cluster's CTAs
    Sequence rows, keys;
    Window window;

    __device__ __forceinline__ RowsOfCta(const AttentionForwardParams& params, const ForwardWorkSm90& work, uint32_t i,
                                         int rank, int32_t block_m) {
        const int32_t rows_per_cluster = block_m * work.tiles_per_cluster;
        const int32_t num_positions = ceil_div(params.query.rows, rows_per_cluster);
        const HeadTile tile = head_tile(i, params.query.batch, params.query.heads / work.heads_per_cluster,
                                        max(params.heads_per_group / work.heads_per_cluster, 1), num_positions);
        batch = tile.batch;
        head = tile.head * work.heads_per_cluster + (work.heads_per_cluster > 1 ? rank : 0);
        kv_head = head / (params.query.heads / params.key.heads);
        // The last tiles come first: under a causal mask these are the longest.
        cluster_begin = (num_positions - 1 - tile.position) * rows_per_cluster;
        first_row = cluster_begin + (work.tiles_per_cluster > 1 ? rank * block_m : 0);
        rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
        keys = sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows);
        cluster_end = min(cluster_begin + rows_per_cluster, rows.length);
        window = window_of(params.scores, rows.length, keys.length);
    }

    // The same for all CTAs of the cluster. None where it has no rows.
    __device__ __forceinline__ KeyTiles key_tiles(int32_t block_n) const {
        if (cluster_begin >= rows.length) return {KeyRange{0, 0}, KeyRange{0, 0}, block_n};
        return {window.keys_of(cluster_begin), window.keys_of(cluster_end - 1), block_n};
    }
};
#endif

}  // namespace fastattn
