// Stores the rows of a tile, four columns at a time: as the result, or as partials in the workspace.
#pragma once

#include <cstdint>

#include "decode/packed_rows.cuh"
#include "device/finish_row.cuh"
#include "device/tile_copy.cuh"
#include "scheduler/decode_splits.h"
#include "scheduler/workspace_slots.cuh"

namespace fastattn {

template <int kBlockM_, int kHeadDim_, DataType kDataType>
struct TileRows {
    static constexpr int kBlockM = kBlockM_, kValueDim = kHeadDim_, kLog2Nodes = log2_combined_nodes(kHeadDim_);
    static constexpr int kQuadsAtOnce = 1;
    const DecodeParams& params;
    int32_t batch, kv_head, first_row;

    FASTATTN_DEVICE int num_rows() const {
        return min(params.sequence.num_queries * params.group - first_row, kBlockM);
    }

    FASTATTN_DEVICE int32_t slots_per_cta() const { return params.schedule.slots_per_cta; }

    FASTATTN_DEVICE int32_t value_dim() const { return params.v_cache.head_dim; }

    FASTATTN_DEVICE WorkspaceSlots<kBlockM> slots() const { return {params.partials, value_dim()}; }

    // Normalises four columns of a row, counting the row's sink, and writes them and the row's lse to the result.
    FASTATTN_DEVICE void store_result(int row, int column, const RowPartial& partial) const {
        const QueryRow own(params, kv_head, first_row + row);
        const bool has_sink = params.scores.sinks != nullptr;
        const RowResult result =
            finish_row(partial.max, partial.sum, has_sink ? params.scores.sinks[own.head] : -kInfinity);
        if (column == 0) row_pointer(params.lse, batch, own.head)[own.query] = result.lse;
        if (column >= value_dim()) return;
        store_rounded<kDataType>(row_pointer(params.out, batch, own.head, own.query) + column, partial.values,
                                 result.factor);
    }
};

}  // namespace fastattn
