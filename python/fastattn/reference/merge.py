"""Merges the results of attention over two sets of keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two outputs and their lse, as ``fastattn.distributed.merge_attention`` does."""
    is_packed = out_a.dim() == 3
    dtype = torch.float32
    for tensor in (out_a, lse_a, out_b, lse_b):
        dtype = torch.promote_types(dtype, tensor.dtype)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)

    # Weights are relative to ``level``, the larger lse. The results do not depend on ``level``, so it needs no
    # gradient.
    level = torch.maximum(lse_a, lse_b).detach()
    level = level.masked_fill(level == -math.inf, 0.0)
    sum_a, sum_b = (lse_a - level).exp(), (lse_b - level).exp()
    total = sum_a + sum_b
    sees_nothing = total == 0
    total = total.masked_fill(sees_nothing, 1.0)
    lse = (level + total.log()).masked_fill(sees_nothing, -math.inf)

    def weighted(out: Tensor, weight: Tensor) -> Tensor:
        fraction = weight / total
        row_fraction = (fraction.transpose(0, 1) if is_packed else fraction)[..., None]
        return out.to(dtype).masked_fill(row_fraction == 0, 0.0) * row_fraction

    return weighted(out_a, sum_a) + weighted(out_b, sum_b), lse
