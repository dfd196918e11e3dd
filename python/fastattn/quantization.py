"""Symmetric int8: rounding to it, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with a scale per row: ``x [..., D]`` to int8 ``[..., D]`` and scales ``[...]``, 1 for zeros."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_ones(x.shape[:-1], dtype=dtype)
    scale = x.detach().to(dtype).abs().amax(-1) / 127
    scale = torch.where(scale == 0, 1.0, scale)  # of zeros, or so small that the division underflows
    return (x.to(dtype) / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


def quantize_int8(weight: Tensor, granularity: str | int = "channel") -> tuple[Tensor, Tensor]:
    """Symmetric int8, round to nearest even: ``weight [N, K]`` to int8 ``[N, K]`` and fp32 scales.

    Scales are ``[1, 1]`` for ``"tensor"``, ``[N, 1]`` for ``"channel"``, ``[N, K / group]`` for a group along K.
    """
    rows, columns = weight.shape
    if granularity == "tensor":
        quantized, scale = quantize_rows(weight.reshape(1, -1))
        return quantized.view(rows, columns), scale.to(torch.float32).view(1, 1)
    group = columns if granularity == "channel" else int(granularity)
    quantized, scale = quantize_rows(weight.reshape(rows, columns // group if group else 1, group))
    return quantized.view(rows, columns), scale.to(torch.float32)


def dequantize_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 ``[N, K]`` and its scales to ``[N, K]`` in ``dtype``."""
    compute = torch.promote_types(dtype, torch.float32)
    if weight.numel() == 0:
        return weight.to(dtype)
    rows, columns = weight.shape
    groups = scale.shape[1]
    grouped = weight.to(compute).view(rows, groups, columns // groups) * scale.to(compute)[..., None]
    return grouped.view(rows, columns).to(dtype)
