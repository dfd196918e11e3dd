// Adds up the parts of a matmul whose tiles several CTAs shared, in the order of the parts, so that bits repeat; then
// the epilogue. Each thread has four neighbouring elements of the result.
//
// A kernel of its own: where the last CTA of a tile does it, the counters that tell which is the last must be zeroed
// before, which costs a launch too, and the parts pass through L2 either way.
// Preconditions: those of MatmulEpilogue, and a number of columns that is a multiple of 4.
#pragma once

#include <string>

#include "host/host_device.h"
#include "host/launch.h"
#include "int8_matmul/epilogue.cuh"
#include "int8_matmul/int8_matmul.h"

namespace fastattn {

inline constexpr int kMergeThreads = 128;

template <DataType kDataType>
__global__ void __launch_bounds__(kMergeThreads) int8_matmul_merge_sm80(const __grid_constant__ MatmulEpilogue params) {
    const int32_t chunks_per_row = params.out.columns / kEpilogueColumns;
    const int64_t chunk = int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
    const int64_t row = chunk / chunks_per_row;
    const int32_t column = static_cast<int32_t>(chunk % chunks_per_row) * kEpilogueColumns;
    if (row >= params.out.rows) return;

    const int64_t part_elements = int64_t{params.out.rows} * params.out.columns;
    const float* gPart = params.partial + row * params.out.columns + column;
    float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int split = 0; split < params.num_splits; ++split) {
        const float4 part = *reinterpret_cast<const float4*>(gPart);
        sums = {sums.x + part.x, sums.y + part.y, sums.z + part.z, sums.w + part.w};
        gPart += part_elements;
    }
    finish<kDataType>(params, sums, row, column);
}

template <DataType kDataType>
void launch_int8_matmul_merge_sm80(const MatmulEpilogue& params, Stream stream) {
    static const std::string name = std::string("int8_matmul_merge_sm80<") + to_string(kDataType) + ">";
    const int64_t chunks = int64_t{params.out.rows} * (params.out.columns / kEpilogueColumns);
    const Launch launch{name.c_str(), /*compute_capability=*/80, (chunks + kMergeThreads - 1) / kMergeThreads,
                        kMergeThreads, /*shared_bytes=*/0};
    launch_kernel(int8_matmul_merge_sm80<kDataType>, launch, params, stream);
}

}  // namespace fastattn
