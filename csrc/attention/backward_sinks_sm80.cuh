// Attention backward, the gradient of the sinks. A sink is a logit without a value, so that its dS is P (0 - delta):
//
//   grad_sinks[h] = sum over batch and rows of exp(sink - shift) / 2^log2_sum * -delta
//
//   one CTA owns a head:   adjacent threads take adjacent rows, 4 each → sum of a thread → of a warp → of the CTA
//
// Sums are added in a fixed order, without atomics. A row with an lse of -inf sees nothing, not even the sink, or
// belongs to no sequence. The kernel does not read the shift, log2_sum and delta of such a row.
#pragma once

#include "attention/backward.h"
#include "device/fragment.cuh"
#include "device/reduce.cuh"
#include "device/softmax.cuh"
#include "device/tile_copy.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kBackwardSinksThreads = 1024;

// The rows of a head that one thread takes, sequence by sequence.
struct RowsOfThread {
    int32_t num_batches, num_rows, batch, row;

    FASTATTN_DEVICE RowsOfThread(int32_t num_batches, int32_t num_rows, int32_t thread)
        : num_batches(num_rows == 0 ? 0 : num_batches),
          num_rows(max(num_rows, 1)),
          batch(thread / this->num_rows),
          row(thread % this->num_rows) {}

    FASTATTN_DEVICE bool exists() const { return batch < num_batches; }

    FASTATTN_DEVICE void advance() {
        batch += kBackwardSinksThreads / num_rows;
        row += kBackwardSinksThreads % num_rows;
        if (row < num_rows) return;
        row -= num_rows;
        ++batch;
    }
};

__global__ void __launch_bounds__(kBackwardSinksThreads)
    attention_backward_sinks_sm80(const __grid_constant__ AttentionBackwardParams params) {
    constexpr int kRowsAtOnce = 4;      // rows whose loads are in flight together
    __shared__ float sSums[kWarpSize];  // of each warp
    static_assert(kBackwardSinksThreads == kWarpSize * kWarpSize, "one warp adds what all have");
    const int32_t head = blockIdx.x;
    const float sink = params.scores.sinks[head];
    const bool is_packed = params.packed.cu_seqlens_q != nullptr, has_log2_sum = params.log2_sum.data != nullptr;
    RowsOfThread rows(is_packed ? 1 : params.lse.batch, is_packed ? params.packed.total_q : params.lse.rows,
                      threadIdx.x);

    float sum = 0.0f;
    while (rows.exists()) {
        float lse[kRowsAtOnce], shift[kRowsAtOnce], log2_sum[kRowsAtOnce], delta[kRowsAtOnce];
        int32_t batch[kRowsAtOnce], row[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            batch[i] = rows.batch;
            row[i] = rows.row;
            lse[i] = rows.exists() ? row_pointer(params.lse, batch[i], head)[row[i]] : -kInfinity;
            rows.advance();
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const bool counts = lse[i] != -kInfinity;
            delta[i] = counts ? row_pointer(params.delta, batch[i], head)[row[i]] : 0.0f;
            shift[i] = counts && has_log2_sum ? row_pointer(params.shift, batch[i], head)[row[i]] : lse[i];
            log2_sum[i] = counts && has_log2_sum ? row_pointer(params.log2_sum, batch[i], head)[row[i]] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            sum -= lse[i] != -kInfinity ? probability_of(sink, shift[i], log2_sum[i]) * delta[i] : 0.0f;
        }
    }

    sum = warp_reduce_sum(sum);
    if (threadIdx.x % kWarpSize == 0) sSums[threadIdx.x / kWarpSize] = sum;
    __syncthreads();  // waits until every warp's sum is in shared memory
    if (threadIdx.x >= kWarpSize) return;
    sum = warp_reduce_sum(sSums[threadIdx.x]);
    if (threadIdx.x == 0) params.grad_sinks[head] = sum;
}

inline void launch_attention_backward_sinks_sm80(LaunchedKernel& kernel, const AttentionBackwardParams& params,
                                                 Stream stream) {
    const Launch launch{params.lse.heads, kBackwardSinksThreads, /*shared_bytes=*/0};
    kernel.launch(attention_backward_sinks_sm80, launch, params, stream);
}

}  // namespace fastattn
