// From the sums of a matmul to its result: scale → bias → activation → residual, and the one rounding.
#pragma once

#include <cstdint>

#include "device/arrivals.cuh"
#include "device/fragment.cuh"
#include "int8_matmul/int8_matmul.h"
#include "int8_matmul/work.h"

namespace fastattn {

inline constexpr int kEpilogueColumns = 4;  // that a thread finishes at once

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
            for_each_value(values, [](float x) { return x / (1.0f + expf(-x)); });
            break;
    }
}

template <DataType kDataType>
__device__ __forceinline__ void unpack_four(float (&values)[kEpilogueColumns], const uint16_t* four) {
    const uint2 bits = *reinterpret_cast<const uint2*>(four);
    values[0] = unpack<kDataType>(static_cast<uint16_t>(bits.x));
    values[1] = unpack<kDataType>(static_cast<uint16_t>(bits.x >> 16));
    values[2] = unpack<kDataType>(static_cast<uint16_t>(bits.y));
    values[3] = unpack<kDataType>(static_cast<uint16_t>(bits.y >> 16));
}

// Four neighbouring elements of the result, of which `column` is the first.
template <DataType kDataType>
__device__ __forceinline__ void finish(const MatmulEpilogue& epilogue, const float4& sums, int64_t row,
                                       int32_t column) {
    float values[kEpilogueColumns] = {sums.x, sums.y, sums.z, sums.w};
    float added[kEpilogueColumns];
    if (epilogue.scale != nullptr) {
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) values[e] *= epilogue.scale[(column + e) * epilogue.scale_stride];
    }
    if (epilogue.bias != nullptr) {
        unpack_four<kDataType>(added, epilogue.bias + column);
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) values[e] += added[e];
    }
    activate(epilogue.activation, values);
    if (epilogue.residual.data != nullptr) {
        unpack_four<kDataType>(added, epilogue.residual.data + row * epilogue.residual.row_stride + column);
#pragma unroll
        for (int e = 0; e < kEpilogueColumns; ++e) values[e] += added[e];
    }
    const uint2 bits = {pack<kDataType>(values[0], values[1]), pack<kDataType>(values[2], values[3])};
    *reinterpret_cast<uint2*>(epilogue.out.data + row * epilogue.out.row_stride + column) = bits;
}

// Calls function(sums, row, column) for the chunks of a tile that a thread finishes, as far as they are in the result.
// [first_row, first_column] is the tile's upper left element.
template <int kRows, int kColumns, int kThreads, typename Function>
__device__ __forceinline__ void for_own_chunks(const MatrixView<uint16_t>& out, const float* sSums, int32_t first_row,
                                               int32_t first_column, Function&& function) {
    constexpr int kChunksPerRow = kColumns / kEpilogueColumns, kRowsPerPass = kThreads / kChunksPerRow;
    static_assert(kRows % kRowsPerPass == 0, "passes must cover the tile exactly");
    const int tile_column = threadIdx.x % kChunksPerRow * kEpilogueColumns;
    if (first_column + tile_column >= out.columns) return;
#pragma unroll 1
    for (int tile_row = threadIdx.x / kChunksPerRow; tile_row < kRows; tile_row += kRowsPerPass) {
        if (tile_row >= out.rows - first_row) return;
        const float* sums = sSums + tile_row * SumsLayout<kColumns>::kRowElements + tile_column;
        function(*reinterpret_cast<const float4*>(sums), int64_t{first_row} + tile_row, first_column + tile_column);
    }
}

// A CTA's tile of sums into the result. Of the CTAs that share a tile, the last to come adds up what all have left in
// `partial`, in the order of the splits, so that bits repeat; it alone gets true.
template <DataType kDataType, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ bool finish_tile(const MatmulEpilogue& epilogue, const float* sSums,
                                            const MatmulWork& work) {
    const int32_t first_row = work.token_tile * kRows, first_column = work.output_tile * kColumns;
    const auto for_chunks = [&](auto&& function) {
        for_own_chunks<kRows, kColumns, kThreads>(epilogue.out, sSums, first_row, first_column, function);
    };
    if (epilogue.num_splits == 1) {
        for_chunks(
            [&](const float4& sums, int64_t row, int32_t column) { finish<kDataType>(epilogue, sums, row, column); });
        return true;
    }
    const int64_t part_elements = int64_t{epilogue.out.rows} * epilogue.out.columns;
    for_chunks([&](const float4& sums, int64_t row, int32_t column) {
        float* part = epilogue.partial + work.split * part_elements + row * epilogue.out.columns + column;
        *reinterpret_cast<float4*>(part) = sums;
    });
    __syncthreads();  // all of this part is there
    const bool is_last =
        threadIdx.x == 0 && arrives_last(epilogue.arrivals + work.tile, epilogue.token, epilogue.num_splits);
    if (!__syncthreads_or(is_last)) return false;
    for_chunks([&](const float4&, int64_t row, int32_t column) {
        const float* part = epilogue.partial + row * epilogue.out.columns + column;
        float4 sums = __ldcg(reinterpret_cast<const float4*>(part));
        for (int split = 1; split < epilogue.num_splits; ++split) {
            part += part_elements;
            const float4 more = __ldcg(reinterpret_cast<const float4*>(part));
            sums = {sums.x + more.x, sums.y + more.y, sums.z + more.z, sums.w + more.w};
        }
        finish<kDataType>(epilogue, sums, row, column);
    });
    return true;
}

}  // namespace fastattn
