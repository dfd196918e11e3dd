"""Applies rotary position embedding (RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first ``rotary_dim`` dims of ``x [B, H, S, D]`` by angles whose cosines and sines are ``[B, S,
    rotary_dim / 2]`` (Su et al., "RoFormer", 2021, section 3.4.2).

    It rotates pairs of dims: ``(2i, 2i + 1)`` if interleaved, else ``(i, i + rotary_dim / 2)``.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    turning, passing = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.split(half, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    turned_dims = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([turned_dims.to(x.dtype), passing], dim=-1)


def rotary_at(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Rotates ``x [B, H, S, D]`` by the angles in rows ``position [B, S]`` of the tables ``cos`` and ``sin [positions,
    rotary_dim / 2]``. Positions outside of the tables are clamped."""
    position = position.clamp(0, cos.shape[0] - 1)
    return rotary(x, cos[position], sin[position], interleaved)
