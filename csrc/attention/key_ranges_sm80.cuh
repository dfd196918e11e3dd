// Lists the tiles of keys that each tile of rows sees through its ranges of keys (ScoreParams::ranges), for the forward
// kernels: first the tiles that every row sees all of, then those of which some row sees some key, both in ascending
// order. Other tiles are not visited.
//
// A warp, which is a CTA, makes one list, int32 [2 + length]: the number of full tiles, that of all, and the tiles. Its
// lanes look at 32 tiles of keys at a time. The lists of packed sequences lie one after the other, with a spare one for
// each sequence, so that nobody has to know the lengths. What ranges have outside of the keys is absent. Preconditions:
// a tile has at most kMostListedRows rows.
#pragma once

#include <cstdint>

#include "attention/forward.h"
#include "device/fragment.cuh"
#include "device/key_ranges.cuh"
#include "device/sequence.cuh"
#include "host/launch.h"

namespace fastattn {

__global__ void __launch_bounds__(kWarpSize)
    attention_key_ranges_sm80(const __grid_constant__ AttentionForwardParams params) {
    __shared__ KeyRange sRanges[kMostListedRows * kMostRanges];  // [rows of the tile, num]
    const KeyRangesView& ranges = params.scores.ranges;
    const TileLists& lists = params.tile_lists;
    const int lane = threadIdx.x;
    const int32_t num_tiles = ceil_div(params.query.rows, lists.block_m),
                  first_row = blockIdx.x % num_tiles * lists.block_m;
    const int32_t head = blockIdx.x / num_tiles % ranges.heads, batch = blockIdx.x / num_tiles / ranges.heads;
    const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, params.query.rows);
    if (first_row >= rows.length) return;
    const int32_t num_keys =
        sequence_of(params.packed.cu_seqlens_k, batch, params.packed.total_k, params.key.rows).length;
    const Window window = window_of(params.scores, rows.length, num_keys);

    // The ranges of each row, as far as its window goes.
    const int32_t num_ranges = min(rows.length - first_row, lists.block_m) * ranges.num;
    const RowRanges of_rows(ranges, batch, head, rows);
    for (int32_t i = lane; i < num_ranges; i += kWarpSize) {
        const int32_t row = first_row + i / ranges.num;
        const KeyRange range = of_rows.range(row, i % ranges.num), seen = window.keys_of(row);
        sRanges[i] = {max(range.begin, seen.begin), min(range.end, seen.end)};
    }
    __syncwarp();  // waits until every lane has written its ranges

    int32_t* list = lists.of(batch, head, first_row / lists.block_m, rows.begin);
    int32_t count = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        const bool takes_full = pass == 0;
        for (int32_t first = 0; first * lists.block_n < num_keys; first += kWarpSize) {
            const int32_t begin = (first + lane) * lists.block_n, end = begin + lists.block_n;
            bool sees_some = false, sees_all = end <= num_keys;
            for (int32_t row = 0; row < num_ranges; row += ranges.num) {
                bool row_sees_all = false;
                for (int32_t i = row; i < row + ranges.num; ++i) {
                    const KeyRange range = sRanges[i];
                    sees_some |= max(range.begin, begin) < min(range.end, end);
                    row_sees_all |= range.begin <= begin && range.end >= end;
                }
                sees_all &= row_sees_all;
            }
            const bool is_listed = takes_full ? sees_all : sees_some && !sees_all;
            const uint32_t listed = __ballot_sync(0xffffffff, is_listed);
            if (is_listed) list[2 + count + __popc(listed & ((1u << lane) - 1))] = first + lane;
            count += __popc(listed);
        }
        if (lane == 0) list[pass] = count;
    }
}

inline void launch_attention_key_ranges_sm80(LaunchedKernel& kernel, const AttentionForwardParams& params,
                                             Stream stream) {
    const KeyRangesView& ranges = params.scores.ranges;
    const int64_t num_lists =
        int64_t{ceil_div(params.query.rows, params.tile_lists.block_m)} * ranges.heads * ranges.batch;
    kernel.launch(attention_key_ranges_sm80, Launch{num_lists, kWarpSize, /*shared_bytes=*/0}, params, stream);
}

}  // namespace fastattn
