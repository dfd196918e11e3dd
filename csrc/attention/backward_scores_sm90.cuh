// Turns Sᵀ into Pᵀ and dPᵀ into dSᵀ, for one block of 64 keys and one row tile. Consumers of the backward kernels for
// Hopper call it between their products. One version only scales scores and masks them by a window. The other version
// has every option, and spills a few registers in the loop.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/backward_config_sm90.cuh"
#include "attention/backward_work_sm90.cuh"
#include "device/dropout.cuh"
#include "device/key_ranges.cuh"
#include "device/scores.cuh"
#include "device/softmax.cuh"
#include "device/transposed_options.cuh"
#include "device/transposed_scores.cuh"

namespace fastattn {

template <typename Config, DataType kDataType>
struct BackwardScoresTypes {
    using Scores = float[1][Config::kTilesM][4];     // [64 keys, kBlockM rows]
    using ScoresAsA = uint32_t[Config::kTilesK][4];  // P or dS in 16 bits

    FASTATTN_DEVICE static void to_operand(ScoresAsA& rA, const Scores& rC) {
        tiles_to_operand<Config::kTilesM>(rA, rC[0]);
    }

    // Packs kTiles accumulator tiles in 16 bits.
    template <int kTiles>
    FASTATTN_DEVICE static void tiles_to_operand(uint32_t (*rA)[4], const float (*tiles)[4]) {
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k) accumulators_to_a<kDataType>(rA[k], tiles[2 * k], tiles[2 * k + 1]);
    }
};

// The position of a warp's scores. first_key: the warp's first key in the sequence. is_full: every row sees every key.
// dropout_seed: set only with options.
template <typename Config>
struct ScoresPosition {
    const AttentionBackwardParams& params;
    const KeyWorkTile<Config>& keys;
    int32_t first_key;
    std::conditional_t<Config::kOptions, const RowStep&, RowStep> step;  // with options, a reference to shared memory
    bool is_full;
    int lane;
    int64_t dropout_seed;

    // Finds which rows see this lane's keys. Computes the rows of each key again for every masked tile, because keeping
    // them would take registers.
    FASTATTN_DEVICE SeenRows seen_rows() const { return keys.seen_rows(first_key, step.row_tile, lane); }
};

// Initialises rdP with -delta, so that adding V·dOᵀ gives dP - delta. With dropout, initialises rdP with 0, because the
// dropout factor multiplies V·dOᵀ but not delta.
template <bool kOptions, int kTilesM>
FASTATTN_DEVICE void start_dp(float (&rdP)[1][kTilesM][4], const float* minus_delta, const ScoreParams& params,
                              int lane) {
    if (kOptions && params.dropout_seed != nullptr) {
        set_zero(rdP);
    } else {
        start_with_delta(rdP, minus_delta, lane);
    }
}

// The version without options. For each block, a consumer calls prepare(), waits for S, calls probabilities() and
// init_dp(), waits for dP, and calls to_ds().
template <typename Config, DataType kDataType, bool kOptions>
struct BackwardScoresSm90 : BackwardScoresTypes<Config, kDataType> {
    using Types = BackwardScoresTypes<Config, kDataType>;
    using Scores = typename Types::Scores;
    using ScoresAsA = typename Types::ScoresAsA;
    using Terms = typename Config::Terms;

    struct SeenThroughRanges {};  // there are no ranges

    ScoresPosition<Config> position;
    SeenRows seen{};

    FASTATTN_DEVICE BackwardScoresSm90(const ScoresPosition<Config>& position, const SeenThroughRanges&)
        : position(position) {}

    FASTATTN_DEVICE void prepare() {}
    FASTATTN_DEVICE void go_to_next_block() { position.first_key += kWarpgroupM; }

    // Turns rS from S into P, and rounds P into rP16.
    FASTATTN_DEVICE void probabilities(ScoresAsA& rP16, Scores& rS, const Terms& terms) {
        const float scale_log2 = position.params.scores.scale * kLog2E;
        if (position.is_full) {
            to_probabilities<false>(rS, terms.shift_log2, scale_log2, seen, position.lane);
        } else {
            seen = position.seen_rows();
            to_probabilities<true>(rS, terms.shift_log2, scale_log2, seen, position.lane);
        }
        Types::to_operand(rP16, rS);
    }

    // Returns P of 16 rows in the form in which another warpgroup takes it.
    FASTATTN_DEVICE uint4 passed_probabilities(const ScoresAsA& rP16, const Scores&, int k) const {
        return {rP16[k][0], rP16[k][1], rP16[k][2], rP16[k][3]};
    }

    FASTATTN_DEVICE void init_dp(Scores& rdP, const Terms& terms) const {
        start_dp<false>(rdP, terms.minus_delta, position.params.scores, position.lane);
    }

    // Turns rdP = dP - delta into dS. (Without options, so that rdP has started at -delta.)
    FASTATTN_DEVICE void to_ds(Scores& rdP, const Scores& rP, const Terms&) const {
        if (position.is_full) {
            to_score_gradients<false>(rdP, rP, seen);
        } else {
            to_score_gradients<true>(rdP, rP, seen);
        }
    }
};

// The bits that replace P of a key that a row does not see, where one warpgroup passes P to another with options. They
// are a NaN that no conversion makes. A negative P is one that dropout drops.
inline constexpr uint32_t kHiddenProbability = 0xffff;

// The factor by which P is multiplied before it is passed on, with a softcap or dropout. The derivative of a softcap
// may make P so small that fp16 would lose digits. P is at most 1, so the product does not overflow.
template <DataType kDataType>
inline constexpr float kPassedFactor = kDataType == DataType::kFloat16 ? 16384.0f : 1.0f;

// The version with options. While S is computed, prepare() draws the dropout mask and loads the bias.
template <typename Config, DataType kDataType>
struct BackwardScoresSm90<Config, kDataType, true> : BackwardScoresTypes<Config, kDataType> {
    using Types = BackwardScoresTypes<Config, kDataType>;
    using Scores = typename Types::Scores;
    using ScoresAsA = typename Types::ScoresAsA;
    using Terms = typename Config::Terms;
    using Options = TransposedOptions<Config::kTilesM, Config::kHasRegisters>;

    // The rows that see the lane's keys through their ranges, in the form of seen_of_transposed().
    struct SeenThroughRanges {
        static_assert(Config::kBlockM == 64, "as seen_of_transposed() takes them");
        uint32_t seen = ~0u;

        // Called for a step's first block before the step has scores, when the most registers are free.
        FASTATTN_DEVICE SeenThroughRanges(const AttentionBackwardParams& params, const KeyWorkTile<Config>& keys,
                                          const RowStep& step, int32_t first_key, int lane) {
            if (const int2* ranges = step.ranges) {
                seen = seen_of_transposed(ranges, params.scores.ranges.num,
                                          keys.rows.length - step.row_tile * Config::kBlockM, first_key, lane);
            }
        }
    };

    ScoresPosition<Config> position;
    SeenThroughRanges through_ranges;
    SeenRows seen{};
    uint32_t kept = 0;  // dropout mask: see Dropout::kept_of_transposed
    typename Options::BiasPairs bias_pairs;

    FASTATTN_DEVICE BackwardScoresSm90(const ScoresPosition<Config>& position, const SeenThroughRanges& through_ranges)
        : position(position), through_ranges(through_ranges) {}

    FASTATTN_DEVICE void go_to_next_block() {
        position.first_key += kWarpgroupM;
        through_ranges =
            SeenThroughRanges(position.params, position.keys, position.step, position.first_key, position.lane);
    }

    FASTATTN_DEVICE void prepare() {
        const ScoreParams& params = position.params.scores;
        const HeadScores scores = head_scores();
        options(scores).load_bias(bias_pairs);
        if (has_dropout()) {
            const Dropout dropout(params, position.dropout_seed,
                                  position.keys.batch * position.params.query.heads + position.step.head);
            kept = dropout.kept_of_transposed(first_row(), position.first_key, position.lane);
        }
    }

    // Turns rS = S into P · d score / d (scale * S). Sets rP16 to P after dropout, without the dropout factor.
    FASTATTN_DEVICE void probabilities(ScoresAsA& rP16, Scores& rS, const Terms& terms) {
        seen = position.is_full ? SeenRows::all() : position.seen_rows();
        seen.seen[0] &= through_ranges.seen;
        seen.seen[1] &= through_ranges.seen >> 16;
        probabilities_from(rP16, rS, terms);
    }

    FASTATTN_DEVICE void init_dp(Scores& rdP, const Terms& terms) const {
        start_dp<true>(rdP, terms.minus_delta, position.params.scores, position.lane);
    }

    // Returns P of 16 rows in the form that passed_to_score_gradients() takes. rP: as probabilities() leaves rS.
    FASTATTN_DEVICE uint4 passed_probabilities(const ScoresAsA&, const Scores& rP, int k) const {
        uint32_t packed[4];
        constexpr float kFactor = kPassedFactor<kDataType>;
        if (has_dropout() || (kFactor != 1.0f && position.params.scores.softcap > 0)) {
            float rMarked[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = 2 * k + i / 4, e = i % 4;
                const bool is_dropped = has_dropout() && !is_kept(n, e);
                rMarked[i / 4][e] = rP[0][n][e] * (is_dropped ? -kFactor : kFactor);
            }
            accumulators_to_a<kDataType>(packed, rMarked[0], rMarked[1]);
        } else {
            accumulators_to_a<kDataType>(packed, rP[0][2 * k], rP[0][2 * k + 1]);
        }
        if (hides()) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int n = 2 * k + i / 2, e = 2 * (i % 2);
                if (!seen.has(n, e)) packed[i] |= kHiddenProbability;
                if (!seen.has(n, e + 1)) packed[i] |= kHiddenProbability << 16;
            }
        }
        return {packed[0], packed[1], packed[2], packed[3]};
    }

    // Turns rdP into dS. rdP: V·dOᵀ, added to what init_dp() has written. rP: as probabilities() leaves rS.
    FASTATTN_DEVICE void to_ds(Scores& rdP, const Scores& rP, const Terms& terms) const {
        if (has_dropout()) {
            const float factor = position.params.scores.dropout_factor;
#pragma unroll
            for (int n = 0; n < Config::kTilesM; ++n) {
                const float2 minus_delta = own_pair(terms.minus_delta, n);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float of_row = e % 2 == 0 ? minus_delta.x : minus_delta.y;
                    rdP[0][n][e] = is_kept(n, e) ? fmaf(rdP[0][n][e], factor, of_row) : of_row;
                }
            }
        }
        if (hides()) {
            to_score_gradients<true>(rdP, rP, seen);
        } else {
            to_score_gradients<false>(rdP, rP, seen);
        }
    }

  private:
    // Computes P of all tiles from kFirst on, kTilesAtOnce at a time.
    template <int kFirst = 0>
    FASTATTN_DEVICE void probabilities_from(ScoresAsA& rP16, Scores& rS, const Terms& terms) {
        constexpr int kEnd = kFirst + Options::kTilesAtOnce;
        const HeadScores scores = head_scores();
        typename Options::SoftcapGradients rSoftcapGradient;
        options(scores).template scale<kFirst>(rS, rSoftcapGradient);
        options(scores).template add_bias<kFirst>(rS, seen, bias_pairs);
        const auto exponentiate = [&](auto masked) {
#pragma unroll
            for (int n = kFirst; n < kEnd; ++n) {
                const float2 shift = own_pair(terms.shift, n), log2_sum = own_pair(terms.log2_sum, n);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool is_hidden = masked.value && !seen.has(n, e);
                    rS[0][n][e] = e % 2 == 0 ? probability_of(rS[0][n][e], shift.x, log2_sum.x, is_hidden)
                                             : probability_of(rS[0][n][e], shift.y, log2_sum.y, is_hidden);
                }
            }
        };
        if (hides()) {
            exponentiate(std::true_type{});
        } else {
            exponentiate(std::false_type{});
        }
        if (has_dropout()) {
            float rP[Options::kTilesAtOnce][4];
            Options::template for_each<kFirst>(
                [&](int n, int e) { rP[n - kFirst][e] = is_kept(n, e) ? rS[0][n][e] : 0.0f; });
            Types::template tiles_to_operand<Options::kTilesAtOnce>(rP16 + kFirst / 2, rP);
        } else {
            Types::template tiles_to_operand<Options::kTilesAtOnce>(rP16 + kFirst / 2, rS[0] + kFirst);
        }
        if (scores.params.softcap > 0) {
            Options::template for_each<kFirst>([&](int n, int e) { rS[0][n][e] *= rSoftcapGradient[n - kFirst][e]; });
        }
        if constexpr (kEnd < Config::kTilesM) probabilities_from<kEnd>(rP16, rS, terms);
    }

    FASTATTN_DEVICE bool has_dropout() const { return position.params.scores.dropout_seed != nullptr; }
    FASTATTN_DEVICE bool hides() const {
        return !position.is_full || position.params.scores.bias.kind != BiasView::Kind::kNone;
    }
    FASTATTN_DEVICE bool is_kept(int n, int e) const { return kept >> (16 * (e / 2) + 2 * n + e % 2) & 1; }
    FASTATTN_DEVICE int32_t first_row() const { return position.step.row_tile * Config::kBlockM; }

    FASTATTN_DEVICE HeadScores head_scores() const {
        return {position.params.scores, position.step.slope,       position.keys.batch,
                position.step.head,     position.keys.rows.length, position.keys.num_keys};
    }

    FASTATTN_DEVICE Options options(const HeadScores& scores) const {
        return {scores, first_row(), position.first_key, position.lane};
    }

    FASTATTN_DEVICE float2 own_pair(const float* numbers, int n) const {
        return reinterpret_cast<const float2*>(numbers)[n * kMmaN / 2 + position.lane % kLanesPerRow];
    }
};

// Turns rdP into dS, with options. rdP: V·dOᵀ, added to what start_dp() has written. packed(k): P of rows
// [16 * k, 16 * k + 16), as passed_probabilities() returns it.
template <DataType kDataType, int kTilesM, typename Packed>
FASTATTN_DEVICE void passed_to_score_gradients(float (&rdP)[1][kTilesM][4], const float* minus_delta,
                                               const ScoreParams& params, bool is_full, int lane, Packed&& packed) {
    constexpr float kFactor = kPassedFactor<kDataType>;
    const auto finish = [&](auto drops, auto scales, auto hides) {
#pragma unroll
        for (int k = 0; k < kTilesM / 2; ++k) {
            const uint4 four = packed(k);
            const uint32_t pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = 2 * k + i / 4, e = i % 4;
                const uint32_t bits = pairs[i / 2] >> 16 * (i % 2) & 0xffff;
                float p = unpack<kDataType>(static_cast<uint16_t>(bits)), dp = rdP[0][n][e];
                if constexpr (scales.value) p *= 1.0f / kFactor;
                if constexpr (drops.value) {
                    const float of_row = minus_delta[n * kMmaN + accumulator_column(lane) + e % 2];
                    dp = (bits & 0x8000) != 0 ? of_row : fmaf(dp, params.dropout_factor, of_row);
                    p = fabsf(p);
                }
                rdP[0][n][e] = hides.value && bits == kHiddenProbability ? 0.0f : p * dp;
            }
        }
    };
    const auto finish_tile = [&](auto hides) {
        if (params.dropout_seed != nullptr) {
            finish(std::true_type{}, std::true_type{}, hides);
        } else if (kFactor != 1.0f && params.softcap > 0) {
            finish(std::false_type{}, std::true_type{}, hides);
        } else {
            finish(std::false_type{}, std::false_type{}, hides);
        }
    };
    const bool may_hide = !is_full || params.bias.kind != BiasView::Kind::kNone;
    may_hide ? finish_tile(std::true_type{}) : finish_tile(std::false_type{});
}

}  // namespace fastattn
