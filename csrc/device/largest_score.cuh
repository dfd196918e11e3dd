// Finds the largest score of each head that some row sees, if it is wanted: QK-clip watches it in training (Kimi K2,
// 2025, section 2.1).
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/red.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Holds the largest score that each warp of a CTA has seen in its rows, all of one head. It is in shared memory, and a
// warp reads its thread index anew at each call, because main loops have no registers for this.
template <int kNumWarps>
struct LargestScores {
    struct OfWarp {
        float score;
        int32_t num_rows;  // how many of its rows exist
    } warps[kNumWarps];

    // Called by the whole warp. num_rows: how many of its rows exist.
    FASTATTN_DEVICE void start(int32_t num_rows) {
        if (ptx::tid_x() % kWarpSize == 0) own_warp() = {-kInfinity, num_rows};
        __syncwarp();  // waits until every lane can read it
    }

    // Called by the whole warp with the maxima of a tile; ignores NaN.
    template <int kTilesM>
    FASTATTN_DEVICE void update(const RowValues<kTilesM>& max_of_lane) {
        OfWarp& own = own_warp();
        const int lane = ptx::tid_x() % kWarpSize;
        float largest = -kInfinity;
        for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
            if (row < own.num_rows) largest = fmaxf(largest, max_of_lane.of[m][half]);
        });
#pragma unroll 1  // seldom wanted: keeps its code short in every main loop
        for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, apart));
        }
        if (lane == 0) own.score = fmaxf(own.score, largest);
    }

    // Called by the whole warp: updates the largest score in global memory with its own times `factor`, which is not
    // negative.
    FASTATTN_DEVICE void reduce_into(float* gLargest, float factor) {
        if (ptx::tid_x() % kWarpSize != 0) return;
        const float score = own_warp().score;  // only this lane has written it
        if (score > -kInfinity) ptx::red_max_f32(score * factor, gLargest);
    }

  private:
    FASTATTN_DEVICE OfWarp& own_warp() { return warps[ptx::tid_x() / kWarpSize]; }
};

}  // namespace fastattn
