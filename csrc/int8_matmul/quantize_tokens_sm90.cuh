// Quantises tokens to int8 in a separate kernel, for a matmul that follows in the same stream and copies the tokens by
// TMA. The matmul begins, and loads its first weights, while this kernel runs. So this launch must not be dependent
// itself: all launches before it, which may have written the weights, have ended. The results are those of
// quantize_tokens.cuh. If there are few tokens, a CTA quantises one; if there are many, each warp of a CTA quantises
// one. Preconditions: those of MatrixView; K a multiple of 8.
#pragma once

#include <cstdint>

#include "device/ptx/griddepcontrol.cuh"
#include "host/launch.h"
#include "int8_matmul/quantize_tokens.cuh"

namespace fastattn {

inline constexpr int kQuantizeThreads = 128;

template <DataType kDataType>
__global__ void __launch_bounds__(kQuantizeThreads)
    int8_matmul_quantize_tokens_sm90(const __grid_constant__ Int8MatmulParams params) {
    __shared__ QuantizeStorage<kQuantizeThreads> shared;
    ptx::griddepcontrol_launch_dependents();
    const int32_t at_a_time = tokens_at_a_time<kQuantizeThreads>(params.input.rows);
    quantize_some<kDataType>(params.input, params.quantized, int64_t{blockIdx.x} * at_a_time, at_a_time, shared);
}

template <DataType kDataType>
void launch_int8_matmul_quantize_tokens_sm90(LaunchedKernel& kernel, const Int8MatmulParams& params, Stream stream) {
    const Launch launch{ceil_div(params.input.rows, tokens_at_a_time<kQuantizeThreads>(params.input.rows)),
                        kQuantizeThreads, 0};
    kernel.launch(int8_matmul_quantize_tokens_sm90<kDataType>, launch, params, stream);
}

}  // namespace fastattn
