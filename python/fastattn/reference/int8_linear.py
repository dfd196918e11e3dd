"""Computes a linear layer over int8 weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.activations import ACTIVATIONS
from fastattn.quantization import dequantize_int8, quantize_rows


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    input_precision: str = "16bit",
    compute_dtype: torch.dtype | None = None,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns ``activation(x @ dequantize(weight)^T + bias) + residual``: ``[..., N]`` for ``x [..., K]``, or with
    ``"swiglu"`` ``[..., N / 2]``.

    ``input_precision="int8"`` first rounds each row of ``x`` to symmetric int8 (the gradient ignores the rounding).
    ``product(x, weight, scale)``, if given, computes the matmul with the dequantised weight.
    """
    dtype = compute_dtype or torch.promote_types(x.dtype, torch.float32)
    inputs = x.to(dtype)
    if input_precision == "int8":
        quantized, row_scale = quantize_rows(x)
        rounded = (quantized.to(row_scale.dtype) * row_scale[..., None]).to(dtype)
        inputs = inputs + (rounded - inputs).detach()
    y = product(inputs, weight, scale) if product else inputs @ dequantize_int8(weight, scale, dtype).transpose(0, 1)
    if bias is not None:
        y = y + bias.to(dtype)
    y = ACTIVATIONS[activation](y)
    if residual is not None:
        y = y + residual.to(dtype)
    return y.to(x.dtype)
