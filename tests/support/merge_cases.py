"""Draws results of attention to merge, and compares merges with the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import fastattn
from fastattn import reference
from fastattn.distributed import merge_attention
from kernel_device import DEVICE
from oracle import check_against_oracle

KERNEL = "merge_attention.merge_attention_kernel"
BACKWARD_KERNEL = "merge_attention_backward.merge_attention_backward_kernel"
NAMES = ("out", "lse", "grad_out_a", "grad_lse_a", "grad_out_b", "grad_lse_b")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Merged = tuple[Tensor, Tensor, Tensor, Tensor]  # out_a, lse_a, out_b, lse_b


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def problem(shape: tuple[int, ...] = (2, 3, 37, 64), dtypes: tuple[torch.dtype, torch.dtype] = (F32, F16)) -> Merged:
    """Draws outputs ``[B, H, S, D]``, or packed ``[total, H, D]``, and lse that give some rows of side a weight 0."""
    rows = shape[:3] if len(shape) == 4 else (shape[1], shape[0])
    lse_a, lse_b = 3 * drawn(*rows, seed=2), 3 * drawn(*rows, seed=3)
    lse_b.flatten()[5::11] += 200.0
    return drawn(*shape, dtype=dtypes[0]), lse_a, drawn(*shape, seed=1, dtype=dtypes[1]), lse_b


def results(
    merge: Callable[..., tuple[Tensor, Tensor]], tensors: Merged, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Returns the results that ``NAMES`` lists, computed in ``dtype`` if given. No gradient flows to an lse of -inf."""
    leaves = [(tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_() for tensor in tensors]
    out, lse = merge(*leaves)
    grad_out, grad_lse = (drawn(*each.shape, seed=4 + i).to(each.dtype) for i, each in enumerate((out, lse)))
    gradients = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse.masked_fill(lse == -math.inf, 0.0)))
    return out, lse, *gradients


def check(tensors: Merged) -> None:
    """Compares the kernels with float64; PyTorch's error in the tensors' dtypes sets the bound."""
    with fastattn.use_backend("triton"), fastattn.record() as calls:
        found = results(merge_attention, tensors)
    assert calls == [("merge", "triton", KERNEL), ("merge backward", "triton", BACKWARD_KERNEL)]
    dtypes = F32, F32, *(tensor.dtype for tensor in tensors)
    exact, composite = (results(reference.merge_attention, tensors, dtype) for dtype in (torch.float64, None))
    for name, dtype, actual, *expected in zip(NAMES, dtypes, found, exact, composite, strict=True):
        assert actual.dtype == dtype, name
        check_against_oracle(name, actual, *expected)
