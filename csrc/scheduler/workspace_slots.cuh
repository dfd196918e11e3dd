// Loads and stores workspace slots, in which CTAs leave partials for each other, four columns of a row at a time.
// slot_of() in scheduler/partial_tree.h says which slot holds which node of a tree.
#pragma once

#include <cstdint>

#include "device/finish_row.cuh"
#include "host/params.h"

namespace fastattn {

// Slots of kBlockM rows. value_dim is a multiple of 4.
template <int kBlockM>
struct WorkspaceSlots {
    const PartialWorkspace& workspace;
    int32_t value_dim;

    // Loads from L2, past L1, because other CTAs wrote the sums.
    FASTATTN_DEVICE float2 load_sums(int64_t slot, int row) const {
        return __ldcg(reinterpret_cast<const float2*>(workspace.sums) + slot * kBlockM + row);
    }

    FASTATTN_DEVICE float4 load_values(int64_t slot, int row, int column) const {
        if (column >= value_dim) return {0.0f, 0.0f, 0.0f, 0.0f};
        return __ldcg(reinterpret_cast<const float4*>(values_of(slot, row) + column));
    }

    FASTATTN_DEVICE RowPartial load(int64_t slot, int row, int column) const {
        const float2 sums = load_sums(slot, row);
        return {sums.x, sums.y, load_values(slot, row, column)};
    }

    FASTATTN_DEVICE void store_sums(int64_t slot, int row, float max, float sum) const {
        reinterpret_cast<float2*>(workspace.sums)[slot * kBlockM + row] = {max, sum};
    }

    FASTATTN_DEVICE void store(int64_t slot, int row, int column, const RowPartial& partial) const {
        if (column == 0) store_sums(slot, row, partial.max, partial.sum);
        if (column < value_dim) *reinterpret_cast<float4*>(values_of(slot, row) + column) = partial.values;
    }

    FASTATTN_DEVICE float* values_of(int64_t slot, int row) const {
        return workspace.values + (slot * kBlockM + row) * value_dim;
    }
};

}  // namespace fastattn
