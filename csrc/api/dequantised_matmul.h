// Matmuls of dequantised weights, by PyTorch's own kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "int8_matmul/int8_matmul.h"

namespace fastattn {

// out = input · Wᵀ or, where not is_transposed, input · W. Blocks of W that fit into 64 MB are dequantised one after
// the other, rounded to the dtype, and multiplied; each makes some columns of `out`.
void multiply_dequantised(const Int8WeightView& weight, DataType dtype, const torch::stable::Tensor& input,
                          torch::stable::Tensor out, bool is_transposed, Stream stream);

}  // namespace fastattn
