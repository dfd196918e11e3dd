// Stores accumulators in global memory: rounded to 16 bits, or in fp32.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"

namespace fastattn {

// Transposes pairs[4] over the four lanes of a row: pairs[j] of lane i becomes pairs[i] of lane j.
FASTATTN_DEVICE void transpose_over_quad(uint32_t (&pairs)[4], int lane) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        const bool upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & distance) continue;
            uint32_t &low = pairs[i], &high = pairs[i + distance];
            const uint32_t received = __shfl_xor_sync(0xffffffff, upper ? low : high, distance);
            (upper ? low : high) = received;
        }
    }
}

// Stores a warp's rows [16, 8 * kTilesD], of head_dim elements each, a multiple of 8. row_at(row) returns where a row
// goes, or null if the row is not stored. A lane stores 16 bytes at a time, and the four lanes of a row 64 adjacent
// bytes.
template <DataType kDataType, int kTilesD, typename RowAt>
FASTATTN_DEVICE void store_accumulators(const float (&rO)[1][kTilesD][4], int lane, int head_dim, RowAt&& row_at) {
    static_assert(kTilesD % 4 == 0, "four tiles are one chunk of 16 bytes for each lane of a row");
    for_own_rows<1>(lane, [&](int, int half, int row) {
        uint16_t* gRow = row_at(row);
#pragma unroll
        for (int first = 0; first < kTilesD; first += 4) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                pairs[i] = pack<kDataType>(rO[0][first + i][2 * half], rO[0][first + i][2 * half + 1]);
            }
            transpose_over_quad(pairs, lane);
            const int column = (first + lane % kLanesPerRow) * kMmaN;
            if (gRow != nullptr && column < head_dim) {
                *reinterpret_cast<uint4*>(gRow + column) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
            }
        }
    });
}

// Stores a lane's elements of one of its rows in fp32. The row has 8 * kTilesD elements, of which head_dim are stored.
// half: see for_own_rows(). store(pair, first, second) stores two neighbouring elements at address `pair`.
template <int kTilesD, typename Store>
FASTATTN_DEVICE void store_lane_fp32(float* gRow, const float (&rO)[kTilesD][4], int half, int lane, int head_dim,
                                     Store&& store) {
    gRow += accumulator_column(lane);
#pragma unroll
    for (int d = 0; d < kTilesD; ++d) {
        if (d * kMmaN >= head_dim) continue;
        store(gRow + d * kMmaN, rO[d][2 * half], rO[d][2 * half + 1]);
    }
}

// WritePair and AddPair assume that no other thread stores to the same pair at the same time.
struct WritePair {
    FASTATTN_DEVICE void operator()(float* pair, float first, float second) const {
        *reinterpret_cast<float2*>(pair) = {first, second};
    }
};

struct AddPair {
    FASTATTN_DEVICE void operator()(float* pair, float first, float second) const {
        const float2 sum = *reinterpret_cast<const float2*>(pair);
        *reinterpret_cast<float2*>(pair) = {sum.x + first, sum.y + second};
    }
};

}  // namespace fastattn
