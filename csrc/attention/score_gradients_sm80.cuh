// Computes dS of one tile in a warp's registers, element by element. The gradients of a bias and of ALiBi slopes are
// sums of dS.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// shift, log2_sum and delta (AttentionBackwardParams) of a lane's rows. first_row: the warp's first row in the
// sequence.
template <int kTilesM>
struct RowTermsOfLane {
    float shift[kTilesM][2], log2_sum[kTilesM][2], delta[kTilesM][2];

    FASTATTN_DEVICE RowTermsOfLane(const AttentionBackwardParams& params, int32_t batch, int32_t head,
                                   const Sequence& rows, int32_t first_row, int lane) {
        const float* gShift = row_pointer(params.shift, batch, head) + rows.begin;
        const float* gLog2Sum = row_pointer(params.log2_sum, batch, head) + rows.begin;
        const float* gDelta = row_pointer(params.delta, batch, head) + rows.begin;
        const bool has_log2_sum = params.log2_sum.data != nullptr;
        for_own_rows<kTilesM>(lane, [&](int m, int half, int row_in_tile) {
            const int32_t row = first_row + row_in_tile;
            const bool exists = row < rows.length;
            shift[m][half] = exists ? gShift[row] : 0.0f;
            log2_sum[m][half] = exists && has_log2_sum ? gLog2Sum[row] : 0.0f;
            delta[m][half] = exists ? gDelta[row] : 0.0f;
        });
    }
};

// Calls function(m, n, e, dS) for each element. rS: scores. rDP: dropout(dO·Vᵀ), not yet multiplied by dropout_factor.
// num_rows: how many of the warp's rows exist. dS is exactly 0, even if an input is NaN, in rows that do not exist, and
// for keys that a row does not see (their scores are -inf).
template <int kTilesM, int kTilesN, typename Function>
FASTATTN_DEVICE void for_score_gradients(const float (&rS)[kTilesM][kTilesN][4],
                                         const float (&rDP)[kTilesM][kTilesN][4], const RowTermsOfLane<kTilesM>& rows,
                                         float dropout_factor, int32_t num_rows, int lane, Function&& function) {
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                const float probability = probability_of(rS[m][n][e], rows.shift[m][half], rows.log2_sum[m][half]);
                const float gradient = probability * fmaf(rDP[m][n][e], dropout_factor, -rows.delta[m][half]);
                function(m, n, e, rS[m][n][e] != -kInfinity && row < num_rows ? gradient : 0.0f);
            }
        }
    });
}

}  // namespace fastattn
