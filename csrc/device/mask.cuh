// Masks on the accumulators of S = Q·Kᵀ.
#pragma once

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Row r of a warp's rows sees the keys sees[r]; the tile's columns are the keys from first_key on. What a row does not
// see becomes -inf, whatever it was.
template <int kTilesM, int kTilesN>
FASTATTN_DEVICE void mask_columns(float (&rS)[kTilesM][kTilesN][4], const KeyRange* sees, int32_t first_key, int lane) {
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
        const KeyRange keys = sees[row];
        const int32_t own_key = first_key + accumulator_column(lane);
        const int32_t begin = keys.begin - own_key, end = keys.end - own_key;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = rS[m][n][2 * half + e];
                score = n * kMmaN + e >= begin && n * kMmaN + e < end ? score : -kInfinity;
            }
        }
    });
}

// The columns that a lane has in a tile of keys, as bits of a word: a fourth of them in each byte. One instruction sets
// predicates from the lower seven bits of a byte, more often than not of all that are there.
template <int kTilesN>
struct ColumnBits {
    static constexpr int kPerByte = kTilesN / 2;
    static_assert(kTilesN % 2 == 0 && kPerByte <= 8, "2 * kTilesN columns in 4 bytes");

    static constexpr int kPerTile = 32;

    // The bit of a column; both count over all tiles.
    FASTATTN_DEVICE static constexpr int32_t bit_of(int32_t column) {
        return column / kPerByte * 8 + column % kPerByte;
    }

    // From a word in which column i is bit i.
    FASTATTN_DEVICE static uint32_t spread(uint32_t columns) {
        uint32_t bits = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            bits |= (columns >> byte * kPerByte & ((1u << kPerByte) - 1)) << 8 * byte;
        }
        return bits;
    }
};

// The columns of a warpgroup's tiles that a lane's upper and lower row see: those whose bits stand from begin to end.
template <int kTilesN>
struct SeenColumns {
    int32_t begin[2], end[2];

    FASTATTN_DEVICE SeenColumns(KeyRange upper, KeyRange lower, int lane)
        : begin{bit_of(upper.begin, lane), bit_of(lower.begin, lane)},
          end{bit_of(upper.end, lane), bit_of(lower.end, lane)} {}

  private:
    // The bit of the lane's first column that does not lie before the key.
    FASTATTN_DEVICE static int32_t bit_of(int32_t key, int lane) {
        const int32_t from_own = key - accumulator_column(lane);
        constexpr int kShift = 3;
        static_assert(1 << kShift == kMmaN, "rounds down, as a division does not");
        return ColumnBits<kTilesN>::bit_of((from_own >> kShift) * 2 + min(from_own & (kMmaN - 1), 2));
    }
};

// Does what mask_columns() does for a warpgroup's rows, with bits instead of comparisons: fewer instructions. `present`
// has the columns that anybody may see; first_bit: of the tile.
template <int kTilesN>
FASTATTN_DEVICE void mask_own_columns(float (&rS)[1][kTilesN][4], const SeenColumns<kTilesN>& seen, uint32_t present,
                                      int32_t first_bit) {
    // The bits of the tile from `begin` on. A shift by 32 and more leaves none.
    const auto bits_from = [&](int32_t begin) { return __funnelshift_lc(0, 0xffffffff, max(begin - first_bit, 0)); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Opaque, so that the compiler has all bits in one register.
        const uint32_t bits =
            ptx::opaque(static_cast<int32_t>(bits_from(seen.begin[half]) & ~bits_from(seen.end[half]) & present));
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = rS[0][n][2 * half + e];
                score = (bits & 1u << ColumnBits<kTilesN>::bit_of(2 * n + e)) != 0 ? score : -kInfinity;
            }
        }
    }
}

// Does the same with column i in bit i, for kernels whose registers the other form overflows. seen_by[half]: the keys
// that this lane's upper or lower row sees; `present` has the columns that anybody may see.
template <int kTilesN>
FASTATTN_DEVICE void mask_own_columns(float (&rS)[1][kTilesN][4], const KeyRange (&seen_by)[2], uint32_t present,
                                      int32_t first_key, int lane) {
    static_assert(2 * kTilesN <= 32, "one register holds the bits of a row");
    for (int half = 0; half < 2; ++half) {
        const uint64_t before_end = (uint64_t{1} << own_columns_before(seen_by[half].end, first_key, lane)) - 1;
        const uint64_t before_begin = (uint64_t{1} << own_columns_before(seen_by[half].begin, first_key, lane)) - 1;
        // Opaque, so that the compiler has all bits in one register, from which it sets seven predicates at a time.
        const uint32_t bits = ptx::opaque(static_cast<int32_t>(before_end & ~before_begin & present));
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = rS[0][n][2 * half + e];
                score = (bits & 1u << (2 * n + e)) != 0 ? score : -kInfinity;
            }
        }
    }
}

}  // namespace fastattn
