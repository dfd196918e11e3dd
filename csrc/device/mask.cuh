// Masks the accumulators of S = Q·Kᵀ: for causal masks, windows, ranges of keys, lengths and missing pages alike. The
// plain forward kernel for Hopper calls mask_warpgroup_scores(), other kernels mask_scores(); Hopper's backward kernels
// mask Sᵀ (device/transposed_scores.cuh). Which keys a row sees is found elsewhere: Window in device/sequence.cuh
// (causal is a window that ends at the row's own position), RowRanges in device/key_ranges.cuh.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// Sets the scores of keys that a row does not see to -inf, whatever they were. seen(m, half, row) returns the bits of
// the keys that a row of the warp sees, as own_columns_of() has them.
template <int kTilesM, int kTilesN, typename Seen>
FASTATTN_DEVICE void mask_scores(float (&rS)[kTilesM][kTilesN][4], int lane, Seen&& seen) {
    static_assert(2 * kTilesN <= 32, "one register holds the bits of a row");
    for_own_rows<kTilesM>(lane, [&](int m, int half, int row) {
        // Opaque, so that the compiler has all bits in one register, from which it sets seven predicates at a time.
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

// Maps a lane's columns of a tile of keys to bits of a word: the first quarter of them to byte 0, the next to byte 1,
// and so on. One instruction (R2P) sets seven predicates from the lower bits of a byte. Only tiles of 128 keys have an
// eighth column in a byte, which needs another instruction.
template <int kTilesN>
struct ColumnBits {
    static constexpr int kPerByte = kTilesN / 2;
    static_assert(kTilesN % 2 == 0 && kPerByte <= 8, "2 * kTilesN columns in 4 bytes");

    static constexpr int kPerTile = 32;

    // Returns the bit of a column; both count over all tiles.
    FASTATTN_DEVICE static constexpr int32_t bit_of(int32_t column) {
        return column / kPerByte * 8 + column % kPerByte;
    }

    // Converts a word in which column i is bit i.
    FASTATTN_DEVICE static uint32_t spread(uint32_t columns) {
        uint32_t bits = 0;
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            bits |= (columns >> byte * kPerByte & ((1u << kPerByte) - 1)) << 8 * byte;
        }
        return bits;
    }
};

// The columns of a warpgroup's tiles that a lane's upper and lower row see: their bits are [begin, end).
template <int kTilesN>
struct SeenColumns {
    int32_t begin[2], end[2];

    FASTATTN_DEVICE SeenColumns(KeyRange upper, KeyRange lower, int lane)
        : begin{bit_of(upper.begin, lane), bit_of(lower.begin, lane)},
          end{bit_of(upper.end, lane), bit_of(lower.end, lane)} {}

  private:
    // Returns the bit of the lane's first column that does not lie before the key.
    FASTATTN_DEVICE static int32_t bit_of(int32_t key, int lane) {
        return ColumnBits<kTilesN>::bit_of(own_columns_before(key, lane));
    }
};

// Does what mask_scores() does, for a warpgroup's rows and with fewer instructions for each tile. `present` has the
// bits of the columns that any row may see. first_bit: the tile's first bit (ColumnBits), counted from key 0.
template <int kTilesN>
FASTATTN_DEVICE void mask_warpgroup_scores(float (&rS)[1][kTilesN][4], const SeenColumns<kTilesN>& seen,
                                           uint32_t present, int32_t first_bit) {
    // Returns the bits of the tile from `begin` on. A shift by 32 or more leaves none.
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

}  // namespace fastattn
