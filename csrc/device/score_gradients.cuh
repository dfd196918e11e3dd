// Computes P from S = Q·Kᵀ, and dS from P and dP = dO·Vᵀ, on a warp's accumulators.
#pragma once

#include <cstdint>

#include "device/dropout.cuh"
#include "device/fragment.cuh"
#include "device/ptx/approx.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/opaque.cuh"
#include "device/scores.cuh"
#include "device/softmax.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

// The terms of kRows query rows of one head, in shared memory. A row that does not exist has 0 in all terms, in Q and
// in dO. So its P is exp(0) = 1, its dS is 1 · (0 - 0) = 0, and it adds 0 to dK and dV.
template <int kRows>
struct RowTerms {
    float shift[kRows], delta[kRows], log2_sum[kRows];

    // Starts to copy num_rows rows from `offset` on. Called by all threads of the CTA.
    template <int kThreads>
    FASTATTN_DEVICE void load(const AttentionBackwardParams& params, int64_t offset, int32_t num_rows) {
        static_assert(kThreads >= 2 * kRows, "a thread copies one number of shift or delta");
        const int array = threadIdx.x / kRows, row = threadIdx.x % kRows;
        const int bytes = row < num_rows ? sizeof(float) : 0;
        if (array < 2) {
            const float* global = (array == 0 ? params.shift.data : params.delta.data) + offset + row;
            ptx::cp_async_ca_4(shared_address(array == 0 ? &shift[row] : &delta[row]), global, bytes);
        }
        if (array == 0 && params.log2_sum.data != nullptr) {
            ptx::cp_async_ca_4(shared_address(&log2_sum[row]), params.log2_sum.data + offset + row, bytes);
        }
    }
};

// Computes dS from a warp's scores [kTilesM * 16, kTilesN * 8]. The upper left score belongs to query row first_row and
// key first_key, and is element [row][column] of the CTA's tile [kBlockM, kBlockN]. Without kOptions, scores are only
// scaled, and masked by a window. is_full: only a bias can hide a key of the tile; see RowTileWalk.
template <int kTilesM, int kTilesN, int kBlockM, int kBlockN, bool kOptions>
struct ScoreGradients {
    using Accumulators = float[kTilesM][kTilesN][4];

    const HeadScores& scores;
    const RowTerms<kBlockM>& terms;
    bool is_full, has_log2_sum;
    int32_t first_row, first_key;
    int row, column, lane;
    uint32_t seen[kTilesM], kept[kTilesM];  // bit 4 * n + e: element [n][e]; kept: only with kOptions

    // Called before Q·Kᵀ is computed: finding `seen` without kOptions takes registers, which the scores occupy later.
    FASTATTN_DEVICE ScoreGradients(const HeadScores& scores, const RowTerms<kBlockM>& terms, bool is_full,
                                   bool has_log2_sum, int32_t tile_row, int32_t tile_key, int row, int column, int lane)
        : scores(scores),
          terms(terms),
          is_full(is_full),
          has_log2_sum(has_log2_sum),
          first_row(tile_row + row),
          first_key(tile_key + column),
          row(row),
          column(column),
          lane(lane) {
        if (!kOptions && !is_full) find_seen();
    }

    // Turns rS = Q·Kᵀ into probabilities P. Writes P after dropout, but without the dropout factor, to sP [kBlockM,
    // kBlockN] in 16 bits. Leaves P · d score / d (scale · Q·Kᵀ) in rS, with P before dropout. sP and rS are 0 where a
    // row does not see a key. Options are applied to eight keys at a time, which takes few registers. ranges_of()
    // returns the RowRanges of the rows.
    template <DataType kDataType, typename RangesOf>
    FASTATTN_DEVICE void probabilities(uint16_t* sP, Accumulators& rS, const Dropout& dropout, RangesOf&& ranges_of) {
        float shift[kTilesM][2];
        for_own_rows<kTilesM>(lane, [&](int m, int half, int own_row) { shift[m][half] = terms.shift[row + own_row]; });
        const float scale_log2 = scores.params.scale * kLog2E;
        const auto plain = [&](int m, int n, int e) {
            return ptx::ex2_approx_ftz_f32(fmaf(rS[m][n][e], scale_log2, -kLog2E * shift[m][e / 2]));
        };
        if constexpr (kOptions) {
#pragma unroll
            for (int m = 0; m < kTilesM; ++m) seen[m] = ~0u, kept[m] = 0;
            if (!is_full) find_seen_through(ranges_of);
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                float rP[kTilesM][1][4];
                with_options(rP, rS, n, shift, dropout);
                stage_scores<kDataType, kBlockN>(sP, rP, row, column, n, lane);
            }
        } else {
            if (is_full) {
                for_each<kTilesN>([&](int m, int n, int e) { rS[m][n][e] = plain(m, n, e); });
            } else {
                for_each<kTilesN>(
                    [&](int m, int n, int e) { rS[m][n][e] = has(seen[m], n, e) ? plain(m, n, e) : 0.0f; });
            }
            stage_scores<kDataType, kBlockN>(sP, rS, row, column, 0, lane);
        }
        // Opaque, else the compiler keeps each bit that it has tested in a register of its own.
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) seen[m] = ptx::opaque(seen[m]);
#pragma unroll
        for (int m = 0; m < kTilesM && kOptions; ++m) kept[m] = ptx::opaque(kept[m]);
    }

    // Computes dS from rdP = dO·Vᵀ and from rS as probabilities() leaves it, for kTiles * 8 keys from tile kFirst on.
    // Writes dS to sdS [kBlockM, kBlockN] in 16 bits. rdP may be NaN where a row does not see a key.
    template <DataType kDataType, int kFirst, int kTiles>
    FASTATTN_DEVICE void from_scores(uint16_t* sdS, const Accumulators& rS, float (&rdP)[kTilesM][kTiles][4]) const {
        float delta[kTilesM][2];
        for_own_rows<kTilesM>(lane, [&](int m, int half, int own_row) { delta[m][half] = terms.delta[row + own_row]; });
        const bool has_dropout = kOptions && scores.params.dropout_seed != nullptr;
        const auto plain = [&](int m, int n, int e) {
            float grad = rdP[m][n][e];
            if (has_dropout) grad = has(kept[m], kFirst + n, e) ? grad * scores.params.dropout_factor : 0.0f;
            return rS[m][kFirst + n][e] * (grad - delta[m][e / 2]);
        };
        if (!kOptions && is_full) {
            for_each<kTiles>([&](int m, int n, int e) { rdP[m][n][e] = plain(m, n, e); });
        } else {
            for_each<kTiles>(
                [&](int m, int n, int e) { rdP[m][n][e] = has(seen[m], kFirst + n, e) ? plain(m, n, e) : 0.0f; });
        }
        stage_scores<kDataType, kBlockN>(sdS, rdP, row, column, kFirst, lane);
    }

  private:
    static_assert(4 * kTilesN <= 32, "a bit for each element");

    FASTATTN_DEVICE static bool has(uint32_t bits, int n, int e) { return bits >> (4 * n + e) & 1; }

    template <int kTiles, typename Function>
    FASTATTN_DEVICE static void for_each(Function&& function) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) function(m, n, e);
            }
        }
    }

    // Calls function(m, e) for this lane's elements of eight keys.
    template <typename Function>
    FASTATTN_DEVICE static void for_each_of_eight(Function&& function) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) function(m, e);
        }
    }

    // Finds the keys seen through the window. Comparing each of a lane's few columns takes fewer instructions than
    // own_columns_of().
    FASTATTN_DEVICE void find_seen() {
        for_own_rows<kTilesM>(lane, [&](int m, int half, int own_row) {
            if (half == 0) seen[m] = 0;
            const KeyRange keys = scores.window.keys_of(first_row + own_row);
            const int32_t key = first_key + accumulator_column(lane);
            const int32_t begin = keys.begin - key, end = first_row + own_row < scores.num_rows ? keys.end - key : 0;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const bool sees = n * kMmaN + e >= begin && n * kMmaN + e < end;
                    seen[m] |= (sees ? 1u : 0u) << (4 * n + 2 * half + e);
                }
            }
            if (half == 1) seen[m] = ptx::opaque(seen[m]);  // as in probabilities()
        });
    }

    // Finds the keys seen through the window and through ranges of keys.
    template <typename RangesOf>
    FASTATTN_DEVICE void find_seen_through(RangesOf&& ranges_of) {
        for_own_rows<kTilesM>(lane, [&](int m, int half, int own_row) {
            const int32_t row = first_row + own_row;
            const uint32_t columns = scores.own_columns(row, first_key, lane, ranges_of);
            const uint32_t bits = row < scores.num_rows ? spread_pairs(columns) << 2 * half : 0;
            seen[m] = half == 0 ? bits : ptx::opaque(seen[m] | bits);  // as in probabilities()
        });
    }

    // Moves bit 2 * n + e to 4 * n + e.
    FASTATTN_DEVICE static uint32_t spread_pairs(uint32_t bits) {
        bits &= 0xffff;
        bits = (bits | bits << 8) & 0x00ff00ff;
        bits = (bits | bits << 4) & 0x0f0f0f0f;
        return (bits | bits << 2) & 0x33333333;
    }

    // Does what probabilities() does for keys n * 8 … n * 8 + 7 of the tile, and returns P after dropout in rP. Updates
    // `seen` and `kept`.
    FASTATTN_DEVICE void with_options(float (&rP)[kTilesM][1][4], Accumulators& rS, int n,
                                      const float (&shift)[kTilesM][2], const Dropout& dropout) {
        float rScore[kTilesM][1][4], rSoftcapGradient[kTilesM][1][4], log2_sum[kTilesM][2];
        for_own_rows<kTilesM>(lane, [&](int m, int half, int own_row) {
            log2_sum[m][half] = has_log2_sum ? terms.log2_sum[row + own_row] : 0.0f;
        });
        const int32_t key = first_key + n * kMmaN;
        for_each_of_eight([&](int m, int e) { rScore[m][0][e] = rS[m][n][e]; });
        scores.to_scores_and_softcap_gradient(rScore, rSoftcapGradient, first_row, key, lane);
        if (!is_full) {
            for_each_of_eight(
                [&](int m, int e) { rScore[m][0][e] = has(seen[m], n, e) ? rScore[m][0][e] : -kInfinity; });
        }
        for_each_of_eight([&](int m, int e) {
            const bool is_hidden = rScore[m][0][e] == -kInfinity;
            if (is_hidden) seen[m] &= ~(1u << (4 * n + e));
            rP[m][0][e] = probability_of(rScore[m][0][e], shift[m][e / 2], log2_sum[m][e / 2], is_hidden);
            rS[m][n][e] = rP[m][0][e] * rSoftcapGradient[m][0][e];
        });
        if (scores.params.dropout_seed == nullptr) return;
        dropout.for_each_word<kTilesM, 1>(first_row, key, lane, [&](int m, int, int e, uint32_t word) {
            const bool is_kept = word >= dropout.threshold;
            kept[m] |= (is_kept ? 1u : 0u) << (4 * n + e);
            rP[m][0][e] = is_kept ? rP[m][0][e] : 0.0f;
        });
    }
};

}  // namespace fastattn
