"""Attention over two sets of keys, from the results of each (Liu et al., "Ring attention", 2023, section 3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn.checks import FLOATING, check_dtype, check_shape, check_tensor, expect


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """What attention over the keys of both gives: output and lse.

    The output stays in float32, however often results are merged: rounded once, at the end, it is as exact as that of
    one call. Differentiable in all four. A row that sees no key of one set (lse -inf) takes the other's result,
    whatever stands in its own, and one that sees none of both stays 0 and -inf.

    Args:
        out_a, out_b: ``[B, Hq, Sq, Dv]``, or packed ``[total, Hq, Dv]``.
        lse_a, lse_b: ``[B, Hq, Sq]``, or packed ``[Hq, total]``: as ``return_lse`` gives them. A sink belongs into one.

    Returns:
        Output and lse of the same shapes, float32, or float64 where an argument is.

    Raises:
        InputError, TypeError: shapes that differ, or are none of the above.
    """
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_tensor(name, tensor)
        check_dtype(name, tensor, FLOATING)
    is_packed = out_a.dim() == 3
    expect(out_a.dim() in (3, 4), "out_a", "[B, Hq, Sq, Dv] or [total, Hq, Dv]", list(out_a.shape))
    check_shape("out_b", out_b, out_a.shape, "of out_a")
    rows = (out_a.shape[1], out_a.shape[0]) if is_packed else out_a.shape[:3]
    check_shape("lse_a", lse_a, rows, "[Hq, total]" if is_packed else "[B, Hq, Sq]")
    check_shape("lse_b", lse_b, rows, "[Hq, total]" if is_packed else "[B, Hq, Sq]")
    dtype = torch.float32
    for tensor in (out_a, lse_a, out_b, lse_b):
        dtype = torch.promote_types(dtype, tensor.dtype)
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)

    # Weights relative to the larger lse, from which they do not depend: no gradient goes through it.
    level = torch.maximum(lse_a, lse_b).detach()
    level = level.masked_fill(level == -math.inf, 0.0)
    sum_a, sum_b = (lse_a - level).exp(), (lse_b - level).exp()
    total = sum_a + sum_b
    sees_nothing = total == 0
    total = total.masked_fill(sees_nothing, 1.0)
    lse = (level + total.log()).masked_fill(sees_nothing, -math.inf)

    def weighted(out: Tensor, of_out: Tensor) -> Tensor:
        share = of_out / total
        of_rows = (share.transpose(0, 1) if is_packed else share)[..., None]
        return out.to(dtype).masked_fill(of_rows == 0, 0.0) * of_rows

    return weighted(out_a, sum_a) + weighted(out_b, sum_b), lse
