// Removes NaN and infinity from values that only some rows of a tile see. The product P·V multiplies masked values by P
// = 0, which gives NaN. So they are taken out of the tile, and added to the rows that see them.
//
// Why this is right:
// - Finding them. Each thread looks at the chunks that it has copied itself, after its own wait for these copies: no
//   barrier is needed before that. All chunks together are the tile, and one vote tells all threads that use it. In
//   Hopper's forward kernel, a warp of the producer looks at the whole tile instead (keep_values_finite() in
//   attention/forward_producer_sm90.cuh).
// - Rows that do not see a key get 0 times a finite number from it: 0.
// - Rows that see it. With weights P >= 0, only the numbers of a column that are not finite decide whether its sum is
//   NaN or infinite. Adding each of them with the weight 1 gives the same, with one exception: an infinity whose weight
//   is 0 in 16 bits stays an infinity, and does not become NaN.
// - Later tiles. A number in rO that is not finite never becomes finite again, whatever it is multiplied by and
//   whatever is added to it.
// - No search is needed in tiles of which every row sees every key: P·V itself gives the right result.
//
// The backward pass has the same problem with K: in dQ = dS·K, a key that a row does not see has dS = 0, which does not
// silence NaN in K. There, what is not finite in K counts as 0, and nothing is added back: a row that sees such a key
// has a score, and so a dS and a dQ, that is not finite, unless the score is -infinity.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/fma.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

// Returns 0xffff in each half of two_elements that is NaN or infinite, 0 in the others.
template <DataType kDataType>
FASTATTN_DEVICE uint32_t nonfinite_mask(uint32_t two_elements) {
    // Adding one to an exponent of all ones, and to no other, carries into the sign, which is cleared first.
    constexpr uint32_t kExponentStep = kDataType == DataType::kFloat16 ? 0x04000400 : 0x00800080;
    const uint32_t sign_bits = ((two_elements & 0x7fff7fff) + kExponentStep) & 0x80008000;
    return (sign_bits << 1) - (sign_bits >> 15);
}

// Finds NaN and infinity among many elements, with one instruction for two: 0 times them is NaN, which stays in a sum.
template <DataType kDataType>
struct SearchForNonfinite {
    uint32_t sums[4] = {};

    // i chooses the sum, because additions to one sum wait for each other. The compiler has to know i.
    FASTATTN_DEVICE void look_at(uint32_t two_elements, int i) {
        uint32_t& sum = sums[i];
        sum = kDataType == DataType::kFloat16 ? ptx::fma_rn_f16x2(two_elements, 0, sum)
                                              : ptx::fma_rn_bf16x2(two_elements, 0, sum);
    }

    // Sums are zeros, of either sign, unless an element was not finite.
    FASTATTN_DEVICE bool has_found() const { return ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7fff7fff) != 0; }
};

// Returns whether this thread's chunks of a tile, which have landed, hold NaN or infinity.
template <DataType kDataType, typename TileLoader>
FASTATTN_DEVICE bool has_nonfinite(const TileLoader& tile) {
    SearchForNonfinite<kDataType> search;
    tile.for_own_pairs([&](uint32_t& pair, int i) { search.look_at(pair, i); });
    return search.has_found();
}

struct CtaBarrier {
    FASTATTN_DEVICE void operator()() const { __syncthreads(); }
};

// Moves elements that are not finite from sV [kNumRows, kHeadDim] into the rows of rO that see their key: sees(m, half,
// n) says whether row [m][half] of this lane sees the tile's key n. Called by all threads that load the tile, which
// wait for each other in barrier().
template <DataType kDataType, int kTilesM, int kTilesD, typename TileLoader, typename Sees,
          typename Barrier = CtaBarrier>
FASTATTN_DEVICE void separate_nonfinite(float (&rO)[kTilesM][kTilesD][4], const uint16_t* sV, const TileLoader& tile,
                                        Sees&& sees, int lane, Barrier&& barrier = {}) {
#pragma unroll 1
    for (int row = 0; row < TileLoader::kNumRows; ++row) {
        uint32_t seen[kTilesM][2];  // all bits, or none
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) seen[m][half] = sees(m, half, row) ? 0xffffffff : 0;
        }
        // The tiles of rO take turns as its first one, so that the loop need not be unrolled: registers have no index.
#pragma unroll 1
        for (int d = 0; d < kTilesD; ++d) {
            const char* chunk = reinterpret_cast<const char*>(sV) + TileLoader::Layout::offset(row, d);
            const uint32_t pair = reinterpret_cast<const uint32_t*>(chunk)[lane % kLanesPerRow];
            const uint32_t nonfinite = pair & nonfinite_mask<kDataType>(pair);  // zeros add nothing
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float value = unpack<kDataType>(static_cast<uint16_t>(nonfinite >> 16 * (e % 2)));
#pragma unroll
                for (int m = 0; m < kTilesM; ++m) {
                    const float first = rO[m][0][e] + __uint_as_float(__float_as_uint(value) & seen[m][e / 2]);
#pragma unroll
                    for (int i = 0; i + 1 < kTilesD; ++i) rO[m][i][e] = rO[m][i + 1][e];
                    rO[m][kTilesD - 1][e] = first;
                }
            }
        }
    }
    barrier();  // waits until every thread has read V as it was
    tile.for_own_pairs([](uint32_t& pair, int) { pair &= ~nonfinite_mask<kDataType>(pair); });
    barrier();  // waits until V is finite in all of the tile
}

}  // namespace fastattn
