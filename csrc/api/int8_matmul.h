// The native kernels behind fastattn::int8_matmul and fastattn::int8_matmul_grad_input; schemas are in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace fastattn {

using torch::stable::Tensor;

// Returns activation(x · dequantize(weight)ᵀ + bias) + residual: x [..., K] to [..., N], or with swiglu to
// [..., N / 2]. With int8_activations, rows of x are rounded to int8 first.
Tensor int8_matmul(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, std::optional<Tensor> residual,
                   std::string activation, bool int8_activations);

// Returns grad_out · dequantize(weight), [..., N] to [..., K], and the bias's gradient [N], empty without bias_grad.
std::tuple<Tensor, Tensor> int8_matmul_grad_input(Tensor grad_out, Tensor weight, Tensor scale, bool bias_grad);

}  // namespace fastattn
