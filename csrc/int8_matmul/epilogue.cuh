// From the sums of a matmul to its result: scale → bias → activation → residual, and the one rounding.
#pragma once

#include <cstdint>

#include "device/arrivals.cuh"
#include "device/fragment.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/work.h"

namespace fastattn {

// A CTA's tile of sums [tokens, kColumns] in shared memory: accumulators are stored, and rows are loaded 16 bytes a
// thread, without bank conflicts.
template <int kColumns>
struct SumsLayout {
    static constexpr int kRowElements = kColumns + 4;
    static_assert(kRowElements % 16 == 4, "tokens 0, 2, 4, 6, of the lanes of a quad, must lie 8 banks apart");
};

template <typename Function>
__device__ __forceinline__ void for_each_value(float (&values)[kEpilogueColumns], Function&& function) {
#pragma unroll
    for (int e = 0; e < kEpilogueColumns; ++e) values[e] = function(values[e]);
}

// NaN stays NaN.
__device__ __forceinline__ void activate(Activation activation, float (&values)[kEpilogueColumns]) {
    constexpr float kSqrtHalf = 0.707106781186547524f, kSqrt2OverPi = 0.797884560802865356f;
    switch (activation) {
        case Activation::kNone:
            break;
        case Activation::kRelu:
            for_each_value(values, [](float x) { return x < 0.0f ? 0.0f : x; });
            break;
        case Activation::kGelu:
            for_each_value(values, [](float x) { return 0.5f * x * (1.0f + erff(x * kSqrtHalf)); });
            break;
        case Activation::kGeluTanh:
            for_each_value(
                values, [](float x) { return 0.5f * x * (1.0f + tanhf((x + 0.044715f * x * x * x) * kSqrt2OverPi)); });
            break;
        case Activation::kSilu:
        case Activation::kSwiglu:  // of the gates
            for_each_value(values, [](float x) { return x / (1.0f + expf(-x)); });
            break;
    }
}

// Whether all elements of a chunk exist, of which `count` do, and can be read or written at once. In a result whose
// width is not a multiple of 4, few rows are aligned.
__device__ __forceinline__ bool is_whole_vector(const uint16_t* elements, int count) {
    return count == kEpilogueColumns && reinterpret_cast<uintptr_t>(elements) % sizeof(uint2) == 0;
}

// Adds the elements, of which `count` exist.
template <DataType kDataType>
__device__ __forceinline__ void add_elements(float (&values)[kEpilogueColumns], const uint16_t* elements, int count) {
    if (is_whole_vector(elements, count)) {
        const uint2 bits = *reinterpret_cast<const uint2*>(elements);
        values[0] += unpack<kDataType>(static_cast<uint16_t>(bits.x));
        values[1] += unpack<kDataType>(static_cast<uint16_t>(bits.x >> 16));
        values[2] += unpack<kDataType>(static_cast<uint16_t>(bits.y));
        values[3] += unpack<kDataType>(static_cast<uint16_t>(bits.y >> 16));
        return;
    }
#pragma unroll
    for (int e = 0; e < kEpilogueColumns; ++e) {
        if (e < count) values[e] += unpack<kDataType>(elements[e]);
    }
}

template <DataType kDataType>
__device__ __forceinline__ void store_elements(uint16_t* elements, const float (&values)[kEpilogueColumns], int count) {
    const uint2 bits = {pack<kDataType>(values[0], values[1]), pack<kDataType>(values[2], values[3])};
    if (is_whole_vector(elements, count)) {
        *reinterpret_cast<uint2*>(elements) = bits;
        return;
    }
#pragma unroll
    for (int e = 0; e < kEpilogueColumns; ++e) {
        if (e < count) elements[e] = static_cast<uint16_t>((e < 2 ? bits.x : bits.y) >> e % 2 * 16);
    }
}

// Sums of a thread: of four neighbouring elements of the result or, of SwiGLU, of their gates; and then also of the ups.
struct ChunkSums {
    float4 first, up;
};

// scale * sum + bias of four neighbouring columns of sums, of which `column` is the first and `count` exist.
template <DataType kDataType>
__device__ __forceinline__ void scale_and_add_bias(const MatmulEpilogue& epilogue, float (&values)[kEpilogueColumns],
                                                   const float4& sums, int32_t column, int count) {
    values[0] = sums.x, values[1] = sums.y, values[2] = sums.z, values[3] = sums.w;
    if (epilogue.scale != nullptr) {
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) {
            if (e < count) values[e] *= epilogue.scale[(column + e) * epilogue.scale_stride];
        }
    }
    if (epilogue.bias != nullptr) add_elements<kDataType>(values, epilogue.bias + column, count);
}

// Four neighbouring elements of the result, of which `column` is the first, as far as they exist.
template <DataType kDataType>
__device__ __forceinline__ void finish(const MatmulEpilogue& epilogue, const ChunkSums& sums, int64_t row,
                                       int32_t column) {
    const int count = min(kEpilogueColumns, epilogue.out.columns - column);
    float values[kEpilogueColumns];
    scale_and_add_bias<kDataType>(epilogue, values, sums.first, column, count);
    activate(epilogue.activation, values);
    if (epilogue.is_gated()) {
        float up[kEpilogueColumns];
        scale_and_add_bias<kDataType>(epilogue, up, sums.up, column + epilogue.out.columns, count);
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) values[e] *= up[e];
    }
    if (epilogue.residual.data != nullptr) {
        add_elements<kDataType>(values, epilogue.residual.data + row * epilogue.residual.row_stride + column, count);
    }
    store_elements<kDataType>(epilogue.out.data + row * epilogue.out.row_stride + column, values, count);
}

// Calls function(sums, row, column) for the chunks of a tile that a thread finishes, as far as they are in the result.
// Of SwiGLU, the left half of the tile's columns are gates, and the right half the ups of the same elements.
template <int kRows, int kColumns, int kThreads, typename Function>
__device__ __forceinline__ void for_own_chunks(const MatmulEpilogue& epilogue, const float* sSums,
                                               const MatmulWork& work, Function&& function) {
    constexpr int kMaxChunks = kColumns / kEpilogueColumns;
    static_assert(kThreads % kMaxChunks == 0, "a pass must take whole rows");
    const int columns = epilogue.result_columns(kColumns), chunks_per_row = columns / kEpilogueColumns;
    const int tile_column = threadIdx.x % chunks_per_row * kEpilogueColumns;
    const int32_t first_row = work.token_tile * kRows, column = work.output_tile * columns + tile_column;
    if (column >= epilogue.out.columns) return;
    const int rows_here = min(kRows, epilogue.out.rows - first_row);
#pragma unroll 1
    for (int row = threadIdx.x / chunks_per_row; row < rows_here; row += kThreads / chunks_per_row) {
        const float* sums = sSums + row * SumsLayout<kColumns>::kRowElements + tile_column;
        ChunkSums chunk{*reinterpret_cast<const float4*>(sums), {}};
        if (epilogue.is_gated()) chunk.up = *reinterpret_cast<const float4*>(sums + columns);
        function(chunk, int64_t{first_row} + row, column);
    }
}

// Adds up what all splits have left at one place of `partial`, in their order, so that bits repeat.
__device__ __forceinline__ float4 total(const float* partial, int64_t part_elements, int32_t num_splits) {
    float4 sums = __ldcg(reinterpret_cast<const float4*>(partial));
    for (int split = 1; split < num_splits; ++split) {
        const float4 more = __ldcg(reinterpret_cast<const float4*>(partial + split * part_elements));
        sums = {sums.x + more.x, sums.y + more.y, sums.z + more.z, sums.w + more.w};
    }
    return sums;
}

// A CTA's tile of sums into the result. Of the CTAs that share a tile, the last to come adds up what all have left in
// `partial`; it alone gets true.
template <DataType kDataType, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ bool finish_tile(const MatmulEpilogue& epilogue, const float* sSums,
                                            const MatmulWork& work) {
    const auto for_chunks = [&](auto&& function) {
        for_own_chunks<kRows, kColumns, kThreads>(epilogue, sSums, work, function);
    };
    if (epilogue.num_splits == 1) {
        for_chunks([&](const ChunkSums& sums, int64_t row, int32_t column) {
            finish<kDataType>(epilogue, sums, row, column);
        });
        return true;
    }
    const int64_t row_elements = epilogue.partial_columns(), part_elements = epilogue.out.rows * row_elements;
    for_chunks([&](const ChunkSums& sums, int64_t row, int32_t column) {
        float* part = epilogue.partial + work.split * part_elements + row * row_elements + column;
        *reinterpret_cast<float4*>(part) = sums.first;
        if (epilogue.is_gated()) *reinterpret_cast<float4*>(part + row_elements / 2) = sums.up;
    });
    __syncthreads();  // all of this part is there
    const bool is_last =
        threadIdx.x == 0 && arrives_last(epilogue.arrivals + work.tile, epilogue.token, epilogue.num_splits);
    if (!__syncthreads_or(is_last)) return false;
    for_chunks([&](const ChunkSums&, int64_t row, int32_t column) {
        const float* part = epilogue.partial + row * row_elements + column;
        ChunkSums sums{total(part, part_elements, epilogue.num_splits), {}};
        if (epilogue.is_gated()) {
            sums.up = total(part + row_elements / 2, part_elements, epilogue.num_splits);
        }
        finish<kDataType>(epilogue, sums, row, column);
    });
    return true;
}

}  // namespace fastattn
