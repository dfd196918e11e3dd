// The native kernels behind fastattn::int8_matmul and fastattn::int8_matmul_grad_input; schemas are in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace fastattn {

using torch::stable::Tensor;

// activation(x · dequantize(weight)ᵀ + bias) + residual: x [..., K] to [..., N].
Tensor int8_matmul(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, std::optional<Tensor> residual,
                   std::string activation);

// grad_out · dequantize(weight): [..., N] to [..., K].
Tensor int8_matmul_grad_input(Tensor grad_out, Tensor weight, Tensor scale);

}  // namespace fastattn
