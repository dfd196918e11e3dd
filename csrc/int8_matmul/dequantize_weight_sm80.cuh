// Converts a block of int8 weights to 16-bit floats, scale * int8, each rounded once, for a matmul by cuBLAS.
//
// Each thread converts 16 adjacent weights of a row, which share a scale. It loads 16 bytes and stores 32, so that a
// warp reads and writes whole sectors. The kernel is bound by memory. Preconditions: those of Int8WeightView; the
// block's first column is a multiple of 16.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "host/launch.h"
#include "int8_matmul/int8_matmul.h"

namespace fastattn {

inline constexpr int kDequantizeThreads = 256;
inline constexpr int kWeightsOfThread = 16;

template <DataType kDataType>
__global__ void __launch_bounds__(kDequantizeThreads)
    int8_dequantize_weight_sm80(const __grid_constant__ DequantizeWeightParams params) {
    const Int8WeightView& weight = params.weight;
    const int32_t chunks_per_row = ceil_div(params.columns, kWeightsOfThread);
    const int64_t chunk = int64_t{blockIdx.x} * kDequantizeThreads + threadIdx.x;
    const int64_t row_of_block = chunk / chunks_per_row;
    if (row_of_block >= params.rows) return;
    const int32_t column_of_block = static_cast<int32_t>(chunk % chunks_per_row) * kWeightsOfThread;
    const int64_t row = params.first_row + row_of_block;
    const int32_t column = params.first_column + column_of_block;
    const int count = min(kWeightsOfThread, params.columns - column_of_block);
    const float scale =
        weight.scale[row * weight.scale_row_stride + (column / Int8WeightView::kSmallestGroup >> weight.group_shift)];

    alignas(16) int8_t numbers[kWeightsOfThread] = {};
    const int8_t* from = weight.data + row * weight.row_stride + column;
    if (count == kWeightsOfThread) {
        *reinterpret_cast<uint4*>(numbers) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
        for (int i = 0; i < kWeightsOfThread; ++i) {
            if (i < count) numbers[i] = from[i];
        }
    }
    uint32_t pairs[kWeightsOfThread / 2];
#pragma unroll
    for (int i = 0; i < kWeightsOfThread / 2; ++i) {
        pairs[i] = pack<kDataType>(numbers[2 * i] * scale, numbers[2 * i + 1] * scale);
    }
    auto* to = reinterpret_cast<uint4*>(params.out + row_of_block * params.out_stride + column_of_block);
    to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

template <DataType kDataType>
void launch_int8_dequantize_weight_sm80(LaunchedKernel& kernel, const DequantizeWeightParams& params, Stream stream) {
    const int64_t chunks = int64_t{params.rows} * ceil_div(params.columns, kWeightsOfThread);
    const Launch launch{ceil_div(chunks, kDequantizeThreads), kDequantizeThreads, 0};
    kernel.launch(int8_dequantize_weight_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
