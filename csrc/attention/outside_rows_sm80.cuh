// Fills the rows of packed tensors that lie outside of all sequences, or behind the first max_seqlen rows of a
// sequence. Such rows form gaps: before the first sequence, between two sequences, and behind the last one. Most calls
// have no gap, or one behind the last sequence.
//
//   every CTA:   each thread finds a gap → barrier → all threads fill their part of each gap
//
// CTAs take the rows of a gap in turn; of the lse, they take the heads in turn.
#pragma once

#include <cstdint>

#include "attention/outside_rows.h"
#include "device/sequence.cuh"
#include "device/softmax.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kOutsideRowsThreads = 256;

// Returns the rows from where sequence `next` - 1 ends, or reaches max_seqlen, to where sequence `next` begins.
FASTATTN_DEVICE RowRange gap_before(const OutsideRowsParams::PackedTensor& tensor, int32_t next) {
    const auto sequence = [&](int32_t batch) {
        return sequence_of(tensor.cu_seqlens, batch, tensor.total, tensor.max_seqlen);
    };
    RowRange gap{0, tensor.total};
    if (next > 0) {
        const Sequence before = sequence(next - 1);
        gap.begin = before.begin + before.length;
    }
    if (next < tensor.batch) gap.end = sequence(next).begin;
    // Sequences that overlap have more tiles than kernels expect, and some of their rows are written by no kernel.
    return gap.begin <= gap.end ? gap : RowRange{0, tensor.total};
}

FASTATTN_DEVICE void zero_rows(const OutsideRowsParams::PackedTensor& tensor, const RowRange& rows) {
    const int32_t chunks_of_row = tensor.heads * tensor.chunks;
    for (int64_t row = int64_t{rows.begin} + blockIdx.x; row < rows.end; row += gridDim.x) {
        for (int32_t i = threadIdx.x; i < chunks_of_row; i += kOutsideRowsThreads) {
            const int32_t head = i / tensor.chunks, chunk = i - head * tensor.chunks;
            char* gChunk = tensor.data + row * tensor.row_bytes + head * tensor.head_bytes;
            reinterpret_cast<uint4*>(gChunk)[chunk] = {0, 0, 0, 0};
        }
    }
}

FASTATTN_DEVICE void hide_rows(const RowsView& lse, const RowRange& rows) {
    for (int32_t head = blockIdx.x; head < lse.heads; head += gridDim.x) {
        for (int64_t row = int64_t{rows.begin} + threadIdx.x; row < rows.end; row += kOutsideRowsThreads) {
            lse.data[head * lse.head_stride + row] = -kInfinity;
        }
    }
}

__global__ void __launch_bounds__(kOutsideRowsThreads)
    attention_outside_rows_sm80(const __grid_constant__ OutsideRowsParams params) {
    __shared__ RowRange sGaps[kOutsideRowsThreads];
    for (int idx = 0; idx < params.num_tensors; ++idx) {
        const OutsideRowsParams::PackedTensor& tensor = params.tensors[idx];
        for (int32_t first = 0; first <= tensor.batch; first += kOutsideRowsThreads) {
            const int32_t next = first + static_cast<int32_t>(threadIdx.x);
            const RowRange gap = next <= tensor.batch ? gap_before(tensor, next) : RowRange{0, 0};
            sGaps[threadIdx.x] = gap;
            if (__syncthreads_or(gap.begin < gap.end)) {
                for (const RowRange& rows : sGaps) {
                    zero_rows(tensor, rows);
                    if (idx == 0 && params.lse.data != nullptr) hide_rows(params.lse, rows);
                }
            }
            __syncthreads();  // waits until every thread has read the gaps
        }
    }
}

inline void launch_attention_outside_rows_sm80(LaunchedKernel& kernel, const OutsideRowsParams& params, Stream stream) {
    kernel.launch(attention_outside_rows_sm80, Launch{params.num_ctas, kOutsideRowsThreads, 0}, params, stream);
}

}  // namespace fastattn
