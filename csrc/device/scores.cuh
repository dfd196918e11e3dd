// Turns Q·Kᵀ into scores, before the softmax: scale, softcap, ALiBi, bias, mask. These steps are passes over the
// accumulators, in this order. Branches at run time, which all threads of a CTA take alike, choose the options.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "device/mask.cuh"
#include "device/ptx/cvt.cuh"
#include "device/sequence.cuh"
#include "device/softcap.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Computes the scores of a head in a sequence. Parameters that all heads have in common are read from the kernel's
// parameters, so that they take no registers.
struct HeadScores {
    using BiasKind = BiasView::Kind;

    const ScoreParams& params;
    Window window;
    int32_t num_rows;
    float slope;
    const char* bias;  // the element of the first row and key

    FASTATTN_DEVICE HeadScores(const ScoreParams& params, int32_t batch, int32_t head, int32_t num_rows,
                               int32_t num_keys)
        : HeadScores(params, slope_of(params, batch, head), batch, head, num_rows, num_keys) {}

    // Takes a slope that the caller has already read.
    FASTATTN_DEVICE HeadScores(const ScoreParams& params, float slope, int32_t batch, int32_t head, int32_t num_rows,
                               int32_t num_keys)
        : params(params),
          window(window_of(params, num_rows, num_keys)),
          num_rows(num_rows),
          slope(slope),
          bias(static_cast<const char*>(params.bias.data) +
               (batch * params.bias.batch_stride + head * params.bias.head_stride) * params.bias.element_bytes()) {}

    // Returns the ALiBi slope, or 0 without ALiBi.
    FASTATTN_DEVICE static float slope_of(const ScoreParams& params, int32_t batch, int32_t head) {
        return params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[batch * params.alibi_batch_stride + head];
    }

    // Returns the bits of an element of the bias, whose type is T.
    template <typename T>
    FASTATTN_DEVICE uint32_t bias_bits(int32_t row, int32_t key) const {
        return reinterpret_cast<const T*>(bias)[row * params.bias.row_stride + key * params.bias.key_stride];
    }

    // Returns the number that these bits add to a score: -inf masks it.
    template <BiasKind kKind>
    FASTATTN_DEVICE static float bias_value(uint32_t bits) {
        if constexpr (kKind == BiasKind::kBool) return bits != 0 ? 0.0f : -kInfinity;
        if constexpr (kKind == BiasKind::kFloat16) return ptx::cvt_f32_f16(static_cast<uint16_t>(bits));
        if constexpr (kKind == BiasKind::kBFloat16) return __uint_as_float(bits << 16);
        return __uint_as_float(bits);
    }

    // Calls function(T{}, kind) if there is a bias. T: an unsigned integer of an element's size. kind: the bias's kind,
    // as a std::integral_constant.
    template <typename Function>
    FASTATTN_DEVICE void with_bias_kind(Function&& function) const {
        switch (params.bias.kind) {
            case BiasKind::kNone:
                return;
            case BiasKind::kBool:
                return function(uint8_t{}, std::integral_constant<BiasKind, BiasKind::kBool>{});
            case BiasKind::kFloat16:
                return function(uint16_t{}, std::integral_constant<BiasKind, BiasKind::kFloat16>{});
            case BiasKind::kBFloat16:
                return function(uint16_t{}, std::integral_constant<BiasKind, BiasKind::kBFloat16>{});
            case BiasKind::kFloat32:
                return function(uint32_t{}, std::integral_constant<BiasKind, BiasKind::kFloat32>{});
        }
    }

    // A bias of -inf masks even a score that is NaN.
    template <BiasKind kKind>
    FASTATTN_DEVICE static void add_bias(float& score, uint32_t bits) {
        const float added = bias_value<kKind>(bits);
        score = added == -kInfinity ? -kInfinity : score + added;
    }

    // Returns how many keys a row's own position is ahead of a key. Counts in floats, which is exact up to 2^24.
    FASTATTN_DEVICE float keys_ahead(int32_t row, int32_t key) const {
        return static_cast<float>(row + window.offset - key);
    }

    // Scales a score and adds ALiBi, for a row that is `ahead + more` keys ahead of the key.
    FASTATTN_DEVICE float scale_and_add_alibi(float score, float ahead, int more) const {
        return fmaf(score, params.outer_scale, -slope * fabsf(ahead + static_cast<float>(more)));
    }

    FASTATTN_DEVICE bool sees(int32_t row, int32_t key) const {
        const KeyRange keys = window.keys_of(row);
        if (key < keys.begin || key >= keys.end || row >= num_rows) return false;
        bool is_visible = true;
        with_bias_kind([&](auto bits, auto kind) {
            is_visible = bias_value<kind.value>(bias_bits<decltype(bits)>(row, key)) != -kInfinity;
        });
        return is_visible;
    }

    // Loads the bits of two neighbouring elements, of which the first belongs to an even key.
    template <typename T>
    FASTATTN_DEVICE static void bias_bits_of_two(uint32_t (&bits)[2], const T* two) {
        if constexpr (sizeof(T) == 4) {
            const uint2 loaded = *reinterpret_cast<const uint2*>(two);
            bits[0] = loaded.x;
            bits[1] = loaded.y;
        } else {
            using Two = std::conditional_t<sizeof(T) == 2, uint32_t, uint16_t>;
            const uint32_t loaded = *reinterpret_cast<const Two*>(two);
            bits[0] = static_cast<T>(loaded);
            bits[1] = loaded >> 8 * sizeof(T);
        }
    }

    // Loads the bias of a tile. Called as early as possible: it is needed only after Q·Kᵀ.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void load_bias(uint32_t (&rB)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                   int lane) const {
        with_bias_kind([&](auto bits, auto) {
            for_bias<decltype(bits)>(rB, first_row, first_key, lane, [](uint32_t& b, uint32_t loaded) { b = loaded; });
        });
    }

    // Turns Q·Kᵀ into scores in nats. They still need the bias, and mask() for keys that a row does not see.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void to_unbiased_scores(float (&rS)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                            int lane) const {
        if (params.softcap > 0) apply_tanh(rS);
        scale_and_add_alibi(rS, first_row, first_key, lane);
    }

    // Does what to_unbiased_scores() does, and adds the bias in rB, which load_bias() has loaded. A bias of -inf masks
    // a score.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void to_scores_with(const uint32_t (&rB)[kTilesM][kTilesN][4], float (&rS)[kTilesM][kTilesN][4],
                                        int32_t first_row, int32_t first_key, int lane) const {
        to_unbiased_scores(rS, first_row, first_key, lane);
        with_bias_kind([&](auto, auto kind) { add_bias<kind.value>(rS, rB); });
    }

    // Does the same with a bias that it loads only now, because it would not fit in registers next to Q·Kᵀ.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void to_scores(float (&rS)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                   int lane) const {
        to_unbiased_scores(rS, first_row, first_key, lane);
        load_and_add_bias(rS, first_row, first_key, lane);
    }

    // Returns a bit mask, as own_columns_of() does, of the keys that a row sees through the window and, with
    // kMayHaveRanges and if the call has ranges, also through the row's ranges of keys. ranges_of() returns the
    // RowRanges. For a row that does not exist, these are the keys of the window, or no keys if the call has ranges.
    template <bool kMayHaveRanges = true, typename RangesOf>
    FASTATTN_DEVICE uint32_t own_columns(int32_t row, int32_t first_key, int lane, RangesOf&& ranges_of) const {
        const KeyRange keys = window.keys_of(row);
        if (!kMayHaveRanges || params.ranges.data == nullptr) return own_columns_of(keys, first_key, lane);
        return ranges_of().own_columns(row, keys, first_key, lane);
    }

    // Sets the scores of keys that a row does not see to -inf.
    template <bool kMayHaveRanges = true, int kTilesM, int kTilesN, typename RangesOf>
    FASTATTN_DEVICE void mask(float (&rS)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key, int lane,
                              RangesOf&& ranges_of) const {
        mask_scores(rS, lane, [&](int, int, int row) {
            return own_columns<kMayHaveRanges>(first_row + row, first_key, lane, ranges_of);
        });
    }

    // Computes the scores for the backward pass in rS, and d score / d (scale · Q·Kᵀ) in rSoftcapGradient. Loads the
    // bias only now, because it would not fit in registers next to Q·Kᵀ. The caller must mask the keys that a row does
    // not see, and all keys of a row that does not exist. Otherwise NaN scores of such a row would make the keys'
    // gradients NaN.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void to_scores_and_softcap_gradient(float (&rS)[kTilesM][kTilesN][4],
                                                        float (&rSoftcapGradient)[kTilesM][kTilesN][4],
                                                        int32_t first_row, int32_t first_key, int lane) const {
        if (params.softcap > 0) {
            for_each(rS, [&](int m, int n, int e, float s) {
                const float t = tanh_of(s * params.scale_over_softcap);
                rSoftcapGradient[m][n][e] = 1.0f - t * t;
                return t;
            });
        } else {
            for_each(rSoftcapGradient, [](int, int, int, float) { return 1.0f; });
        }
        scale_and_add_alibi(rS, first_row, first_key, lane);
        load_and_add_bias(rS, first_row, first_key, lane);
    }

  private:
    // Calls function(element, bits of its bias) for each element of a tile.
    template <typename T, typename Element, int kTilesM, int kTilesN, typename Function>
    FASTATTN_DEVICE void for_bias(Element (&elements)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                  int lane, Function&& function) const {
        for_own_rows<kTilesM>(lane, [&](int m, int half, int row_in_tile) {
            const int32_t row = first_row + row_in_tile, key = first_key + accumulator_column(lane);
            const int64_t key_stride = params.bias.key_stride;
            const T* two = reinterpret_cast<const T*>(bias) + row * params.bias.row_stride + key * key_stride;
            const int32_t num_left = row < num_rows ? window.num_keys - key : 0;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n, two += kMmaN * key_stride) {
                uint32_t bits[2] = {0, 0};
                if (params.bias.in_pairs && num_left > n * kMmaN + 1) {
                    bias_bits_of_two(bits, two);
                } else {
                    if (num_left > n * kMmaN) bits[0] = two[0];
                    if (num_left > n * kMmaN + 1) bits[1] = two[key_stride];
                }
                function(elements[m][n][2 * half], bits[0]);
                function(elements[m][n][2 * half + 1], bits[1]);
            }
        });
    }

    // Most scores are small beside a softcap. If all of a warp's are, none needs an exponential or a reciprocal.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void apply_tanh(float (&rS)[kTilesM][kTilesN][4]) const {
        const float ratio = params.scale_over_softcap;
        float largest = 0.0f;
        for_each(rS, [&](int, int, int, float s) {
            largest = fmaxf(largest, fabsf(s));
            return s;
        });
        if (__any_sync(0xffffffff, largest * fabsf(ratio) >= kSmallTanh)) {
            for_each(rS, [&](int, int, int, float s) { return tanh_of(s * ratio); });
        } else {
            for_each(rS, [&](int, int, int, float s) { return small_tanh_of(s * ratio); });
        }
    }

    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void scale_and_add_alibi(float (&rS)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                             int lane) const {
        const float scale = params.outer_scale;
        if (slope == 0) return for_each(rS, [&](int, int, int, float s) { return s * scale; });
        const float ahead = keys_ahead(first_row + accumulator_row(lane), first_key + accumulator_column(lane));
        for_each(rS, [&](int m, int n, int e, float s) {
            return scale_and_add_alibi(s, ahead, m * kMmaM + 8 * (e / 2) - n * kMmaN - e % 2);
        });
    }

    template <BiasKind kKind, int kTilesM, int kTilesN>
    FASTATTN_DEVICE static void add_bias(float (&rS)[kTilesM][kTilesN][4], const uint32_t (&rB)[kTilesM][kTilesN][4]) {
        for_each(rS, [&](int m, int n, int e, float s) {
            add_bias<kKind>(s, rB[m][n][e]);
            return s;
        });
    }

    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void load_and_add_bias(float (&rS)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                           int lane) const {
        with_bias_kind([&](auto bits, auto kind) {
            for_bias<decltype(bits)>(rS, first_row, first_key, lane, [](float& score, uint32_t added) {
                add_bias<decltype(kind)::value>(score, added);
            });
        });
    }

    template <int kTilesM, int kTilesN, typename Function>
    FASTATTN_DEVICE static void for_each(float (&rS)[kTilesM][kTilesN][4], Function&& function) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) rS[m][n][e] = function(m, n, e, rS[m][n][e]);
            }
        }
    }
};

}  // namespace fastattn
