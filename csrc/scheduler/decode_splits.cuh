// The device's side of decode_splits.h: finds the splits that a CTA takes, and the sequence of each.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/reduce.cuh"
#include "scheduler/decode_splits.h"

namespace fastattn {

// A sequence and its splits. On the line of all splits, its tiles begin with split first_split.
struct ScheduledSequence {
    int32_t batch;
    int64_t first_split;
    CachedSequence tokens;
    TileSplits splits;
};

// Where each lane's sequences are on the line. In shared memory, because the main loop has no registers left for it.
struct SplitLine {
    int64_t first_split[kWarpSize], end_split[kWarpSize];
    int64_t splits_per_cta, num_splits;
    int64_t next_split;  // the first split that the CTA has not yet taken
};

// Finds the splits of a CTA. Each lane counts the splits of adjacent sequences.
template <int kBlockN>
class SplitScheduler {
  public:
    // Called by all threads of the CTA. Returns when the line is in shared memory.
    FASTATTN_DEVICE SplitScheduler(const DecodeParams& params, SplitLine& shared, int lane)
        : params_(params), shared_(shared), lane_(lane) {
        if (threadIdx.x < kWarpSize) {
            const int32_t end_batch = min(first_batch() + per_lane(), params.query.batch);
            int64_t own = 0;
            ScheduledSequence sequence{};
#pragma unroll 1
            for (sequence.batch = first_batch(); sequence.batch < end_batch; ++sequence.batch) {
                find_splits(sequence);
                own += sequence.splits.num_splits;
            }
            own *= params.schedule.tiles_per_sequence;
            const int64_t upto = warp_inclusive_sum(own, lane);
            shared.first_split[lane] = upto - own;
            shared.end_split[lane] = upto;
            if (lane == kWarpSize - 1) {
                shared.num_splits = upto;
                shared.splits_per_cta = choose_splits_per_cta(params.schedule, upto);
                shared.next_split = begin_split();
            }
        }
        __syncthreads();  // waits until the line is in shared memory
    }

    FASTATTN_DEVICE int64_t splits_per_cta() const { return shared_.splits_per_cta; }

    FASTATTN_DEVICE int64_t next_split() const { return shared_.next_split; }

    FASTATTN_DEVICE int64_t end_split() const {
        return min(begin_split() + shared_.splits_per_cta, shared_.num_splits);
    }

    // Marks splits as taken. Called by one thread, between two barriers.
    FASTATTN_DEVICE void advance(int32_t num_splits) { shared_.next_split += num_splits; }

    // Returns the sequence that has this split of the line, to all lanes alike. Called by all lanes of a warp.
    FASTATTN_DEVICE ScheduledSequence sequence_with(int64_t split) const {
        ScheduledSequence found{first_batch(), shared_.first_split[lane_], {}, {}};
        const bool is_owner = found.first_split <= split && split < shared_.end_split[lane_];
        if (is_owner) {
#pragma unroll 1
            for (;; ++found.batch) {
                find_splits(found);
                const int64_t splits = int64_t{params_.schedule.tiles_per_sequence} * found.splits.num_splits;
                if (split < found.first_split + splits) break;
                found.first_split += splits;
            }
        }
        const int owner = __ffs(__ballot_sync(0xffffffff, is_owner)) - 1;
        return {from_lane(found.batch, owner), from_lane(found.first_split, owner), from_lane(found.tokens, owner),
                from_lane(found.splits, owner)};
    }

  private:
    FASTATTN_DEVICE int64_t begin_split() const { return blockIdx.x * shared_.splits_per_cta; }

    FASTATTN_DEVICE int32_t per_lane() const { return ceil_div(params_.query.batch, kWarpSize); }

    FASTATTN_DEVICE int32_t first_batch() const { return min(lane_ * per_lane(), params_.query.batch); }

    FASTATTN_DEVICE void find_splits(ScheduledSequence& sequence) const {
        sequence.tokens = cached_sequence(params_.sequence, params_.cache_seqlens[sequence.batch]);
        sequence.splits = tile_splits(params_.schedule, sequence.tokens, kBlockN);
    }

    const DecodeParams& params_;
    SplitLine& shared_;
    int lane_;
};

}  // namespace fastattn
