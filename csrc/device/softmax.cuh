// The online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1) on a warp's accumulators.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"

namespace fastattn {

inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kInfinity = __builtin_huge_valf();

// Maximum and sum over the lanes that share an accumulator row.
__device__ __forceinline__ float row_reduce_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

__device__ __forceinline__ float row_reduce_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}

// P as the backward pass finds it again: exp(score - shift) / 2^log2_sum.
__device__ __forceinline__ float probability_of(float score, float shift, float log2_sum) {
    return ptx::ex2_approx_ftz_f32(fmaf(score - shift, kLog2E, -log2_sum));
}

// Indices [m][half]: a lane has an upper and a lower row in each m16 tile. Scores are S = Q·Kᵀ; probabilities are
// relative to the running maximum, P = 2^(scale_log2 * (S - max)), with scale_log2 > 0. kInNats: S is final, scale_log2
// is log2(e), and S may be as large as a float can be (a bias of finfo.min): the maximum is subtracted before it is
// scaled. Else both are one FMA. kFewKeys: a tile of keys seldom has a new maximum of any row, and rO is then left alone.
// kSumsInTime: where rO and rS take most registers, P is added up early enough to make room.
template <int kTilesM, bool kInNats = false, bool kFewKeys = false, bool kSumsInTime = false>
struct OnlineSoftmax {
    float scale_log2;
    float row_max[kTilesM][2];  // of S, unscaled, over the keys so far
    float row_sum[kTilesM][2];  // of P, over this lane's columns only
    float row_lse[kTilesM][2];  // of scale * S, natural logarithm; from finish() on

    __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            row_max[m][0] = row_max[m][1] = -kInfinity;
            row_sum[m][0] = row_sum[m][1] = 0.0f;
        }
    }

    // A key that this row has seen already, and that has no value. For one of the lanes that share the row.
    __device__ __forceinline__ void set_sink(float sink, bool one_of_four) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            row_max[m][0] = row_max[m][1] = sink;
            row_sum[m][0] = row_sum[m][1] = one_of_four && sink != -kInfinity ? 1.0f : 0.0f;
        }
    }

    // Turns rS into P in place, and rescales what rO has gathered relative to the maximum before. kMasked: S may be
    // -inf, also in a whole row. P keeps S's NaN; the maximum ignores it.
    template <bool kMasked, int kTilesN, int kTilesD>
    __device__ __forceinline__ void update(float (&rS)[kTilesM][kTilesN][4], float (&rO)[kTilesM][kTilesD][4]) {
        // With many rows, the sums so far need not be at hand while those of this tile are taken.
        constexpr bool kSumsApart = kTilesM > 1;
        float reference[kTilesM][2], correction[kTilesM][2], tile_sum[kTilesM][2];
        bool corrects = false;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float new_max = row_max[m][half];
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    new_max = fmaxf(new_max, fmaxf(rS[m][n][2 * half], rS[m][n][2 * half + 1]));
                }
                new_max = row_reduce_max(new_max);
                // Without a key so far, any finite reference gives P = 0.
                reference[m][half] = kMasked && new_max == -kInfinity ? 0.0f : in_unit(new_max);
                correction[m][half] = probability(row_max[m][half], reference[m][half]);
                corrects |= correction[m][half] != 1.0f;
                row_max[m][half] = new_max;
                if constexpr (!kSumsApart) tile_sum[m][half] = row_sum[m][half] * correction[m][half];
                if constexpr (!kFewKeys) scale_row(rO[m], half, correction[m][half]);
            }
        }
        if (kFewKeys && __any_sync(0xffffffff, corrects)) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) scale_row(rO[m], half, correction[m][half]);
            }
        }
        // In the order in which P·V takes columns.
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            // The second half of the exponentials waits for the sums of the first, which change nothing in it (if they
            // are NaN, so is the row): ptxas for sm_90 takes them at the end otherwise, keeps all of P until then, and
            // spills.
            if (kSumsInTime && n == kTilesN / 2) {
#pragma unroll
                for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        reference[m][half] = fmaf(tile_sum[m][half], 0.0f, reference[m][half]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    rS[m][n][e] = kInNats
                                      ? probability(rS[m][n][e], reference[m][e / 2])
                                      : ptx::ex2_approx_ftz_f32(fmaf(rS[m][n][e], scale_log2, -reference[m][e / 2]));
                    const bool is_first = kSumsApart && n == 0 && e % 2 == 0;
                    tile_sum[m][e / 2] = is_first ? rS[m][n][e] : tile_sum[m][e / 2] + rS[m][n][e];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_sum[m][half] =
                    kSumsApart ? fmaf(row_sum[m][half], correction[m][half], tile_sum[m][half]) : tile_sum[m][half];
            }
        }
    }

    // Divides rO by the sums, times `factor`, and takes their logarithms. A row without a key gets 0 and -inf.
    template <int kTilesD>
    __device__ __forceinline__ void finish(float (&rO)[kTilesM][kTilesD][4], float factor = 1.0f) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = row_reduce_sum(row_sum[m][half]);
                const bool empty = sum == 0.0f;
                const float inverse = empty ? 0.0f : ptx::rcp_approx_ftz_f32(sum);
                const float max = kInNats ? row_max[m][half] : scaled(row_max[m][half]) * kLn2;
                row_lse[m][half] = empty ? -kInfinity : max + logf(sum);
                scale_row(rO[m], half, inverse * factor);
            }
        }
    }

  private:
    template <int kTilesD>
    __device__ __forceinline__ static void scale_row(float (&rO)[kTilesD][4], int half, float factor) {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
            rO[d][2 * half] *= factor;
            rO[d][2 * half + 1] *= factor;
        }
    }

    // A score's unit in the exponent: what probability() takes as the reference.
    __device__ __forceinline__ float in_unit(float score) const { return kInNats ? score : scaled(score); }

    __device__ __forceinline__ float probability(float score, float reference) const {
        return ptx::ex2_approx_ftz_f32(kInNats ? scaled(score - reference) : scaled(score) - reference);
    }

    // Rounded by itself, never fused into what follows: P, the correction and the logarithm then refer to the same
    // number, and its rounding cancels. The largest P is 1 but for that rounding, which stays within a factor of 2^4
    // for scores below 2^27 (binary logarithms); fp32 scores above have an error of the same size in themselves.
    __device__ __forceinline__ float scaled(float max) const { return __fmul_rn(max, scale_log2); }
};

}  // namespace fastattn
