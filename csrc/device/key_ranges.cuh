// Reads the ranges of keys that each query row sees from device memory, and turns them into bit masks of a lane's
// accumulators.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"

namespace fastattn {

// The ranges of all query rows of one sequence, in one head.
struct RowRanges {
    const int2* first;      // row 0's first range
    int32_t num, num_rows;  // num: how many ranges each row has

    FASTATTN_DEVICE RowRanges(const KeyRangesView& view, int32_t batch, int32_t head, const Sequence& rows)
        : first(reinterpret_cast<const int2*>(view.data) + batch * view.batch_stride + head * view.head_stride +
                int64_t{rows.begin} * view.num),
          num(view.num),
          num_rows(rows.length) {}

    FASTATTN_DEVICE const int2* of(int32_t row) const { return first + int64_t{row} * num; }

    FASTATTN_DEVICE KeyRange range(int32_t row, int32_t idx) const {
        const int2 bounds = of(row)[idx];
        return {max(bounds.x, 0), max(bounds.y, 0)};  // so that no difference of two keys overflows
    }

    FASTATTN_DEVICE bool sees(int32_t row, int32_t key) const {
        bool is_seen = false;
        for (int32_t i = 0; row < num_rows && i < num; ++i) is_seen |= range(row, i).has(key);
        return is_seen;
    }

    // Returns a bit mask, as own_columns_of() does, of the keys that a row sees through its ranges and `window`.
    FASTATTN_DEVICE uint32_t own_columns(int32_t row, const KeyRange& window, int32_t first_key, int lane) const {
        // Opaque, because values computed from the lane would otherwise stay in registers during the caller's loop.
        const int own_lane = ptx::opaque(lane);
        uint32_t columns = 0;
#pragma unroll 1
        for (int32_t i = 0; row < num_rows && i < num; ++i) {
            const int2 bounds = of(row)[i];
            const KeyRange keys{max(bounds.x, window.begin), max(min(bounds.y, window.end), 0)};
            columns |= own_columns_of(keys, first_key, own_lane);
        }
        return columns;
    }
};

// Transposes 32 x 32 bits: bit i of lane k becomes bit k of lane i. Each round exchanges blocks of half the size of the
// round before. Called by all lanes of a warp.
FASTATTN_DEVICE uint32_t transpose_bits(uint32_t bits, int lane) {
#pragma unroll
    for (int size = kWarpSize / 2; size > 0; size /= 2) {
        const uint32_t lower = 0xffffffff / ((1u << size) + 1);  // the lower half of each block
        const uint32_t other = __shfl_xor_sync(0xffffffff, bits, size);
        bits =
            (lane & size) == 0 ? (bits & lower) | (other & lower) << size : (bits & ~lower) | (other >> size & lower);
    }
    return bits;
}

// For transposed scores, whose rows are keys: returns which of 64 query rows see a lane's two keys through their
// ranges. Bits 0 to 15 belong to the lane's upper key, bits 16 to 31 to its lower key, in the order of SeenRows
// (device/transposed_scores.cuh). Each lane reads the ranges of two rows, and the lanes exchange the bits. ranges, num:
// the first of the rows' ranges, and how many each row has. num_rows: how many of the 64 rows exist. first_key: the
// warp's first key. Called by all lanes of a warp.
FASTATTN_DEVICE uint32_t seen_of_transposed(const int2* ranges, int32_t num, int32_t num_rows, int32_t first_key,
                                            int lane) {
    const auto keys_from = [&](int32_t key) {
        return __funnelshift_lc(0, 0xffffffff, max(max(key, 0) - first_key, 0));
    };
    uint32_t bits = 0;  // of 16 keys for each of the two rows
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // The lane's row is chosen such that the transposed bits have the order of SeenRows.
        const int32_t row = lane % 16 / 2 * kMmaN + 2 * (2 * half + lane / 16) + lane % 2;
        uint32_t keys = 0;
#pragma unroll 1
        for (int32_t i = 0; row < num_rows && i < num; ++i) {
            const int2 bounds = ranges[row * num + i];
            keys |= keys_from(bounds.x) & ~keys_from(bounds.y);
        }
        bits |= (keys & 0xffff) << 16 * half;
    }
    bits = transpose_bits(bits, lane);
    const int column = lane % kLanesPerRow, source = column / 2 * 16 + accumulator_row(lane), shift = column % 2 * 16;
    const uint32_t upper = __shfl_sync(0xffffffff, bits, source), lower = __shfl_sync(0xffffffff, bits, source + 8);
    return (upper >> shift & 0xffff) | lower >> shift << 16;
}

}  // namespace fastattn
