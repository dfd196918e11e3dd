// Where the rows of a tile go, four columns at a time: into the result, or as parts into the workspace and back.
#pragma once

#include <cstdint>

#include "decode/finish_row.cuh"
#include "decode/packed_rows.cuh"
#include "device/tile_copy.cuh"

namespace fastattn {

template <int kBlockM, DataType kDataType>
struct TileRows {
    const DecodeParams& params;
    int32_t batch, kv_head, first_row;

    __device__ __forceinline__ int num_rows() const {
        return min(params.sequence.num_queries * params.group - first_row, kBlockM);
    }

    __device__ __forceinline__ int32_t value_dim() const { return params.v_cache.head_dim; }

    // What other CTAs have written stands in L2.
    __device__ __forceinline__ float2 load_sums(int64_t slot, int row) const {
        return __ldcg(reinterpret_cast<const float2*>(params.partial_sums) + slot * kBlockM + row);
    }

    __device__ __forceinline__ float4 load_values(int64_t slot, int row, int column) const {
        if (column >= value_dim()) return {0.0f, 0.0f, 0.0f, 0.0f};
        const int64_t element = (slot * kBlockM + row) * value_dim() + column;
        return __ldcg(reinterpret_cast<const float4*>(params.partial_out + element));
    }

    __device__ __forceinline__ RowPart load(int64_t slot, int row, int column) const {
        const float2 sums = load_sums(slot, row);
        return {sums.x, sums.y, load_values(slot, row, column)};
    }

    __device__ __forceinline__ void store(int64_t slot, int row, int column, const RowPart& part) const {
        const int64_t slot_row = slot * kBlockM + row;
        if (column == 0) reinterpret_cast<float2*>(params.partial_sums)[slot_row] = {part.max, part.sum};
        if (column >= value_dim()) return;
        *reinterpret_cast<float4*>(params.partial_out + slot_row * value_dim() + column) = part.values;
    }

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
