// Computes Pᵀ from Sᵀ = K·Qᵀ, and dSᵀ from Pᵀ and dPᵀ = V·dOᵀ, on the accumulators of a warp whose rows are keys. Pᵀ
// can stay in registers as the operand A of dV = Pᵀ·dO. Scores are only scaled, and masked by a window.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// The terms of kRows query rows of one head, in shared memory, in the order in which accumulators need them. Query rows
// are the accumulators' columns, so a lane has two neighbouring query rows, the same two in its upper and lower half.
template <int kRows>
struct alignas(16) ColumnTerms {
    float4 minus_delta[kRows / 2];  // of two rows, and of the same two again: initial values of dPᵀ
    float minus_shift_log2[kRows];
};

// Loads the terms of one tile of query rows after the other. Each thread loads one number, into a register while the
// previous tile is in use, and stores it later. A row that does not exist has 0 in all terms, in Q and in dO. So its P
// is 1, its dS is 1 · (0 - 0), and it adds 0 to dK and dV.
template <int kRows>
struct ColumnTermsLoader {
    static constexpr int kThreads = 2 * kRows;

    const float* gNext;
    float number;

    // The first row to load is row first_row of `head`.
    FASTATTN_DEVICE ColumnTermsLoader(const AttentionBackwardParams& params, int32_t batch, int32_t head,
                                      int32_t first_row)
        : gNext(row_pointer(is_shift() ? params.shift : params.delta, batch, head) + first_row + own_row()) {}

    // Moves the tile to load next by `numbers` numbers.
    FASTATTN_DEVICE void skip(int64_t numbers) { gNext += numbers; }

    FASTATTN_DEVICE void load(int32_t num_rows) {
        number = own_row() < num_rows ? *gNext : 0.0f;
        gNext += kRows;
    }

    FASTATTN_DEVICE void store(ColumnTerms<kRows>& terms) const {
        const int row = own_row();
        if (is_shift()) {
            terms.minus_shift_log2[row] = -kLog2E * number;
        } else {
            // Half of the warp writes the first copy first, the other half the second copy, to avoid bank conflicts.
            const int first = row % kWarpSize < kWarpSize / 2 ? 0 : 2;
            float* two_rows = reinterpret_cast<float*>(&terms.minus_delta[row / 2]) + row % 2;
            two_rows[first] = -number;
            two_rows[2 - first] = -number;
        }
    }

  private:
    FASTATTN_DEVICE static bool is_shift() { return threadIdx.x < kRows; }
    FASTATTN_DEVICE static int own_row() { return threadIdx.x % kRows; }
};

// The keys that the rows of a tile see: row r < num_rows sees key k < num_keys if first <= k - r <= last. r and k are
// counted from the tile's first row and key.
struct KeyBand {
    static constexpr int32_t kNone = -(1 << 20);  // less than any distance in a tile

    int32_t first, last, num_keys, num_rows;

    FASTATTN_DEVICE KeyBand(const Window& window, int32_t all_rows, int32_t first_row, int32_t first_key)
        : num_keys(window.num_keys - first_key), num_rows(all_rows - first_row) {
        const int64_t position = int64_t{first_row} + window.offset - first_key;
        first = window.left == ScoreParams::kUnbounded ? kNone : in_range(position - window.left);
        last = window.right == ScoreParams::kUnbounded ? -kNone : in_range(position + window.right);
    }

  private:
    FASTATTN_DEVICE static int32_t in_range(int64_t distance) {
        return static_cast<int32_t>(min(max(distance, int64_t{kNone}), int64_t{-kNone}));
    }
};

// Functions on the scores of a warp's tile, [kTilesM * 16 keys, kTilesN * 8 rows]. Pointers to row terms point to the
// terms of the warp's first row.
template <int kTilesM, int kTilesN>
struct TransposedScores {
    using Accumulators = float[kTilesM][kTilesN][4];

    // Initialises rdP with -delta, so that adding V·dOᵀ to it gives dPᵀ - delta.
    FASTATTN_DEVICE static void init_dp(Accumulators& rdP, const float4* minus_delta, int lane) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            const float4 start = minus_delta[(n * kMmaN + accumulator_column(lane)) / 2];
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
                rdP[m][n][0] = start.x;
                rdP[m][n][1] = start.y;
                rdP[m][n][2] = start.z;
                rdP[m][n][3] = start.w;
            }
        }
    }

    // Turns rS = K·Qᵀ into Pᵀ.
    FASTATTN_DEVICE static void to_probabilities(Accumulators& rS, const float* minus_shift_log2, float scale_log2,
                                                 int lane) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            const float2 shift =
                *reinterpret_cast<const float2*>(minus_shift_log2 + n * kMmaN + accumulator_column(lane));
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    rS[m][n][e] =
                        ptx::ex2_approx_ftz_f32(fmaf(rS[m][n][e], scale_log2, e % 2 == 0 ? shift.x : shift.y));
                }
            }
        }
    }

    // Sets rP and rdP to 0 where a row does not see a key, even if they are NaN there.
    FASTATTN_DEVICE static void mask(Accumulators& rP, Accumulators& rdP, const KeyBand& seen, int lane) {
        const int32_t ahead = accumulator_row(lane) - accumulator_column(lane);
        const int32_t first = seen.first - ahead, keys_from_here = seen.num_keys - accumulator_row(lane);
        const int32_t rows_from_here = seen.num_rows - accumulator_column(lane);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = m * kMmaM + 8 * (e / 2);
                const int32_t last = key < keys_from_here ? seen.last - ahead : KeyBand::kNone;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    const int row = n * kMmaN + e % 2, distance = key - row;
                    if (row < rows_from_here && distance >= first && distance <= last) continue;
                    rP[m][n][e] = 0.0f;
                    rdP[m][n][e] = 0.0f;
                }
            }
        }
    }

    // Turns rdP = dPᵀ - delta into dSᵀ, with rP = Pᵀ.
    FASTATTN_DEVICE static void to_score_gradients(Accumulators& rdP, const Accumulators& rP) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) rdP[m][n][e] *= rP[m][n][e];
            }
        }
    }
};

}  // namespace fastattn
