// Masks on the accumulators of S = Q·Kᵀ.
#pragma once

#include "device/fragment.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Row [m][half] of this lane sees keys [0, num_seen[m][half]); the tile's columns are the keys from first_key on. What
// a row does not see becomes -inf, whatever it was.
template <int kTilesM, int kTilesN>
__device__ __forceinline__ void mask_columns(float (&rS)[kTilesM][kTilesN][4], const int32_t (&num_seen)[kTilesM][2],
                                             int32_t first_key, int lane) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int32_t limit = num_seen[m][e / 2] - first_key - accumulator_column(lane) - e % 2;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) rS[m][n][e] = n * kMmaN < limit ? rS[m][n][e] : -kInfinity;
        }
    }
}

}  // namespace fastattn
