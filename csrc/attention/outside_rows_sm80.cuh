// Fills the rows of packed tensors that lie outside of all sequences, or behind the first max_seqlen rows of a
// sequence. Such rows form gaps: before the first sequence, between two sequences, and behind the last one. Most calls
// have no gap, or one behind the last sequence.
//
//   each warp:   each lane looks for a gap → for each gap found: all lanes fill rows
//
// Every CTA looks for all gaps, each of its warps for those of 32 sequences at a time. CTAs take the rows of a gap in
// turn; of the lse, they take blocks of 32 rows in turn.
#pragma once

#include <cstdint>

#include "attention/outside_rows.h"
#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"
#include "host/launch.h"

namespace fastattn {

inline constexpr int kOutsideRowsThreads = 128;

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

// Called by one warp.
FASTATTN_DEVICE void zero_rows(const OutsideRowsParams::PackedTensor& tensor, const RowRange& rows, int lane) {
    const int32_t chunks_of_row = tensor.heads * tensor.chunks;
    for (int64_t row = int64_t{rows.begin} + blockIdx.x; row < rows.end; row += gridDim.x) {
        for (int32_t i = lane; i < chunks_of_row; i += kWarpSize) {
            const int32_t head = i / tensor.chunks, chunk = i - head * tensor.chunks;
            char* gChunk = tensor.data + row * tensor.row_bytes + head * tensor.head_bytes;
            reinterpret_cast<uint4*>(gChunk)[chunk] = {0, 0, 0, 0};
        }
    }
}

// Called by one warp.
FASTATTN_DEVICE void hide_rows(const RowsView& lse, const RowRange& rows, int lane) {
    const int64_t first_row = int64_t{rows.begin} + int64_t{blockIdx.x} * kWarpSize + lane;
    for (int64_t row = first_row; row < rows.end; row += int64_t{gridDim.x} * kWarpSize) {
        for (int32_t head = 0; head < lse.heads; ++head) lse.data[head * lse.head_stride + row] = -kInfinity;
    }
}

__global__ void __launch_bounds__(kOutsideRowsThreads)
    attention_outside_rows_sm80(const __grid_constant__ OutsideRowsParams params) {
    const int warp = warp_in_cta(), lane = threadIdx.x % kWarpSize;
    for (int idx = 0; idx < params.num_tensors; ++idx) {
        const OutsideRowsParams::PackedTensor& tensor = params.tensors[idx];
        for (int32_t first = warp * kWarpSize; first <= tensor.batch; first += kOutsideRowsThreads) {
            const int32_t next = first + lane;
            const RowRange found = next <= tensor.batch ? gap_before(tensor, next) : RowRange{0, 0};
            for (uint32_t left = __ballot_sync(0xffffffff, found.begin < found.end); left != 0; left &= left - 1) {
                const int finder = __ffs(left) - 1;
                const RowRange gap{__shfl_sync(0xffffffff, found.begin, finder),
                                   __shfl_sync(0xffffffff, found.end, finder)};
                zero_rows(tensor, gap, lane);
                if (idx == 0 && params.lse.data != nullptr) hide_rows(params.lse, gap, lane);
            }
        }
    }
}

inline void launch_attention_outside_rows_sm80(LaunchedKernel& kernel, const OutsideRowsParams& params, Stream stream) {
    kernel.launch(attention_outside_rows_sm80, Launch{params.num_ctas, kOutsideRowsThreads, 0}, params, stream);
}

}  // namespace fastattn
