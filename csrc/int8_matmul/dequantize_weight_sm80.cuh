// Converts a block of int8 weights to 16-bit floats, scale * int8, each rounded once, for a matmul by cuBLAS.
//
// Each thread converts 8 adjacent weights of a row, which share a scale. It loads 8 bytes and stores 16, so that each
// load and each store of a warp has whole sectors. The kernel is bound by memory. Preconditions: those of
// Int8WeightView; the block's first column and out_stride are multiples of 16, and the block has fewer than 2^35
// weights.
#pragma once

#include <cstdint>

#include "device/fragment.cuh"
#include "host/launch.h"
#include "int8_matmul/int8_matmul.h"

namespace fastattn {

inline constexpr int kDequantizeThreads = 256;
inline constexpr int kWeightsOfThread = 8;

template <DataType kDataType>
__global__ void __launch_bounds__(kDequantizeThreads)
    int8_dequantize_weight_sm80(const __grid_constant__ DequantizeWeightParams params) {
    const Int8WeightView& weight = params.weight;
    const uint32_t thread = blockIdx.x * kDequantizeThreads + threadIdx.x;
    const auto per_row = static_cast<uint32_t>(params.out_stride) / kWeightsOfThread;
    const int64_t row_of_block = thread / per_row;
    if (row_of_block >= params.rows) return;
    const int32_t column_of_block = static_cast<int32_t>(thread % per_row) * kWeightsOfThread;
    const int64_t row = params.first_row + row_of_block;
    const int32_t column = params.first_column + column_of_block;
    const int count = min(kWeightsOfThread, params.columns - column_of_block);
    const float scale =
        weight.scale[row * weight.scale_row_stride + (column / Int8WeightView::kSmallestGroup >> weight.group_shift)];

    alignas(8) int8_t numbers[kWeightsOfThread] = {};
    const int8_t* from = weight.data + row * weight.row_stride + column;
    if (count == kWeightsOfThread) {
        *reinterpret_cast<uint2*>(numbers) = *reinterpret_cast<const uint2*>(from);
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
    *reinterpret_cast<uint4*>(params.out + row_of_block * params.out_stride + column_of_block) = {pairs[0], pairs[1],
                                                                                                  pairs[2], pairs[3]};
}

template <DataType kDataType>
void launch_int8_dequantize_weight_sm80(LaunchedKernel& kernel, const DequantizeWeightParams& params, Stream stream) {
    const int64_t threads = params.rows * params.out_stride / kWeightsOfThread;
    const Launch launch{ceil_div(threads, kDequantizeThreads), kDequantizeThreads, 0};
    kernel.launch(int8_dequantize_weight_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
