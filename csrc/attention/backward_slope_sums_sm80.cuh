// Attention backward, the gradient of ALiBi slopes, from the sums of row tiles that backward_slopes_sm80.cuh has
// written:
//
//   grad_slopes[batch, head] = sum of slope_sums[tile, head] over the row tiles of the sequence,
//                              or of all sequences if they share their slopes
//
//   one CTA owns one gradient:   threads take row tiles, kBackwardSlopeSumsThreads apart → sum of a thread → warp → CTA
//
// Sums are added in a fixed order, without atomics.
#pragma once

#include "attention/backward.h"
#include "attention/query_sums.h"
#include "device/fragment.cuh"
#include "device/reduce.cuh"
#include "device/sequence.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kBackwardSlopeSumsThreads = 128;

__global__ void __launch_bounds__(kBackwardSlopeSumsThreads)
    attention_backward_slope_sums_sm80(const __grid_constant__ AttentionBackwardParams params) {
    __shared__ float sSums[kBackwardSlopeSumsThreads / kWarpSize];  // of each warp
    const int32_t num_heads = params.query.heads, num_rows = params.query.rows;
    const int32_t head = blockIdx.x % num_heads, own_batch = blockIdx.x / num_heads;
    const bool is_shared = params.grad_slopes.batch == 1, is_packed = params.packed.cu_seqlens_q != nullptr;
    const int32_t end_batch = is_shared ? params.query.batch : own_batch + 1;

    // Threads take turns over the tiles of all sequences, so that many short sequences also keep all threads busy.
    float sum = 0.0f;
    int32_t next_tile = threadIdx.x;  // this thread's next tile, counted from the sequence's first one
    for (int32_t batch = own_batch; batch < end_batch; ++batch) {
        const Sequence rows = sequence_of(params.packed.cu_seqlens_q, batch, params.packed.total_q, num_rows);
        const int32_t num_tiles = ceil_div(rows.length, kSlopesBlockM);
        const int32_t first_tile = first_query_tile(batch, num_rows, is_packed, rows.begin, kSlopesBlockM);
        for (; next_tile < num_tiles; next_tile += kBackwardSlopeSumsThreads) {
            sum += params.slope_sums[int64_t{first_tile + next_tile} * num_heads + head];
        }
        next_tile -= num_tiles;
    }

    sum = warp_reduce_sum(sum);
    if (threadIdx.x % kWarpSize == 0) sSums[threadIdx.x / kWarpSize] = sum;
    __syncthreads();  // waits until every warp's sum is in shared memory
    if (threadIdx.x != 0) return;
    float sum_of_all = 0.0f;
    for (const float sum_of_warp : sSums) sum_of_all += sum_of_warp;
    params.grad_slopes.data[blockIdx.x] = sum_of_all;
}

inline void launch_attention_backward_slope_sums_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                                      Stream stream) {
    const Launch launch{int64_t{params.grad_slopes.batch} * params.query.heads, kBackwardSlopeSumsThreads,
                        /*shared_bytes=*/0};
    kernel.launch(attention_backward_slope_sums_sm80, launch, params, stream);
}

}  // namespace fastattn
