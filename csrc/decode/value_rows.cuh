// Applies the scales of 8-bit tokens to scores and probabilities. Prevents NaN and infinities in values from reaching
// rows that do not see their keys.
#pragma once

#include <cstdint>

#include "decode/cache_tokens.cuh"
#include "decode/packed_rows.cuh"
#include "decode/row_warps.cuh"
#include "device/fp8.cuh"
#include "device/nonfinite.cuh"
#include "device/power_of_two.cuh"

namespace fastattn {

// A tile that several warps read. Only the warp that copied it changes it.
template <typename Tile>
struct SharedTile {
    using Layout = typename Tile::Layout;
    static constexpr int kNumRows = Tile::kNumRows;
    const Tile& tile;
    bool is_own;

    template <typename Function>
    FASTATTN_DEVICE void for_own_pairs(Function&& function) const {
        if (is_own) tile.for_own_pairs(function);
    }
};

// Lets NaN and infinities in a tile of values [16, kHeadDim] reach only the rows that see their key. All `warps` of the
// tile call it.
template <DataType kDataType, int kTilesD, int kRows, int kRowWarps>
FASTATTN_DEVICE void silence_unseen(float (&rO)[1][kTilesD][4], char* sV, const PackedRows<kRows>& rows,
                                    const RowWarps<kRowWarps>& warps, uint32_t present, int32_t first_key, int lane) {
    using Tile = WarpTile<kTilesD * kMmaN, kMmaK>;
    const Tile warp_tile(sV, lane);
    const SharedTile<Tile> tile{warp_tile, warps.is_first()};
    if (!warps.any(has_nonfinite<kDataType>(tile))) return;
    const uint2 seen = rows.template seen<kMmaK>(present, first_key, lane);
    const auto sees = [&](int, int half, int n) { return ((half == 0 ? seen.x : seen.y) >> n & 1) != 0; };
    separate_nonfinite<kDataType>(rO, reinterpret_cast<const uint16_t*>(sV), tile, sees, lane, [&] { warps.sync(); });
}

// Does the same for a tile of fp8 values [kKeys, kTilesD * 8], which can be NaN but not infinite. eight_bit_gemm.cuh
// says which dims each element of rO holds.
template <int kKeys, int kTilesD, int kRows, int kRowWarps>
FASTATTN_DEVICE void silence_unseen_fp8(float (&rO)[1][kTilesD][4], char* sV, const PackedRows<kRows>& rows,
                                        const RowWarps<kRowWarps>& warps, uint32_t present, int32_t first_key,
                                        int lane) {
    using Tile = WarpTile<kTilesD * kMmaN / 2, kKeys>;
    const Tile warp_tile(sV, lane);
    const SharedTile<Tile> tile{warp_tile, warps.is_first()};
    uint32_t found = 0;
    tile.for_own_pairs([&](uint32_t& four, int) { found |= nan_bits_of_fp8(four); });
    if (!warps.any(found != 0)) return;
    const uint2 keys = rows.template seen<kKeys>(present, first_key, lane);
    const uint32_t seen[2] = {keys.x, keys.y};
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
#pragma unroll
        for (int chunk = 0; chunk < kTilesD / 2; ++chunk) {  // 16 dims, four of them this lane's
            const auto* fours = reinterpret_cast<const uint32_t*>(sV + Tile::Layout::offset(key, chunk));
            const uint32_t is_nan = nan_bits_of_fp8(fours[lane % kLanesPerRow]);
            if (is_nan == 0) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if ((is_nan >> (8 * i + 7) & 1) == 0) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if ((seen[half] >> key & 1) != 0)
                        rO[0][2 * chunk + i % 2][2 * half + i / 2] = __uint_as_float(0x7fffffff);
                }
            }
        }
    }
    warps.sync();  // waits until every lane has read the NaN
    tile.for_own_pairs([](uint32_t& four, int) {
        const uint32_t is_nan = nan_bits_of_fp8(four);
        four &= ~((is_nan << 1) - (is_nan >> 7));
    });
    warps.sync();  // waits until the whole tile is finite
}

// Multiplies the scores of 8-bit keys by the keys' scales and by `factor`.
template <int kTilesN>
FASTATTN_DEVICE void multiply_columns(float (&rS)[1][kTilesN][4], const float* sScales, float factor, int lane) {
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
        const float2 scale = *reinterpret_cast<const float2*>(sScales + n * kMmaN + accumulator_column(lane));
#pragma unroll
        for (int e = 0; e < 4; ++e) rS[0][n][e] *= (e % 2 == 0 ? scale.x : scale.y) * factor;
    }
}

// The scale by which rO must be multiplied to give the output. P is multiplied by the scales of 8-bit values divided by
// the output scale, because P times the values' scales may not fit in 16 bits. The output scale is a power of two, 1 to
// 32 times the largest scale of the current tile of values. Because any power of two in this range will do, the output
// scale seldom changes.
struct OutputScale {
    float inverse = 1.0f;

    FASTATTN_DEVICE float value() const { return inverse_of_power(inverse); }

    // Adapts the output scale to the scales of kKeys keys, and rescales rO accordingly.
    template <int kKeys, int kTilesD>
    FASTATTN_DEVICE void follow(float (&rO)[1][kTilesD][4], const float* sScales, int lane) {
        const float own = fabsf(sScales[lane % kKeys]);
        float largest = own < kInfinity ? own : 0.0f;
        const float own_relative = largest * inverse;
        const bool some_above = __any_sync(0xffffffff, own_relative > 1.0f);
        if (!some_above && __any_sync(0xffffffff, own_relative >= 0x1p-5f)) return;
#pragma unroll
        for (int distance = 1; distance < kKeys; distance *= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        }
        if (largest == 0.0f) return;
        const uint32_t exponent = min(max(__float_as_uint(largest) & kExponentBits, kLeast), kMost);
        const float before = value();
        inverse = inverse_of_power(__uint_as_float(exponent + kExponentStep));
        const float ratio = before * inverse;
#pragma unroll
        for (int d = 0; d < kTilesD; ++d) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rO[0][d][e] *= ratio;
        }
    }

    // Multiplies P by the values' scales divided by the output scale. The probability of a key that a row does not see
    // stays 0, even if the key's scale is NaN or infinite.
    template <int kTilesN, int kRows>
    FASTATTN_DEVICE void weigh(float (&rP)[1][kTilesN][4], const float* sScales, const PackedRows<kRows>& rows,
                               uint32_t present, int32_t first_key, int lane) const {
        constexpr int kKeys = kTilesN * kMmaN;
        const int column = accumulator_column(lane);
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
            const float2 scale = *reinterpret_cast<const float2*>(sScales + n * kMmaN + column);
#pragma unroll
            for (int e = 0; e < 4; ++e) rP[0][n][e] *= (e % 2 == 0 ? scale.x : scale.y) * inverse;
        }
        if (rows.template see_all<kKeys>(present, first_key)) return;
        const uint2 keys = rows.template seen<kKeys>(present, first_key, lane);
        const uint32_t bits[2] = {keys.x >> column, keys.y >> column};
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if ((bits[e / 2] & 1u << (n * kMmaN + e % 2)) == 0) rP[0][n][e] = 0.0f;
            }
        }
    }

  private:
    static constexpr uint32_t kLeast = kExponentStep, kMost = 0x7e000000;  // so that inverses are normal numbers too
};

}  // namespace fastattn
