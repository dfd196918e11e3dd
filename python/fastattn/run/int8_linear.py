"""The int8 linear layer as the choice says: in one kernel, or where gradients are wanted, partly by PyTorch."""

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
    """``act(x @ dequantize(weight)^T + bias) + residual``; with ``needs_grad`` differentiable in x, bias and residual.

    Then the activation and the residual are PyTorch's, over the kernel's product.
    """
    if not needs_grad:
        return int8_matmul(choice.backend, arguments)
    y = ACTIVATIONS[arguments.activation](differentiable_int8_product(choice.backend, arguments))
    return y if arguments.residual is None else y + arguments.residual


def int8_grad_input(choice: Choice, arguments: GradInputArguments) -> Tensor:
    """``grad_out @ dequantize(weight)``, where somebody else differentiates: a tensor subclass, a DTensor."""
    grad_input, _ = int8_matmul_grad_input(choice.backend, arguments)
    return grad_input
