// Masks the accumulators of S = Q·Kᵀ: for causal masks, windows, ranges of keys, lengths and missing pages alike. The
// forward kernel for Hopper without options calls mask_warpgroup_scores(), other kernels call mask_scores(). Hopper's
// backward kernels mask Sᵀ (device/transposed_scores.cuh). Other files find the keys that a row sees: Window in
// device/sequence.cuh (a causal mask is a window that ends at the row's own position), RowRanges in
// device/key_ranges.cuh.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Sets the scores of keys that a row does not see to -inf, also if they are NaN. seen(m, half, row) returns which of
// this lane's keys row `row` of the warp sees, as the bits of own_columns_of().
template <int kTilesM, int kTilesN, typename Seen>
FASTATTN_DEVICE void mask_scores(float (&rS)[kTilesM][kTilesN][4], int lane, Seen&& seen) {
    static_assert(2 * kTilesN <= 32, "one register holds the bits of a row");
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
        // Opaque, so that the compiler keeps all bits in one register, from which one instruction sets seven
        // predicates.
        const uint32_t bits = ptx::opaque(static_cast<int32_t>(seen(m, half, row)));
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = rS[m][n][2 * half + e];
                score = (bits & 1u << (2 * n + e)) != 0 ? score : -kInfinity;
            }
        }
    });
}

// Maps a lane's columns of a tile of keys to bits of a word: the first quarter of the columns to byte 0, the second
// quarter to byte 1, and so on. One instruction (R2P) sets seven predicates from the lower bits of a byte. Only tiles
// of 128 keys have an eighth column in a byte, which needs another instruction.
template <int kTilesN>
struct ColumnBits {
    static constexpr int kPerByte = kTilesN / 2;
    static_assert(kTilesN % 2 == 0 && kPerByte <= 8, "2 * kTilesN columns in 4 bytes");

    static constexpr int kPerTile = 32;

    // Returns the index of a column's bit. Columns and bits are counted over all tiles.
    FASTATTN_DEVICE static constexpr int32_t bit_of(int32_t column) {
        return column / kPerByte * 8 + column % kPerByte;
    }

    // Moves bit i of `columns`, which belongs to column i of a tile, to bit bit_of(i).
    FASTATTN_DEVICE static uint32_t spread(uint32_t columns) {
        uint32_t bits = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            bits |= (columns >> byte * kPerByte & ((1u << kPerByte) - 1)) << 8 * byte;
        }
        return bits;
    }
};

// The columns, over all tiles of keys, that a lane's upper and lower row see: bits [begin, end) as ColumnBits counts.
template <int kTilesN>
struct SeenColumns {
    int32_t begin[2], end[2];

    FASTATTN_DEVICE SeenColumns(KeyRange upper, KeyRange lower, int lane)
        : begin{bit_of(upper.begin, lane), bit_of(lower.begin, lane)},
          end{bit_of(upper.end, lane), bit_of(lower.end, lane)} {}

  private:
    // Returns the bit of the lane's first column at or after the key.
    FASTATTN_DEVICE static int32_t bit_of(int32_t key, int lane) {
        return ColumnBits<kTilesN>::bit_of(own_columns_before(key, lane));
    }
};

// Does what mask_scores() does, for a warpgroup's rows and with fewer instructions for each tile. present: the bits of
// the tile's columns that no missing page hides. first_bit: the tile's first bit (ColumnBits), counted from key 0.
template <int kTilesN>
FASTATTN_DEVICE void mask_warpgroup_scores(float (&rS)[1][kTilesN][4], const SeenColumns<kTilesN>& seen,
                                           uint32_t present, int32_t first_bit) {
    // Returns the bits of the tile from `begin` on. A shift by 32 or more leaves no bit.
    const auto bits_from = [&](int32_t begin) { return __funnelshift_lc(0, 0xffffffff, max(begin - first_bit, 0)); };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // Opaque, as in mask_scores().
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

}  // namespace fastattn
