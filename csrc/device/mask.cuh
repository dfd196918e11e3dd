// Masks on the accumulators of S = Q·Kᵀ.
#pragma once

#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Row r of a warp's rows sees the keys sees[r]; the tile's columns are the keys from first_key on. What a row does not see
// becomes -inf, whatever it was.
template <int kTilesM, int kTilesN>
__device__ __forceinline__ void mask_columns(float (&rS)[kTilesM][kTilesN][4], const KeyRange* sees, int32_t first_key,
                                             int lane) {
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
        const KeyRange keys = sees[row];
        const int32_t own_key = first_key + accumulator_column(lane);
        const int32_t begin = keys.begin - own_key, end = keys.end - own_key;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = rS[m][n][2 * half + e];
                score = n * kMmaN + e >= begin && n * kMmaN + e < end ? score : -kInfinity;
            }
        }
    });
}

}  // namespace fastattn
