// Computes Pᵀ from Sᵀ = K·Qᵀ, and dSᵀ from Pᵀ and dPᵀ = V·dOᵀ, on the accumulators of a warp whose rows are keys. Pᵀ in
// registers is then the operand A of dV = Pᵀ·dO. Scores are only scaled, and masked by a window.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// The terms of kRows query rows of one head, in shared memory, as accumulators need them: the columns of a lane are
// neighbouring rows, the same two in both halves.
template <int kRows>
struct alignas(16) ColumnTerms {
    float4 minus_delta[kRows / 2];  // of two rows, then of the same two again: the products start from it
    float minus_shift_log2[kRows];
};

// Loads a thread's one number of these terms for each tile, into a register while the tile before is in use. A row that
// does not exist has 0 throughout, as in Q and dO: its P is 1, its dS is 1 · (0 - 0), and it adds 0.
template <int kRows>
struct ColumnTermsLoader {
    static constexpr int kThreads = 2 * kRows;

    const float* gNext;
    float number;

    // The first row to load is row first_row of `head`.
    FASTATTN_DEVICE ColumnTermsLoader(const AttentionBackwardParams& params, int32_t batch, int32_t head,
                                      int32_t first_row)
        : gNext(row_pointer(is_shift() ? params.shift : params.delta, batch, head) + first_row + own_row()) {}

    // Moves the tile to load next so many numbers further on.
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
            // Half of a warp writes the first copy first, so that the warp meets no bank conflict.
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

// The keys that the rows of a tile see: row r sees key k < num_keys if first <= k - r <= last. Rows that do not exist
// may see any: they add 0.
struct KeyBand {
    static constexpr int32_t kNone = -(1 << 20);  // less than any distance in a tile

    int32_t first, last, num_keys;

    FASTATTN_DEVICE KeyBand(const Window& window, int32_t first_row, int32_t first_key)
        : num_keys(window.num_keys - first_key) {
        const int64_t position = int64_t{first_row} + window.offset - first_key;
        first = window.left == ScoreParams::kUnbounded ? kNone : in_range(position - window.left);
        last = window.right == ScoreParams::kUnbounded ? -kNone : in_range(position + window.right);
    }

  private:
    FASTATTN_DEVICE static int32_t in_range(int64_t distance) {
        return static_cast<int32_t>(min(max(distance, int64_t{kNone}), int64_t{-kNone}));
    }
};

// The scores of a warp's tile, [kTilesM * 16 keys, kTilesN * 8 rows]. Row terms begin with the warp's first row.
template <int kTilesM, int kTilesN>
struct TransposedScores {
    using Accumulators = float[kTilesM][kTilesN][4];

    // Starts rdPᵀ at -delta, so that adding V·dOᵀ to it gives dPᵀ - delta.
    FASTATTN_DEVICE static void init_gradients(Accumulators& rdP, const float4* minus_delta, int lane) {
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

    // rSᵀ = K·Qᵀ -> Pᵀ.
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

    // Sets both to 0 where a row does not see a key: there, either may be anything.
    FASTATTN_DEVICE static void mask(Accumulators& rP, Accumulators& rdP, const KeyBand& seen, int lane) {
        const int32_t ahead = accumulator_row(lane) - accumulator_column(lane);
        const int32_t first = seen.first - ahead, keys_from_here = seen.num_keys - accumulator_row(lane);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = m * kMmaM + 8 * (e / 2);
                const int32_t last = key < keys_from_here ? seen.last - ahead : KeyBand::kNone;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    const int distance = key - n * kMmaN - e % 2;
                    if (distance >= first && distance <= last) continue;
                    rP[m][n][e] = 0.0f;
                    rdP[m][n][e] = 0.0f;
                }
            }
        }
    }

    // rdPᵀ = dPᵀ - delta -> dSᵀ.
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
