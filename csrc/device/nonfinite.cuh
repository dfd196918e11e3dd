// Removes NaN and infinity from V where only some rows of a tile see a key. P·V multiplies values that a row does not
// see by P = 0, and 0 times NaN or infinity is NaN. So elements that are not finite are taken out of the tile of V, and
// added to the rows that see their key.
//
// Why this is right:
// - Finding them. Each thread searches the chunks that it has copied itself, after it has waited for its own copies, so
//   that no barrier is needed before the search. The chunks of all threads together are the tile. One vote tells all
//   threads that use the tile whether any thread has found something. In Hopper's forward kernel, a warp of the
//   producer searches the whole tile instead (keep_values_finite() in attention/forward_producer_sm90.cuh). Decoding
//   does the same for fp8 values in decode/value_rows.cuh.
// - Rows that do not see the key. They get 0 times a finite number from it: 0.
// - Rows that see the key. With weights P >= 0, only the elements of a column that are not finite decide whether the
//   column's sum is NaN or infinite. Adding these elements with the weight 1 gives the same result, with one exception:
//   an infinity whose weight rounds to 0 in 16 bits gives infinity instead of NaN.
// - Later tiles. A number in rO that is not finite never becomes finite again, whatever it is multiplied by and
//   whatever is added to it.
// - No search is needed in tiles in which every row sees every key: P·V itself gives the right result.
//
// The backward pass has the same problem with K: in dQ = dS·K, a key that a row does not see has dS = 0, and 0 times
// NaN is NaN. There, elements of K that are not finite are set to 0, and nothing is added back. Rows that see such a
// key need no addition: their score, and so their dS and dQ, is not finite anyway, unless the score is -infinity.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/fma.cuh"
#include "device/swizzle.cuh"

namespace fastattn {

// Returns a word with 0xffff in the halves in which two_elements is NaN or infinite, and 0 in the other halves.
template <DataType kDataType>
FASTATTN_DEVICE uint32_t nonfinite_mask(uint32_t two_elements) {
    // Adding one to the exponent carries into the sign bit, which is cleared first, only if the exponent is all ones.
    constexpr uint32_t kExponentStep = kDataType == DataType::kFloat16 ? 0x04000400 : 0x00800080;
    const uint32_t sign_bits = ((two_elements & 0x7fff7fff) + kExponentStep) & 0x80008000;
    return (sign_bits << 1) - (sign_bits >> 15);
}

// Finds NaN and infinity among many elements, with one FMA for two elements: 0 times NaN or infinity is NaN, and a sum
// that is NaN stays NaN.
template <DataType kDataType>
struct SearchForNonfinite {
    uint32_t sums[4] = {};

    // i: 0 to 3, chooses the sum. There are four sums because each addition waits for the previous one to the same sum.
    // The compiler has to know i, so that the sums stay in registers.
    FASTATTN_DEVICE void look_at(uint32_t two_elements, int i) {
        uint32_t& sum = sums[i];
        sum = kDataType == DataType::kFloat16 ? ptx::fma_rn_f16x2(two_elements, 0, sum)
                                              : ptx::fma_rn_bf16x2(two_elements, 0, sum);
    }

    // A sum is a zero of either sign, unless an element was not finite.
    FASTATTN_DEVICE bool has_found() const { return ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7fff7fff) != 0; }
};

// Returns whether this thread's chunks of a tile contain NaN or infinity. The copies of these chunks must have landed.
template <DataType kDataType, typename TileLoader>
FASTATTN_DEVICE bool has_nonfinite(const TileLoader& tile) {
    SearchForNonfinite<kDataType> search;
    tile.for_own_pairs([&](uint32_t& pair, int i) { search.look_at(pair, i); });
    return search.has_found();
}

struct CtaBarrier {
    FASTATTN_DEVICE void operator()() const { __syncthreads(); }
};

// Sets elements of sV [kNumRows, kHeadDim] that are not finite to 0, and adds them to the rows of rO that see their
// key. sees(m, half, n) returns whether row [m][half] of this lane sees key n of the tile. Called by all threads that
// load the tile. barrier() must make these threads wait for each other.
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
        // Registers cannot be indexed at run time. So this loop, which is not unrolled, always updates the first tile
        // of rO, and then rotates the tiles by one.
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
