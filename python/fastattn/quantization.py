"""Converts tensors to symmetric int8 and to fp8 (e4m3), and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _scales_of_rows(x: Tensor, largest: float) -> Tensor:
    """Returns a scale for each row of ``x [..., D]``, ``max|x| / largest``, or 1 for a zero or empty row."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.shape[-1] == 0:
        return x.new_ones(x.shape[:-1], dtype=dtype)
    scale = x.detach().to(dtype).abs().amax(-1) / largest
    return torch.where(scale == 0, 1.0, scale)  # a row of zeros, or of numbers so small that the division underflows


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x [..., D]`` rounded to symmetric int8, and a scale per row, ``[...]``, which is 1 for a row of
    zeros."""
    scale = _scales_of_rows(x, 127)
    return (x.to(scale.dtype) / scale[..., None]).round().clamp(-127, 127).to(torch.int8), scale


FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0


def as_numbers(tensor: Tensor) -> Tensor:
    """Views an fp8 tensor as bytes, because torch has few operators for fp8; returns other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def to_fp8(x: Tensor, scale: Tensor | None) -> Tensor:
    """Returns ``x / scale`` in fp8, rounded to nearest even; ``scale`` broadcasts, and None means 1.

    Magnitudes above 448, the largest fp8 number, become 448. This includes infinity. NaN stays NaN.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x if scale is None else x / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(FP8)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x [..., D]`` rounded to fp8, and a scale per row, ``[...]``: ``max|x| / 448``, or 1 for a row of zeros.

    A row with infinity or NaN becomes zeros with the scale NaN.
    """
    scale = _scales_of_rows(x, _LARGEST_FP8)
    is_finite = scale.isfinite()
    rows = torch.where(is_finite[..., None], x.to(scale.dtype), 0.0)
    return to_fp8(rows, torch.where(is_finite, scale, 1.0)[..., None]), torch.where(is_finite, scale, math.nan)


# 8-bit dtype → the function that rounds to it with a scale per row.
QUANTIZE_ROWS = {torch.int8: quantize_rows, FP8: quantize_rows_fp8}


def are_given(scales: Tensor | None) -> bool:
    """Returns whether the caller has fixed the scales of an fp8 cache: None (every scale is 1), one number, or one
    number per head. An append divides new tokens by fixed scales. Without fixed scales, an append computes and writes a
    scale for each token and head."""
    return scales is None or scales.dim() < 3


def quantize_int8(weight: Tensor, granularity: str | int = "channel") -> tuple[Tensor, Tensor]:
    """Rounds ``weight [N, K]`` to symmetric int8 ``[N, K]``, to nearest even, and returns it with float32 scales.

    Scales are ``[1, 1]`` for ``"tensor"``, ``[N, 1]`` for ``"channel"``, and ``[N, K / group]`` for an int, the size of
    a group along K.
    """
    rows, columns = weight.shape
    if granularity == "tensor":
        quantized, scale = quantize_rows(weight.reshape(1, -1))
        return quantized.view(rows, columns), scale.to(torch.float32).view(1, 1)
    group = columns if granularity == "channel" else int(granularity)
    quantized, scale = quantize_rows(weight.reshape(rows, columns // group if group else 1, group))
    return quantized.view(rows, columns), scale.to(torch.float32)


def dequantize_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an int8 weight ``[N, K]`` times its scales, in ``dtype``."""
    compute = torch.promote_types(dtype, torch.float32)
    if weight.numel() == 0:
        return weight.to(dtype)
    rows, columns = weight.shape
    groups = scale.shape[1]
    grouped = weight.to(compute).view(rows, groups, columns // groups) * scale.to(compute)[..., None]
    return grouped.view(rows, columns).to(dtype)
