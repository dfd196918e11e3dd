// The native kernels behind fastattn::int8_matmul and fastattn::int8_matmul_grad_input; schemas are in bindings.cpp.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace fastattn {

using torch::stable::Tensor;

// Returns activation(x · dequantize(weight)ᵀ + bias) + residual. Its shape is [..., N] for x [..., K] and int8 weight
// [N, K], or [..., N / 2] with swiglu. scale is fp32, [1 or N, 1], or [N, groups] for groups along K. With
// int8_activations, each row of x is quantised to int8 first.
Tensor int8_matmul(Tensor x, Tensor weight, Tensor scale, std::optional<Tensor> bias, std::optional<Tensor> residual,
                   std::string activation, bool int8_activations);

// Returns two gradients: of x, grad_out · dequantize(weight), with shape [..., K] for grad_out [..., N]; and of the
// bias, [N], or [0] unless bias_grad.
std::tuple<Tensor, Tensor> int8_matmul_grad_input(Tensor grad_out, Tensor weight, Tensor scale, bool bias_grad);

}  // namespace fastattn
