"""Runs the int8 linear layer as the choice says: in one kernel, or with gradients partly in PyTorch."""

from __future__ import annotations

from torch import Tensor

from fastattn.activations import ACTIVATIONS
from fastattn.dispatch.call import Choice
from fastattn.ops.int8_matmul import (
    GradInputArguments,
    Int8MatmulArguments,
    differentiable_int8_product,
    int8_matmul,
    int8_matmul_grad_input,
)


def int8_linear(choice: Choice, arguments: Int8MatmulArguments, needs_grad: bool) -> Tensor:
    """Returns ``activation(x @ dequantize(weight)^T + bias) + residual``.

    With ``needs_grad`` it is differentiable in x, bias and residual: PyTorch then applies the activation and the
    residual to the kernel's product.
    """
    if not needs_grad:
        return int8_matmul(choice.backend, arguments)
    y = ACTIVATIONS[arguments.activation](differentiable_int8_product(choice.backend, arguments))
    return y if arguments.residual is None else y + arguments.residual


def int8_grad_input(choice: Choice, arguments: GradInputArguments) -> Tensor:
    """Returns ``grad_out @ dequantize(weight)`` for a caller that differentiates: a tensor subclass, a DTensor."""
    grad_input, _ = int8_matmul_grad_input(choice.backend, arguments)
    return grad_input
