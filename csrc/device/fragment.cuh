// Which element of a tile each lane of a warp holds, for mma.m16n8k16 with 16-bit operands and fp32 accumulators.
// PTX ISA, "Matrix Fragments for mma.m16n8k16".
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/ptx/cvt.cuh"
#include "device/ptx/mma.cuh"
#include "host/params.h"

namespace fastattn {

inline constexpr int kWarpSize = 32;
inline constexpr int kMmaM = 16;
inline constexpr int kMmaN = 8;
inline constexpr int kMmaK = 16;
inline constexpr int kLanesPerRow = 4;  // lanes that share a row of an accumulator

// Returns `value`, which must be the same in all lanes. Tells the compiler that it is the same, so that the compiler
// can keep it, and values computed from it, in uniform registers.
FASTATTN_DEVICE int32_t warp_uniform(int32_t value) {
    return static_cast<int32_t>(__reduce_or_sync(0xffffffff, static_cast<uint32_t>(value)));
}

// Returns a warp's index in its CTA.
FASTATTN_DEVICE int warp_in_cta() {
    return warp_uniform(threadIdx.x / kWarpSize);
}

// Accumulator register e of a lane is element [accumulator_row(lane) + 8 * (e / 2)][accumulator_column(lane) + e % 2].
// So a lane has an upper row (half 0) and a lower row (half 1) in each tile.
FASTATTN_DEVICE int accumulator_row(int lane) {
    return lane / kLanesPerRow;
}

FASTATTN_DEVICE int accumulator_column(int lane) {
    return 2 * (lane % kLanesPerRow);
}

// Returns how many of a lane's columns come before `column`, which is counted from the first column of the accumulator
// tiles. A negative column gives a negative number.
FASTATTN_DEVICE int32_t own_columns_before(int32_t column, int lane) {
    const int32_t from_own = column - accumulator_column(lane);
    constexpr int kShift = 3;  // a shift rounds negative numbers down, a division does not
    static_assert(1 << kShift == kMmaN);
    return (from_own >> kShift) * 2 + min(from_own & (kMmaN - 1), 2);
}

// Returns a bit mask of a lane's columns from `column` on, in accumulator tiles whose first column is `first`: bit i is
// column i of the lane. The funnel shift clamps its distance to 32, so that no comparison is needed.
FASTATTN_DEVICE uint32_t own_columns_from(int32_t column, int32_t first, int lane) {
    return __funnelshift_lc(0, 0xffffffff, max(own_columns_before(column - first, lane), 0));
}

// Returns a bit mask, as own_columns_from() does, of a lane's columns in a range.
template <typename Range>
FASTATTN_DEVICE uint32_t own_columns_of(const Range& range, int32_t first, int lane) {
    return own_columns_from(range.begin, first, lane) & ~own_columns_from(range.end, first, lane);
}

// Calls function(m, half, row) for each of a warp's kTilesM * 16 rows in which this lane has elements.
template <int kTilesM, typename Function>
FASTATTN_DEVICE void for_own_rows(int lane, Function&& function) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) function(m, half, m * kMmaM + accumulator_row(lane) + 8 * half);
    }
}

// Calls function(std::integral_constant<int, i>{}) for i = 0 … kCount - 1.
template <int kCount, typename Function>
FASTATTN_DEVICE void for_constant(Function&& function) {
    if constexpr (kCount > 0) {
        for_constant<kCount - 1>(function);
        function(std::integral_constant<int, kCount - 1>{});
    }
}

// The row and the 16-byte chunk, in a 16x16 block in shared memory, whose address a lane passes to ldmatrix.x4.
struct LdmatrixLane {
    int row, chunk;
};

// With these addresses, registers r[0..3] become the block's 8x8 quarters upper left, lower left, upper right, lower
// right. A block [M, K] gives operand A. A block [K, N], with .trans, gives operands B (r[0], r[1]) and (r[2], r[3]) of
// its two tiles in N.
FASTATTN_DEVICE LdmatrixLane ldmatrix_lane(int lane) {
    return {lane % 16, lane / 16};
}

// Like ldmatrix_lane(), with the quarters lower left and upper right exchanged. A block [N, K] gives operands B (r[0],
// r[1]) and (r[2], r[3]) of its two tiles in N. ldmatrix_lane() would give (r[0], r[2]) and (r[1], r[3]), but mma needs
// neighbouring registers.
FASTATTN_DEVICE LdmatrixLane ldmatrix_lane_b(int lane) {
    return {lane / 16 * 8 + lane % 8, lane / 8 % 2};
}

// Returns the row and chunk of the same lane for blocks that start `column` columns further right, a multiple of 8.
FASTATTN_DEVICE LdmatrixLane at_column(LdmatrixLane lane, int column) {
    constexpr int kColumnsPerChunk = 8;
    return {lane.row, lane.chunk + column / kColumnsPerChunk};
}

template <DataType kDataType>
FASTATTN_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kDataType == DataType::kFloat16) {
        ptx::mma_m16n8k16_f32_f16(d, a, b0, b1);
    } else {
        ptx::mma_m16n8k16_f32_bf16(d, a, b0, b1);
    }
}

// Packs two neighbouring elements into one register, the first in the lower half. Rounds to nearest even.
template <DataType kDataType>
FASTATTN_DEVICE uint32_t pack(float first, float second) {
    return kDataType == DataType::kFloat16 ? ptx::cvt_rn_f16x2_f32(second, first)
                                           : ptx::cvt_rn_bf16x2_f32(second, first);
}

template <DataType kDataType>
FASTATTN_DEVICE float unpack(uint16_t bits) {
    return kDataType == DataType::kFloat16 ? ptx::cvt_f32_f16(bits) : __uint_as_float(uint32_t{bits} << 16);
}

// Returns element i (0 to 7) of a 16-byte chunk.
template <DataType kDataType>
FASTATTN_DEVICE float element_of(const uint4& chunk, int i) {
    const uint32_t pair = i < 2 ? chunk.x : i < 4 ? chunk.y : i < 6 ? chunk.z : chunk.w;
    return unpack<kDataType>(static_cast<uint16_t>(pair >> 16 * (i % 2)));
}

template <DataType kDataType>
FASTATTN_DEVICE uint32_t multiply(uint32_t pair, float factor) {
    return pack<kDataType>(unpack<kDataType>(static_cast<uint16_t>(pair)) * factor,
                           unpack<kDataType>(static_cast<uint16_t>(pair >> 16)) * factor);
}

// Makes operand A of the next product from the accumulators of two neighbouring m16n8 tiles. The accumulators' columns
// become A's k. No data moves between lanes, because a lane holds the same rows and columns in both layouts.
template <DataType kDataType>
FASTATTN_DEVICE void accumulators_to_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack<kDataType>(left[0], left[1]);
    a[1] = pack<kDataType>(left[2], left[3]);
    a[2] = pack<kDataType>(right[0], right[1]);
    a[3] = pack<kDataType>(right[2], right[3]);
}

template <int kTilesM, int kTilesN>
FASTATTN_DEVICE void set_zero(float (&rC)[kTilesM][kTilesN][4]) {
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) rC[m][n][e] = 0.0f;
        }
    }
}

}  // namespace fastattn
