// Applies options to Sᵀ = K·Qᵀ: softcap, ALiBi and bias, as device/scores.cuh does, on the accumulators of a warpgroup
// whose rows are keys and whose columns are query rows. A pass covers kTilesAtOnce * 8 of the columns, from tile kFirst
// on. With more columns, the softcap's gradients would not fit in registers. With fewer, the options would be tested
// more often.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/scores.cuh"
#include "device/softcap.cuh"
#include "device/softmax.cuh"
#include "device/transposed_scores.cuh"

namespace fastattn {

// A warp's scores of one head: 16 keys from first_key on, and 8 * kTilesM query rows from first_row on. kHasRegisters:
// while S is computed, 2 * kTilesM registers hold a bias of 16 or 8 bits, and 16 registers hold the softcap's gradients
// of a pass. Without it, the bias is loaded when it is added, and 8 registers hold the gradients of a pass.
template <int kTilesM, bool kHasRegisters>
struct TransposedOptions {
    static constexpr int kTilesAtOnce = kHasRegisters ? 4 : 2;
    using Accumulators = float[1][kTilesM][4];
    using SoftcapGradients = float[kTilesAtOnce][4];
    using BiasKind = BiasView::Kind;

    const HeadScores& scores;
    int32_t own_row, own_key;  // of element [0][0] of this lane

    FASTATTN_DEVICE TransposedOptions(const HeadScores& scores, int32_t first_row, int32_t first_key, int lane)
        : scores(scores), own_row(first_row + accumulator_column(lane)), own_key(first_key + accumulator_row(lane)) {}

    // [n][half]: the bits of the bias of two neighbouring rows, the first in the lower half, for the lane's key `half`.
    // Biases of 32 bits do not fit.
    using BiasPairs = uint32_t[kTilesM][2];

    template <typename T>
    static constexpr bool kLoadsEarly = kHasRegisters && sizeof(T) < sizeof(uint32_t);

    // Called early, because the bias is needed only after the products. For rows and keys that do not exist, it reads
    // the last row or key.
    FASTATTN_DEVICE void load_bias(BiasPairs& pairs) const {
#pragma unroll
        for (int n = 0; n < kTilesM; ++n) pairs[n][0] = pairs[n][1] = 0;  // else they would take registers in the loop
        scores.with_bias_kind([&](auto bits, auto) {
            using T = decltype(bits);
            if constexpr (kLoadsEarly<T>) {
                for_bias<T, 0, kTilesM>(
                    [&](int n, int half, uint32_t first, uint32_t second) { pairs[n][half] = first | second << 16; });
            }
        });
    }

    // Turns rS = S into scores without the bias. rSoftcapGradient becomes d score / d (scale * S) if there is a
    // softcap.
    template <int kFirst>
    FASTATTN_DEVICE void scale(Accumulators& rS, SoftcapGradients& rSoftcapGradient) const {
        const ScoreParams& params = scores.params;
        if (params.softcap > 0) {
            for_each<kFirst>([&](int n, int e) {
                const float t = tanh_of(rS[0][n][e] * params.scale_over_softcap);
                rSoftcapGradient[n - kFirst][e] = 1.0f - t * t;
                rS[0][n][e] = t;
            });
        } else {
            for_each<kFirst>([&](int n, int e) {
                rSoftcapGradient[n - kFirst][e] = 0.0f;  // else it would take registers in the whole loop
            });
        }
        scale_and_add_alibi<kFirst>(rS);
    }

    // Adds the bias, and removes the scores that the bias masks from `seen`.
    template <int kFirst>
    FASTATTN_DEVICE void add_bias(Accumulators& rS, SeenRows& seen, const BiasPairs& pairs) const {
        scores.with_bias_kind([&](auto bits, auto kind) {
            const auto add = [&](int n, int half, uint32_t first, uint32_t second) {
                add_bias<kind.value>(rS, seen, n, 2 * half, first);
                add_bias<kind.value>(rS, seen, n, 2 * half + 1, second);
            };
            if constexpr (!kLoadsEarly<decltype(bits)>) {
                for_bias<decltype(bits), kFirst, kTilesAtOnce>(add);
            } else {
#pragma unroll
                for (int n = kFirst; n < kFirst + kTilesAtOnce; ++n) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        add(n, half, pairs[n][half] & 0xffff, pairs[n][half] >> 16);
                    }
                }
            }
        });
        seen.make_opaque();
    }

    template <int kFirst = 0, int kTiles = kTilesAtOnce, typename Function>
    FASTATTN_DEVICE static void for_each(Function&& function) {
#pragma unroll
        for (int n = kFirst; n < kFirst + kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) function(n, e);
        }
    }

  private:
    // Calls function(n, half, bits of the first row, bits of the second row) for every pair of neighbouring rows of the
    // lane's key `half`.
    template <typename T, int kFirst, int kTiles, typename Function>
    FASTATTN_DEVICE void for_bias(Function&& function) const {
        const BiasView& view = scores.params.bias;
        const int64_t row_bytes = view.row_stride * int64_t{sizeof(T)};
        const char* keys[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t key = min(own_key + 8 * half, scores.window.num_keys - 1);
            keys[half] = scores.bias + key * view.key_stride * int64_t{sizeof(T)};
        }
#pragma unroll
        for (int n = kFirst; n < kFirst + kTiles; ++n) {
            int64_t offsets[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                offsets[e] = static_cast<uint32_t>(min(own_row + n * kMmaN + e, scores.num_rows - 1)) * row_bytes;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                function(n, half, *reinterpret_cast<const T*>(keys[half] + offsets[0]),
                         *reinterpret_cast<const T*>(keys[half] + offsets[1]));
            }
        }
    }

    template <BiasKind kKind>
    FASTATTN_DEVICE static void add_bias(Accumulators& rS, SeenRows& seen, int n, int e, uint32_t bits) {
        if (HeadScores::bias_value<kKind>(bits) == -kInfinity) seen.hide(n, e);
        HeadScores::add_bias<kKind>(rS[0][n][e], bits);
    }

    template <int kFirst>
    FASTATTN_DEVICE void scale_and_add_alibi(Accumulators& rS) const {
        if (scores.slope == 0) {
            const float scale = scores.params.outer_scale;
            return for_each<kFirst>([&](int n, int e) { rS[0][n][e] *= scale; });
        }
        const float ahead = scores.keys_ahead(own_row, own_key);
        for_each<kFirst>([&](int n, int e) {
            rS[0][n][e] = scores.scale_and_add_alibi(rS[0][n][e], ahead, n * kMmaN + e % 2 - 8 * (e / 2));
        });
    }
};

}  // namespace fastattn
