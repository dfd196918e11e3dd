// The device's side of decode_splits.h: a warp finds a sequence's position on the line of splits.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/reduce.cuh"
#include "scheduler/decode_splits.h"

namespace fastattn {

// A sequence, whose tiles follow each other on the line from split `first_split` on.
struct ScheduledSequence {
    int32_t batch;
    int64_t first_split;
    CachedSequence tokens;
    TileSplits splits;
};

// Where the sequences of each lane lie on the line. It is in shared memory: in registers, the loop of steps would lack
// them.
struct SplitLine {
    int64_t first_split[kWarpSize], end_split[kWarpSize];
    int64_t splits_per_cta, num_splits;
};

// Finds the splits of a CTA. Each lane counts the splits of adjacent sequences.
template <int kBlockN>
class SplitScheduler {
  public:
    // Called by all threads of the CTA; returns when the line is known.
    FASTATTN_DEVICE SplitScheduler(const DecodeParams& params, SplitLine& shared, int lane)
        : params_(params), shared_(shared), lane_(lane) {
        if (threadIdx.x < kWarpSize) {
            const int32_t end_batch = min(first_batch() + per_lane(), params.query.batch);
            int64_t own = 0;
            for (int32_t batch = first_batch(); batch < end_batch; ++batch) own += sequence(batch).splits.num_splits;
            own *= params.schedule.tiles_per_sequence;
            const int64_t upto = warp_inclusive_sum(own, lane);
            shared.first_split[lane] = upto - own;
            shared.end_split[lane] = upto;
            if (lane == kWarpSize - 1) {
                shared.num_splits = upto;
                shared.splits_per_cta = fastattn::splits_per_cta(params.schedule, upto);
            }
        }
        __syncthreads();  // waits until the line is in shared memory
    }

    FASTATTN_DEVICE int64_t splits_per_cta() const { return shared_.splits_per_cta; }

    // The first split of this CTA, and the end of its splits.
    FASTATTN_DEVICE int64_t begin_split() const { return blockIdx.x * shared_.splits_per_cta; }

    FASTATTN_DEVICE int64_t end_split() const {
        return min(begin_split() + shared_.splits_per_cta, shared_.num_splits);
    }

    // The sequence that has this split of the line. All lanes of a warp call it, and get the same.
    FASTATTN_DEVICE ScheduledSequence sequence_with(int64_t split) const {
        int32_t batch = first_batch();
        int64_t first_split = shared_.first_split[lane_];
        const bool is_owner = first_split <= split && split < shared_.end_split[lane_];
        if (is_owner) {
            for (;; ++batch) {
                const int64_t splits = int64_t{params_.schedule.tiles_per_sequence} * sequence(batch).splits.num_splits;
                if (split < first_split + splits) break;
                first_split += splits;
            }
        }
        const int owner = __ffs(__ballot_sync(0xffffffff, is_owner)) - 1;
        ScheduledSequence found = sequence(__shfl_sync(0xffffffff, batch, owner));
        found.first_split = __shfl_sync(0xffffffff, first_split, owner);
        return found;
    }

  private:
    FASTATTN_DEVICE int32_t per_lane() const { return ceil_div(params_.query.batch, kWarpSize); }

    FASTATTN_DEVICE int32_t first_batch() const { return min(lane_ * per_lane(), params_.query.batch); }

    FASTATTN_DEVICE ScheduledSequence sequence(int32_t batch) const {
        ScheduledSequence found{batch, 0, cached_sequence(params_.sequence, params_.cache_seqlens[batch]), {}};
        found.splits = tile_splits(params_.schedule, found.tokens, kBlockN);
        return found;
    }

    const DecodeParams& params_;
    const SplitLine& shared_;
    int lane_;
};

}  // namespace fastattn
