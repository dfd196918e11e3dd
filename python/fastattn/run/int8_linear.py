"""Runs ``int8_linear`` on the chosen backend: in one kernel, or with gradients partly in PyTorch."""

from __future__ import annotations

from torch import Tensor

from fastattn.activations import ACTIVATIONS
from fastattn.call import Int8Call
from fastattn.dispatch.request import Choice
from fastattn.ops.int8_matmul import differentiable_int8_product, int8_matmul


def int8_linear(choice: Choice, call: Int8Call, needs_grad: bool) -> Tensor:
    """Computes ``activation(x @ dequantize(weight)^T + bias) + residual`` of a checked call.

    With ``needs_grad`` it is differentiable in x, bias and residual: PyTorch then applies the activation and the
    residual to the kernel's product.
    """
    if not needs_grad:
        return int8_matmul(choice.backend, call)
    assert call.activation is not None
    y = ACTIVATIONS[call.activation](differentiable_int8_product(choice.backend, call))
    return y if call.residual is None else y + call.residual
