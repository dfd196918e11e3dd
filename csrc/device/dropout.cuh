// Applies dropout to a warp's accumulators. Whether a probability is kept depends only on the seed and on the
// probability's position (head, row, key), to which params.dropout_origin is added. Its random number is word key % 4
// of Philox 4x32-10 (Salmon et al., SC 2011) with the counter (key / 4, row, head, 0).
#pragma once

#include <cstdint>

#include "device/fragment.cuh"

namespace fastattn {

FASTATTN_DEVICE uint4 philox_4x32_10(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t high0 = __umulhi(0xd2511f53, counter.x), low0 = 0xd2511f53 * counter.x;
        const uint32_t high1 = __umulhi(0xcd9e8d57, counter.z), low1 = 0xcd9e8d57 * counter.z;
        counter = {high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0};
        key.x += 0x9e3779b9;
        key.y += 0xbb67ae85;
    }
    return counter;
}

struct Dropout {
    uint2 seed;
    uint32_t threshold;  // a word below it drops the probability
    uint32_t head;       // counted over batch and heads
    const DropoutOrigin& origin;

    // If the call has no seed, the object must not be used.
    FASTATTN_DEVICE Dropout(const ScoreParams& params, uint32_t head)
        : seed{0, 0},
          threshold(params.dropout_threshold),
          head(params.dropout_origin.head + head),
          origin(params.dropout_origin) {
        if (params.dropout_seed == nullptr) return;
        const auto bits = static_cast<uint64_t>(*params.dropout_seed);
        seed = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
    }

    // Takes a seed that the caller has already read.
    FASTATTN_DEVICE Dropout(const ScoreParams& params, int64_t seed, uint32_t head)
        : seed{static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)},
          threshold(params.dropout_threshold),
          head(params.dropout_origin.head + head),
          origin(params.dropout_origin) {}

    // Sets the dropped elements of rP to 0. The upper left element of rP is P[first_row][first_key], where first_key is
    // a multiple of 8.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void drop(float (&rP)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key, int lane) const {
        for_each_word<kTilesM, kTilesN>(first_row, first_key, lane, [&](int m, int n, int e, uint32_t word) {
            rP[m][n][e] = word < threshold ? 0.0f : rP[m][n][e];
        });
    }

    // Calls function(m, n, e, word) for each element of a tile like drop()'s rP. Two neighbouring lanes hold the four
    // keys of a counter, in the same two rows. Each lane computes the four words of one of these rows, and gives two of
    // them to its neighbour.
    template <int kTilesM, int kTilesN, typename Function>
    FASTATTN_DEVICE void for_each_word(int32_t first_row, int32_t first_key, int lane, Function&& function) const {
        const int odd = lane & 1;
        const uint32_t counter_key = (origin.key + first_key + accumulator_column(lane)) / 4;
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
            const uint32_t row = origin.row + first_row + m * kMmaM + accumulator_row(lane) + 8 * odd;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) {
                const uint4 words = philox_4x32_10({counter_key + n * (kMmaN / 4), row, head, 0}, seed);
                const uint32_t given0 = odd ? words.x : words.z, given1 = odd ? words.y : words.w;
                const uint32_t taken0 = __shfl_xor_sync(0xffffffff, given0, 1);
                const uint32_t taken1 = __shfl_xor_sync(0xffffffff, given1, 1);
                function(m, n, 0, odd ? taken0 : words.x);
                function(m, n, 1, odd ? taken1 : words.y);
                function(m, n, 2, odd ? words.z : taken0);
                function(m, n, 3, odd ? words.w : taken1);
            }
        }
    }

    // Returns which elements of a transposed tile, 16 keys by 64 query rows, are kept. Bit 16 * half + 2 * n + e stands
    // for element [n][2 * half + e] of this lane's accumulators, whose rows are keys. Four lanes hold the four keys of
    // a counter, for the same query rows. Each of these lanes computes a quarter of the counters, and then they
    // exchange the bits.
    FASTATTN_DEVICE uint32_t kept_of_transposed(int32_t first_row, int32_t first_key, int lane) const {
        constexpr int kTilesOfQuarter = 4;
        const int quarter = lane / kLanesPerRow % 4, half = quarter / 2;
        const uint32_t counter_key = (origin.key + first_key + 8 * half + accumulator_row(lane)) / 4;
        const uint32_t own_row =
            origin.row + first_row + quarter % 2 * kTilesOfQuarter * kMmaN + accumulator_column(lane);
        uint32_t kept = 0;  // a byte for each key
#pragma unroll
        for (int n = 0; n < kTilesOfQuarter; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint4 words = philox_4x32_10({counter_key, own_row + n * kMmaN + e, head, 0}, seed);
                const uint32_t bit = 1u << (2 * n + e);
                kept |= (words.x >= threshold ? bit : 0) | (words.y >= threshold ? bit << 8 : 0) |
                        (words.z >= threshold ? bit << 16 : 0) | (words.w >= threshold ? bit << 24 : 0);
            }
        }
        // Transposes the 4 x 4 bytes of four lanes and four keys: first within pairs of lanes, then between the pairs.
        const uint32_t neighbour_bits = __shfl_xor_sync(0xffffffff, kept, kLanesPerRow);
        kept = __byte_perm(kept, neighbour_bits, quarter % 2 == 0 ? 0x6240 : 0x3715);
        const uint32_t other_pair_bits = __shfl_xor_sync(0xffffffff, kept, 2 * kLanesPerRow);
        return __byte_perm(kept, other_pair_bits, quarter / 2 == 0 ? 0x5410 : 0x3276);
    }
};

}  // namespace fastattn
