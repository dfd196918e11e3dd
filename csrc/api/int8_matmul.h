// The native kernels behind fastattn::int8_matmul and fastattn::int8_matmul_grad_input; schemas are in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace fastattn {

using torch::stable::Tensor;

// Returns activation(x · dequantize(weight)ᵀ + bias) + residual, [..., N] for x [..., K], or [..., N / 2] with swiglu.
// With int8_activations, each row of x is quantised to int8 first.
Tensor int8_matmul(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, std::optional<Tensor> residual,
                   std::string activation, bool int8_activations);

// Returns the gradient of x, grad_out · dequantize(weight), [..., K] for grad_out [..., N]; and that of the bias, [N],
// or [0] unless bias_grad.
std::tuple<Tensor, Tensor> int8_matmul_grad_input(Tensor grad_out, Tensor weight, Tensor scale, bool bias_grad);

}  // namespace fastattn
