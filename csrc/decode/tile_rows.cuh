// Where the rows of a tile go, four columns at a time: into the result, or as parts into the workspace.
#pragma once

#include <cstdint>

#include "decode/packed_rows.cuh"
#include "decode/split_plan.h"
#include "device/finish_row.cuh"
#include "device/part_slots.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

template <int kBlockM_, int kHeadDim_, DataType kDataType>
struct TileRows {
    static constexpr int kBlockM = kBlockM_, kValueDim = kHeadDim_, kLog2Nodes = kLog2MergedNodes;
    static constexpr int kQuadsAtOnce = 1;
    const DecodeParams& params;
    int32_t batch, kv_head, first_row;

    __device__ __forceinline__ int num_rows() const {
        return min(params.sequence.num_queries * params.group - first_row, kBlockM);
    }

    __device__ __forceinline__ int32_t slots_per_cta() const { return params.plan.slots_per_cta; }

    __device__ __forceinline__ int32_t value_dim() const { return params.v_cache.head_dim; }

    __device__ __forceinline__ PartSlots<kBlockM> slots() const { return {params.parts, value_dim()}; }

    // Of all of the tile's keys, with the sink.
    __device__ __forceinline__ void store_result(int row, int column, const RowPart& part) const {
        const QueryRow own(params, kv_head, first_row + row);
        const bool has_sink = params.scores.sinks != nullptr;
        const RowResult result = finish_row(part.max, part.sum, has_sink ? params.scores.sinks[own.head] : -kInfinity);
        if (column == 0) row_pointer(params.lse, batch, own.head)[own.query] = result.lse;
        if (column >= value_dim()) return;
        store_rounded<kDataType>(row_pointer(params.out, batch, own.head, own.query) + column, part.values,
                                 result.factor);
    }
};

}  // namespace fastattn
