// The device's side of split_plan.h: a warp finds a sequence's place on the line of units.
#pragma once

#include <cstdint>

#include "decode/split_plan.h"
#include "device/fragment.cuh"

namespace fastattn {

// The tiles of a sequence stand side by side on the line, from unit `first_unit` on.
struct PlannedSequence {
    int32_t batch;
    int64_t first_unit;
    CachedSequence tokens;
    TileUnits units;
};

// Each lane counts the units of neighbouring sequences; all lanes of a warp hold the same otherwise.
template <int kBlockN>
class PlannedWork {
  public:
    __device__ __forceinline__ PlannedWork(const DecodeParams& params, int lane) : params_(params), lane_(lane) {
        per_lane_ = ceil_div(params.query.batch, kWarpSize);
        first_batch_ = min(lane * per_lane_, params.query.batch);
        end_batch_ = min(first_batch_ + per_lane_, params.query.batch);
        int64_t own = 0;
        for (int32_t batch = first_batch_; batch < end_batch_; ++batch) own += sequence(batch).units.num_units;
        own *= params.plan.tiles_per_sequence;
        int64_t upto = own;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            const int64_t before = __shfl_up_sync(0xffffffff, upto, distance);
            if (lane >= distance) upto += before;
        }
        first_unit_ = upto - own;
        end_unit_ = upto;
        share_ = units_per_cta(params.plan, __shfl_sync(0xffffffff, upto, kWarpSize - 1));
    }

    __device__ __forceinline__ int64_t share() const { return share_; }

    __device__ __forceinline__ int64_t num_units() const { return __shfl_sync(0xffffffff, end_unit_, kWarpSize - 1); }

    // The sequence that has this unit, which is one of the line's.
    __device__ __forceinline__ PlannedSequence sequence_with(int64_t unit) const {
        int32_t batch = first_batch_;
        int64_t first_unit = first_unit_;
        const bool is_owner = first_unit_ <= unit && unit < end_unit_;
        if (is_owner) {
            for (;; ++batch) {
                const int64_t units = units_of(batch);
                if (unit < first_unit + units) break;
                first_unit += units;
            }
        }
        return from_lane(__ffs(__ballot_sync(0xffffffff, is_owner)) - 1, batch, first_unit);
    }

  private:
    __device__ __forceinline__ PlannedSequence sequence(int32_t batch) const {
        PlannedSequence found{batch, 0, cached_sequence(params_.sequence, params_.cache_seqlens[batch]), {}};
        found.units = tile_units(params_.plan, found.tokens, kBlockN);
        return found;
    }

    __device__ __forceinline__ int64_t units_of(int32_t batch) const {
        return int64_t{params_.plan.tiles_per_sequence} * sequence(batch).units.num_units;
    }

    __device__ __forceinline__ PlannedSequence from_lane(int owner, int32_t batch, int64_t first_unit) const {
        PlannedSequence found = sequence(__shfl_sync(0xffffffff, batch, owner));
        found.first_unit = __shfl_sync(0xffffffff, first_unit, owner);
        return found;
    }

    const DecodeParams& params_;
    int lane_;
    int32_t per_lane_, first_batch_, end_batch_;
    int64_t first_unit_, end_unit_;  // of this lane's sequences
    int64_t share_;
};

}  // namespace fastattn
