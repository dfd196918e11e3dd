// The device's side of split_plan.h: a warp finds a sequence's place on the line of spans.
#pragma once

#include <cstdint>

#include "decode/split_plan.h"
#include "device/fragment.cuh"

namespace fastattn {

// The tiles of a sequence stand side by side on the line, from span `first_span` on.
struct PlannedSequence {
    int32_t batch;
    int64_t first_span;
    CachedSequence tokens;
    TileSpans spans;
};

// Where the sequences of each lane lie on the line. It is in shared memory, because it would otherwise take registers,
// which the loop of steps needs, for the whole kernel.
struct PlannedLine {
    int64_t first_span[kWarpSize], end_span[kWarpSize];
    int64_t spans_per_cta, num_spans;
};

// Each lane counts the spans of neighbouring sequences.
template <int kBlockN>
class PlannedWork {
  public:
    // All threads of the CTA come here, and go on when the line is known.
    __device__ __forceinline__ PlannedWork(const DecodeParams& params, PlannedLine& shared, int lane)
        : params_(params), shared_(shared), lane_(lane) {
        if (threadIdx.x < kWarpSize) {
            const int32_t end_batch = min(first_batch() + per_lane(), params.query.batch);
            int64_t own = 0;
            for (int32_t batch = first_batch(); batch < end_batch; ++batch) own += sequence(batch).spans.num_spans;
            own *= params.plan.tiles_per_sequence;
            int64_t upto = own;
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2) {
                const int64_t before = __shfl_up_sync(0xffffffff, upto, distance);
                if (lane >= distance) upto += before;
            }
            shared.first_span[lane] = upto - own;
            shared.end_span[lane] = upto;
            if (lane == kWarpSize - 1) {
                shared.num_spans = upto;
                shared.spans_per_cta = fastattn::spans_per_cta(params.plan, upto);
            }
        }
        __syncthreads();  // waits until the line is in shared memory
    }

    __device__ __forceinline__ int64_t spans_per_cta() const { return shared_.spans_per_cta; }

    // Of this CTA's share.
    __device__ __forceinline__ int64_t begin_span() const { return blockIdx.x * shared_.spans_per_cta; }

    __device__ __forceinline__ int64_t end_span() const {
        return min(begin_span() + shared_.spans_per_cta, shared_.num_spans);
    }

    // The sequence that has this span, which is one of the line's. All lanes of a warp get the same.
    __device__ __forceinline__ PlannedSequence sequence_with(int64_t span) const {
        int32_t batch = first_batch();
        int64_t first_span = shared_.first_span[lane_];
        const bool is_owner = first_span <= span && span < shared_.end_span[lane_];
        if (is_owner) {
            for (;; ++batch) {
                const int64_t spans = int64_t{params_.plan.tiles_per_sequence} * sequence(batch).spans.num_spans;
                if (span < first_span + spans) break;
                first_span += spans;
            }
        }
        const int owner = __ffs(__ballot_sync(0xffffffff, is_owner)) - 1;
        PlannedSequence found = sequence(__shfl_sync(0xffffffff, batch, owner));
        found.first_span = __shfl_sync(0xffffffff, first_span, owner);
        return found;
    }

  private:
    __device__ __forceinline__ int32_t per_lane() const { return ceil_div(params_.query.batch, kWarpSize); }

    __device__ __forceinline__ int32_t first_batch() const { return min(lane_ * per_lane(), params_.query.batch); }

    __device__ __forceinline__ PlannedSequence sequence(int32_t batch) const {
        PlannedSequence found{batch, 0, cached_sequence(params_.sequence, params_.cache_seqlens[batch]), {}};
        found.spans = tile_spans(params_.plan, found.tokens, kBlockN);
        return found;
    }

    const DecodeParams& params_;
    const PlannedLine& shared_;
    int lane_;
};

}  // namespace fastattn
