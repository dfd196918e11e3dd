// Multiplies by dequantised weights with PyTorch's own kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "int8_matmul/int8_matmul.h"

namespace fastattn {

// Computes out = input · Wᵀ if is_transposed, else input · W. Dequantises W block by block, at most 64 MB of 16-bit
// floats at a time. Each block gives some columns of `out`.
void multiply_dequantised(const Int8WeightView& weight, DataType dtype, const torch::stable::Tensor& input,
                          torch::stable::Tensor out, bool is_transposed, Stream stream);

}  // namespace fastattn
