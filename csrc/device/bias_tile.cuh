// Loads the bias of one tile of scores, and adds it to the accumulators of a warp of a warpgroup. A bias of 8 or 16
// bits is loaded into registers while Q·Kᵀ is computed, and added afterwards. A bias of 32 bits would not fit in
// registers next to Q·Kᵀ, so it is loaded when it is added. The producer has prefetched the bias into the L2 cache. If
// all keys of the tile exist and BiasView::in_pairs is set, one load reads two neighbouring keys, without a comparison.
// No load reads outside of the bias.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"
#include "device/ptx/prefetch.cuh"
#include "device/scores.cuh"

namespace fastattn {

template <int kTilesN>
struct BiasTile {
    using Kind = BiasView::Kind;

    const BiasView& view;
    const char* rows[2];  // key 0 of this lane's upper and lower row; the last row replaces a row that does not exist
    int32_t num_keys, own_column;
    uint32_t pairs[kTilesN][2];  // [n][half]: two neighbouring keys, the first in the lower bits, in row `half`

    // first_row: the warp's first row. The sequence must have at least one row.
    FASTATTN_DEVICE BiasTile(const HeadScores& scores, int32_t first_row, int lane)
        : view(scores.params.bias), num_keys(scores.window.num_keys), own_column(accumulator_column(lane)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int32_t row = min(first_row + accumulator_row(lane) + 8 * half, scores.num_rows - 1);
            rows[half] = scores.bias + row * view.row_stride * view.element_bytes();
        }
    }

    FASTATTN_DEVICE void load(int32_t first_key) {
        if (view.kind == Kind::kBool) {
            load_pairs<uint8_t>(first_key);
        } else if (view.kind == Kind::kFloat16 || view.kind == Kind::kBFloat16) {
            load_pairs<uint16_t>(first_key);
        }
    }

    FASTATTN_DEVICE void add_to(float (&rS)[1][kTilesN][4], int32_t first_key) const {
        switch (view.kind) {
            case Kind::kNone:
                return;
            case Kind::kBool:
                return add_pairs<Kind::kBool>(rS);
            case Kind::kFloat16:
                return add_pairs<Kind::kFloat16>(rS);
            case Kind::kBFloat16:
                return add_pairs<Kind::kBFloat16>(rS);
            case Kind::kFloat32:
                for_each_pair<uint32_t>(first_key, [&](int n, int half, uint32_t first, uint32_t second) {
                    add<Kind::kFloat32>(rS[0][n][2 * half], first);
                    add<Kind::kFloat32>(rS[0][n][2 * half + 1], second);
                });
        }
    }

  private:
    // A bias of -inf masks even a score that is NaN.
    template <Kind kKind>
    FASTATTN_DEVICE static void add(float& score, uint32_t bits) {
        const float added = HeadScores::bias_value<kKind>(bits);
        if constexpr (kKind == Kind::kBool) {
            score = bits != 0 ? score : -kInfinity;
        } else {
            score = added == -kInfinity ? -kInfinity : score + added;
        }
    }

    template <Kind kKind>
    FASTATTN_DEVICE void add_pairs(float (&rS)[1][kTilesN][4]) const {
        constexpr int kBits = kKind == Kind::kBool ? 8 : 16;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                add<kKind>(rS[0][n][2 * half], pairs[n][half] & ((1u << kBits) - 1));
                add<kKind>(rS[0][n][2 * half + 1], pairs[n][half] >> kBits);
            }
        }
    }

    template <typename T>
    FASTATTN_DEVICE void load_pairs(int32_t first_key) {
        for_each_pair<T>(first_key, [&](int n, int half, uint32_t first, uint32_t second) {
            pairs[n][half] = first | second << 8 * sizeof(T);
        });
    }

    // Calls function(n, half, bits of the first key, bits of the second key) for this lane's pairs of neighbouring
    // keys.
    template <typename T, typename Function>
    FASTATTN_DEVICE void for_each_pair(int32_t first_key, Function&& function) const {
        using Two = std::conditional_t<sizeof(T) == 4, uint2, std::conditional_t<sizeof(T) == 2, uint32_t, uint16_t>>;
        const int32_t own_key = first_key + own_column;
        if (view.in_pairs && first_key + kTilesN * kMmaN <= num_keys) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Two* own = reinterpret_cast<const Two*>(rows[half] + own_key * int64_t{sizeof(T)});
#pragma unroll
                for (int n = 0; n < kTilesN; ++n) {
                    const Two two = own[n * kMmaN / 2];
                    if constexpr (sizeof(T) == 4) {
                        function(n, half, two.x, two.y);
                    } else {
                        function(n, half, static_cast<T>(two), two >> 8 * sizeof(T));
                    }
                }
            }
        } else {
            const int64_t key_bytes = view.key_stride * int64_t{sizeof(T)};
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                const int32_t last = num_keys - 1;
                const int64_t first = min(own_key + n * kMmaN, last) * key_bytes;
                const int64_t second = min(own_key + n * kMmaN + 1, last) * key_bytes;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    function(n, half, *reinterpret_cast<const T*>(rows[half] + first),
                             *reinterpret_cast<const T*>(rows[half] + second));
                }
            }
        }
    }
};

// Prefetches the bias of num_rows by num_keys scores into the L2 cache. Called by one warp, before other warps load the
// bias. Does nothing if the elements of neighbouring keys are not adjacent.
FASTATTN_DEVICE void prefetch_bias(const BiasView& view, int32_t batch, int32_t head, int32_t first_row,
                                   int32_t num_rows, int32_t first_key, int32_t num_keys, int lane) {
    constexpr int kSectorBytes = 32;
    if (view.kind == BiasView::Kind::kNone || view.key_stride != 1) return;
    const int64_t element_bytes = view.element_bytes(), bytes_between_rows = view.row_stride * element_bytes;
    const char* gTile = static_cast<const char*>(view.data) + first_row * bytes_between_rows +
                        (batch * view.batch_stride + head * view.head_stride + first_key) * element_bytes;
    const int32_t rows = view.row_stride == 0 ? 1 : num_rows, row_bytes = num_keys * static_cast<int>(element_bytes);
    const int32_t sectors = ceil_div(row_bytes, kSectorBytes);
#pragma unroll 1
    for (int32_t i = lane; i < rows * sectors; i += kWarpSize) {
        const int32_t row = i / sectors;
        ptx::prefetch_global_L2(gTile + row * bytes_between_rows + (i - row * sectors) * kSectorBytes);
    }
}

}  // namespace fastattn
