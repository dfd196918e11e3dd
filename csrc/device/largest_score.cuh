// Finds the largest score of each head among the keys that its rows see, if the caller asks for it. QK-clip watches
// this maximum in training (Kimi K2, 2025, section 2.1).
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/ptx/red.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Holds the largest score that each warp of a CTA has seen in its rows, which belong to one head. The struct is in
// shared memory, and each call reads the thread index again, because main loops have no registers left for the score or
// the index.
template <int kNumWarps>
struct LargestScores {
    struct OfWarp {
        float score;
        int32_t num_rows;  // how many of the warp's rows exist
    } warps[kNumWarps];

    // Called by the whole warp. num_rows: how many of the warp's rows exist.
    FASTATTN_DEVICE void start(int32_t num_rows) {
        if (ptx::tid_x() % kWarpSize == 0) own_warp() = {-kInfinity, num_rows};
        __syncwarp();  // waits until every lane can read own_warp()
    }

    // Called by the whole warp with the maxima of a tile. Ignores NaN.
    template <int kTilesM>
    FASTATTN_DEVICE void update(const RowValues<kTilesM>& max_of_lane) {
        OfWarp& own = own_warp();
        const int lane = ptx::tid_x() % kWarpSize;
        float largest = -kInfinity;
        for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
            if (row < own.num_rows) largest = fmaxf(largest, max_of_lane.of[m][half]);
        });
#pragma unroll 1  // keeps the code short, because every main loop contains it and calls seldom need it
        for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, apart));
        }
        if (lane == 0) own.score = fmaxf(own.score, largest);
    }

    // Called by the whole warp. Raises the largest score in global memory to the warp's largest score times `factor`,
    // if that is larger. `factor` must not be negative.
    FASTATTN_DEVICE void reduce_into(float* gLargest, float factor) {
        if (ptx::tid_x() % kWarpSize != 0) return;
        const float score = own_warp().score;  // only this lane has written it
        if (score > -kInfinity) ptx::red_max_f32(score * factor, gLargest);
    }

  private:
    FASTATTN_DEVICE OfWarp& own_warp() { return warps[ptx::tid_x() / kWarpSize]; }
};

}  // namespace fastattn
