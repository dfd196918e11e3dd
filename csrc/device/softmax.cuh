// The online softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1) on a warp's accumulators.
#pragma once

#include <cstdint>

#include "device/exp2_on_fma.cuh"
#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"

namespace fastattn {

inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kInfinity = __builtin_huge_valf();

// Returns the maximum over the lanes that hold the same accumulator row. row_reduce_sum() returns the sum.
FASTATTN_DEVICE float row_reduce_max(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
}

FASTATTN_DEVICE float row_reduce_sum(float value) {
    value += __shfl_xor_sync(0xffffffff, value, 1);
    return value + __shfl_xor_sync(0xffffffff, value, 2);
}

// Returns P as the backward pass recomputes it: exp(score - shift) / 2^log2_sum. P of a hidden key is 0 even if another
// key makes the shift NaN.
FASTATTN_DEVICE float probability_of(float score, float shift, float log2_sum, bool is_hidden = false) {
    const float exponent = fmaf(score - shift, kLog2E, -log2_sum);
    return ptx::ex2_approx_ftz_f32(is_hidden ? -kInfinity : exponent);
}

// A value for each row that a lane has elements of. Indices [m][half]: an m16 tile has an upper and a lower row.
template <int kTilesM>
struct RowValues {
    float of[kTilesM][2];
};

template <int kTilesM, int kTilesD>
FASTATTN_DEVICE void rescale(float (&rO)[kTilesM][kTilesD][4], const RowValues<kTilesM>& factor) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rO[m][d][e] *= factor.of[m][e / 2];
        }
    }
}

// Returns the maxima of a lane's own columns, not of whole rows. A maximum is NaN only if all these columns are NaN.
template <int kTilesM, int kTilesN>
FASTATTN_DEVICE RowValues<kTilesM> maxima_of_lane(const float (&rS)[kTilesM][kTilesN][4]) {
    RowValues<kTilesM> max;
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            max.of[m][half] = fmaxf(rS[m][0][2 * half], rS[m][0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < kTilesN; ++n) {
                max.of[m][half] = fmaxf(max.of[m][half], fmaxf(rS[m][n][2 * half], rS[m][n][2 * half + 1]));
            }
        }
    }
    return max;
}

// A step is:  max = maxima_of_lane(S);  if (is_outgrown_by(max)) rescale(O, follow(max));  exponentiate(S);  O += P·V.
//
// Scores are S = Q·Kᵀ. Probabilities are relative to a reference: P = 2^(scale_log2 * S - reference), scale_log2 > 0. A
// row's reference is the running maximum that the row had at some step. The reference moves to the present running
// maximum when that is more than 8 larger (binary logarithms), so that P is at most 2^8 and O is seldom rescaled. Other
// rows have no influence on a row's reference.
//
// kInNats: S holds the final scores in nats, scale_log2 is log2(e), and |S| may be as large as a float can be (a bias
// of finfo.min). The reference is then in nats, and is subtracted before the difference is scaled. Without kInNats, one
// FMA scales and subtracts.
template <int kTilesM, bool kInNats = false>
struct OnlineSoftmax {
    static constexpr float kLargestGrowth = 8.0f;       // binary logarithm: fp16 holds P up to 2^16
    static constexpr float kLowest = -3.402823466e38f;  // finite, so that scores of -inf give P = 0

    float scale_log2;
    float reference[kTilesM][2];  // kLowest before the row has had a score
    float row_sum[kTilesM][2];    // of P, over this lane's columns only
    float row_lse[kTilesM][2];    // log(sum(exp(scale * S))), natural logarithm; set by finish()

    FASTATTN_DEVICE explicit OnlineSoftmax(float scale_log2) : scale_log2(scale_log2) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            reference[m][0] = reference[m][1] = kLowest;
            row_sum[m][0] = row_sum[m][1] = 0.0f;
        }
    }

    // Starts the rows with a sink: a score in nats that has no value. is_row_leader: true in only one of the four lanes
    // of a row, which then adds the sink to its sum.
    FASTATTN_DEVICE void set_sink(float sink, bool is_row_leader) {
        const float score = fmaxf(kInNats ? sink : sink * kLog2E, kLowest);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            reference[m][0] = reference[m][1] = score;
            row_sum[m][0] = row_sum[m][1] = is_row_leader && sink != -kInfinity ? 1.0f : 0.0f;
        }
    }

    // Starts a lane's upper and lower rows with different sinks.
    FASTATTN_DEVICE void set_sinks(float upper, float lower, bool is_row_leader) {
        static_assert(kTilesM == 1, "two rows of a lane");
        set_sink(lower, is_row_leader);
        const float reference_below = reference[0][1], sum_below = row_sum[0][1];
        set_sink(upper, is_row_leader);
        reference[0][1] = reference_below;
        row_sum[0][1] = sum_below;
    }

    // Returns whether some row of the warp needs another reference. All lanes get the same answer. Only if it is true
    // do the lanes have to combine their maxima.
    FASTATTN_DEVICE bool is_outgrown_by(const RowValues<kTilesM>& max_of_lane) const {
        bool grows = false;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                grows |= above_reference(max_of_lane.of[m][half], reference[m][half]) > kLargestGrowth;
            }
        }
        return __any_sync(0xffffffff, grows);
    }

    // Returns whether some row of the warp has had no score yet. All lanes get the same answer.
    FASTATTN_DEVICE bool lacks_references() const {
        bool lacks = false;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) lacks |= reference[m][0] == kLowest || reference[m][1] == kLowest;
        return __any_sync(0xffffffff, lacks);
    }

    // Sets the first reference of rows that have none. O is 0 in these rows, and needs no rescaling.
    FASTATTN_DEVICE void start(const RowValues<kTilesM>& max_of_lane) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float max = row_reduce_max(max_of_lane.of[m][half]);
                if (reference[m][half] != kLowest || !(above_reference(max, kLowest) > kLargestGrowth)) continue;
                reference[m][half] = in_unit(max);
                row_sum[m][half] = 0.0f;  // a sink as low as kLowest has set it to 1
            }
        }
    }

    // Moves references that are outgrown up to the rows' maxima, and rescales the sums of P. Returns the factors by
    // which O must be multiplied.
    FASTATTN_DEVICE RowValues<kTilesM> follow(const RowValues<kTilesM>& max_of_lane) {
        RowValues<kTilesM> factor;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float before = reference[m][half], max = row_reduce_max(max_of_lane.of[m][half]);
                if (above_reference(max, before) > kLargestGrowth) reference[m][half] = in_unit(max);
                factor.of[m][half] = power_of(before - reference[m][half]);
                row_sum[m][half] *= factor.of[m][half];
            }
        }
        return factor;
    }

    // Turns rS into P, and adds P to the sums. The references must have followed the maxima of rS. Where S is NaN, P is
    // NaN.
    template <int kTilesN>
    FASTATTN_DEVICE void exponentiate(float (&rS)[kTilesM][kTilesN][4]) {
        RowValues<kTilesM> tile_sum;  // separate from row_sum, which then needs no registers in the loop
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {  // in the order in which P·V takes columns
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float p = ptx::ex2_approx_ftz_f32(above_reference(rS[m][n][e], reference[m][e / 2]));
                    float& sum = tile_sum.of[m][e / 2];
                    sum = n == 0 && e % 2 == 0 ? p : sum + p;
                    rS[m][n][e] = p;
                }
            }
        }
        add(tile_sum);
    }

    // Computes P with the present references, writes it to rP, keeps rS, and returns the sums of P. P is valid only if
    // is_outgrown_by_sums() returns false for these sums. kOnFma > 0: exp2_on_fma() computes one of kOnFma
    // exponentials; 0: none.
    template <DataType kDataType, int kOnFma, int kTilesN>
    FASTATTN_DEVICE RowValues<kTilesM> exponentiate_to(uint32_t (&rP)[kTilesN / 2][4],
                                                       const float (&rS)[1][kTilesN][4]) const {
        static_assert(kTilesM == 1, "rP is the operand A of one row of tiles");
        RowValues<kTilesM> tile_sum;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto exponential = [&](int e) {
                    const float exponent = above_reference(rS[0][n][e], reference[0][half]);
                    if constexpr (kOnFma > 0) {
                        if ((4 * n + e) % kOnFma == 0) return exp2_on_fma(exponent);
                    }
                    return ptx::ex2_approx_ftz_f32(exponent);
                };
                const float left = exponential(2 * half), right = exponential(2 * half + 1);
                float& sum = tile_sum.of[0][half];
                sum = n == 0 ? left + right : sum + left + right;
                rP[n / 2][2 * (n % 2) + half] = pack<kDataType>(left, right);
            }
        }
        return tile_sum;
    }

    // Returns whether a lane's probabilities, judged by their sums, may be too large for 16 bits or for the sums. NaN
    // counts as too large. All lanes of the warp get the same answer.
    FASTATTN_DEVICE bool is_outgrown_by_sums(const RowValues<kTilesM>& tile_sum) const {
        constexpr float kLargestSum = 16384.0f;
        bool grows = false;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            grows |= !(tile_sum.of[m][0] <= kLargestSum) || !(tile_sum.of[m][1] <= kLargestSum);
        }
        return __any_sync(0xffffffff, grows);
    }

    FASTATTN_DEVICE void add(const RowValues<kTilesM>& tile_sum) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) row_sum[m][half] += tile_sum.of[m][half];
        }
    }

    FASTATTN_DEVICE float reference_in_nats(int m, int half) const {
        return kInNats ? reference[m][half] : reference[m][half] * kLn2;
    }

    // Divides rO by the sums, multiplies it by `factor`, and sets row_lse. A row that has had no score gets 0 and -inf.
    template <int kTilesD>
    FASTATTN_DEVICE void finish(float (&rO)[kTilesM][kTilesD][4], float factor = 1.0f) {
        RowValues<kTilesM> quotient;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = row_reduce_sum(row_sum[m][half]);
                const bool empty = sum == 0.0f;
                row_lse[m][half] = empty ? -kInfinity : reference_in_nats(m, half) + logf(sum);
                quotient.of[m][half] = empty ? 0.0f : ptx::rcp_approx_ftz_f32(sum) * factor;
            }
        }
        rescale(rO, quotient);
    }

  private:
    // Converts a score to the unit of references. The product is rounded on its own, never fused with a later
    // operation. P, the rescaling factors and the LSE then use the same rounded number, and the rounding error cancels.
    // This error makes P larger by a factor of at most 2^4 for scores below 2^27 (binary logarithms). Larger scores in
    // fp32 have a rounding error of the same size themselves.
    FASTATTN_DEVICE float in_unit(float score) const { return kInNats ? score : __fmul_rn(score, scale_log2); }

    // Returns the binary logarithm of P.
    FASTATTN_DEVICE float above_reference(float score, float reference) const {
        return kInNats ? (score - reference) * scale_log2 : fmaf(score, scale_log2, -reference);
    }

    // Returns two to the power of a difference of references.
    FASTATTN_DEVICE float power_of(float difference) const {
        return ptx::ex2_approx_ftz_f32(kInNats ? difference * scale_log2 : difference);
    }
};

}  // namespace fastattn
