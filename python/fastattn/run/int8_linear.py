"""The int8 linear layer as the choice says: in one kernel, or where gradients are wanted, partly by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattn import ops
from fastattn.activations import ACTIVATIONS
from fastattn.dispatch.call import Choice
from fastattn.ops.int8_matmul import Int8MatmulArguments


def int8_linear(choice: Choice, arguments: Int8MatmulArguments) -> Tensor:
    """``act(x @ dequantize(weight)^T + bias) + residual``, differentiable in x, bias and residual.

    Where gradients are wanted, the activation and the residual are PyTorch's, over the kernel's product.
    """
    x, weight, scale, bias, residual, activation, int8_activations = arguments
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, bias, residual)):
        y = ops.int8_matmul.differentiable_int8_product(choice.backend, x, weight, scale, bias, int8_activations)
        y = ACTIVATIONS[activation](y)
        return y if residual is None else y + residual
    return ops.int8_matmul.int8_matmul(choice.backend, arguments)
