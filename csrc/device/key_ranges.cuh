// Ranges of keys: those that each query row sees, in device memory, and as a mask on accumulators of S = Q·Kᵀ.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "device/ptx/opaque.cuh"
#include "device/sequence.cuh"
#include "device/softmax.cuh"

namespace fastattn {

// The ranges of one head's rows of a sequence.
struct RowRanges {
    const int2* first;  // of row 0
    int32_t num, num_rows;

    FASTATTN_DEVICE RowRanges(const KeyRangesView& view, int32_t batch, int32_t head, const Sequence& rows)
        : first(reinterpret_cast<const int2*>(view.data) + batch * view.batch_stride + head * view.head_stride +
                int64_t{rows.begin} * view.num),
          num(view.num),
          num_rows(rows.length) {}

    FASTATTN_DEVICE KeyRange range(int32_t row, int32_t idx) const {
        const int2 bounds = first[int64_t{row} * num + idx];
        return {max(bounds.x, 0), max(bounds.y, 0)};  // no difference of places overflows then
    }

    FASTATTN_DEVICE bool sees(int32_t row, int32_t key) const {
        bool is_seen = false;
        for (int32_t i = 0; row < num_rows && i < num; ++i) is_seen |= range(row, i).has(key);
        return is_seen;
    }

    // Hides, of a warp's rows from first_row on, the keys outside of their ranges: their scores become -inf.
    template <int kTilesM, int kTilesN>
    FASTATTN_DEVICE void hide_others(float (&rS)[kTilesM][kTilesN][4], int32_t first_row, int32_t first_key,
                                     int lane) const {
        static_assert(2 * kTilesN <= 32, "one register holds the bits of a row");
        for_own_rows<kTilesM>(lane, [&](int m, int half, int row_in_tile) {
            uint64_t seen = 0;
            const int32_t row = first_row + row_in_tile;
#pragma unroll 1
            for (int32_t i = 0; row < num_rows && i < num; ++i) {
                const KeyRange keys = range(row, i);
                const uint64_t before_end = (uint64_t{1} << own_columns_before(keys.end, first_key, lane)) - 1;
                const uint64_t before_begin = (uint64_t{1} << own_columns_before(keys.begin, first_key, lane)) - 1;
                seen |= before_end & ~before_begin;
            }
            // Opaque, so that the compiler has all bits in one register, from which it sets seven predicates at a time.
            const uint32_t bits = ptx::opaque(static_cast<int32_t>(seen));
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
};

}  // namespace fastattn
