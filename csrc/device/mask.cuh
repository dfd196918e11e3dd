// Masks on the accumulators of S = Q·Kᵀ.
#pragma once

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
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

// The same for a warpgroup's rows: seen_by[half] are the keys that this lane's upper and lower row see. The columns of a lane
// are bits of a mask, which cost fewer instructions than comparisons; `present` has those that anybody may see.
template <int kTilesN>
__device__ __forceinline__ void mask_own_columns(float (&rS)[1][kTilesN][4], const KeyRange (&seen_by)[2],
                                                 uint32_t present, int32_t first_key, int lane) {
    static_assert(2 * kTilesN <= 32, "one register holds the bits of a row");
    // How many of the lane's columns lie before a key.
    const auto columns_before = [&](int32_t key) {
        const int32_t from_own = key - first_key - accumulator_column(lane);
        const int32_t columns = from_own / kMmaN * 2 + min(from_own % kMmaN, 2);
        return from_own <= 0 ? 0 : min(columns, 32);
    };
    for (int half = 0; half < 2; ++half) {
        const uint64_t before_end = (uint64_t{1} << columns_before(seen_by[half].end)) - 1;
        const uint64_t before_begin = (uint64_t{1} << columns_before(seen_by[half].begin)) - 1;
        // Opaque, so that the compiler has all bits in one register, from which it sets seven predicates at a time.
        const uint32_t bits = ptx::opaque(static_cast<int32_t>(before_end & ~before_begin & present));
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = rS[0][n][2 * half + e];
                score = (bits & 1u << (2 * n + e)) != 0 ? score : -kInfinity;
            }
        }
    }
}

}  // namespace fastattn
