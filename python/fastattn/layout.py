"""Checks and makes the memory layouts that kernels need for their arguments, and allocates results."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT_BYTES = 16  # the size of a thread's vector load


def reason_to_copy(tensor: Tensor, rows_anywhere: bool = False) -> str | None:
    """Returns why a kernel cannot read ``tensor`` in place, or None.

    ``tensor`` is ``[B, H, S, D]``, packed ``[total, H, D]`` or a matrix. ``rows_anywhere`` means that the kernel takes
    rows at any address. Heads and batches may overlap in memory. Rows may not, because CUDA does not document tensor
    maps over overlapping rows. ``csrc/api/checks.h`` has the same rule.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return "its last dimension is not contiguous"
    if rows_anywhere:
        return None
    row_dim = 0 if tensor.dim() == 3 else -2
    if tensor.shape[row_dim] > 1 and tensor.stride(row_dim) < tensor.shape[-1]:
        return "its rows share memory"
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        return f"its first element is not {ALIGNMENT_BYTES}-byte aligned"
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and stride * tensor.element_size() % ALIGNMENT_BYTES:
            return f"its strides are not multiples of {ALIGNMENT_BYTES} bytes"
    return None


def as_matrix(tensor: Tensor) -> Tensor | None:
    """Returns a view of ``tensor [..., K]`` as a matrix ``[N, K]``, or None if its rows have no common stride."""
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except RuntimeError:
        return None


def readable(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` itself, or a contiguous copy where a kernel cannot read it."""
    return tensor if reason_to_copy(tensor) is None else tensor.clone(memory_format=torch.contiguous_format)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Returns ``tensor.contiguous()``, or None for None."""
    return None if tensor is None else tensor.contiguous()


def has_aligned_rows(matrix: Tensor) -> bool:
    """Returns whether the rows of ``matrix [N, K]`` are contiguous, do not overlap, and start at multiples of
    ``ALIGNMENT_BYTES`` from the matrix's first element."""
    rows, columns = matrix.shape
    if matrix.numel() == 0:
        return True
    if columns > 1 and matrix.stride(1) != 1:
        return False
    stride = matrix.stride(0)
    return rows <= 1 or (stride >= columns and stride * matrix.element_size() % ALIGNMENT_BYTES == 0)


def with_aligned_rows(matrix: Tensor) -> Tensor:
    """Returns ``matrix [N, K]`` itself where its rows are aligned, else a copy whose rows are padded with zeros."""
    if has_aligned_rows(matrix):
        return matrix
    columns = matrix.shape[1]
    return F.pad(matrix, (0, -columns % (ALIGNMENT_BYTES // matrix.element_size())))[:, :columns]


class SharedCopies:
    """Returns the same copy for all tensors that view the same memory, as long as that copy is alive and up to date."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        self._made: dict[Any, weakref.ref[Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or type(tensor) is not Tensor:
            return self._copy(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
        known = self._made.get(key)
        made = None if known is None else known()
        if made is None or not torch.equal(made, tensor):
            made = self._copy(tensor)
            self._made = {key: made for key, made in self._made.items() if made() is not None}
            self._made[key] = weakref.ref(made)
        return made


def empty_like_heads(like: Tensor, last_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an uninitialised ``[B, H, S, last_dim]`` whose dims have the memory order of ``like [B, H, S, D]``.

    It is ``[B, S, H, last_dim]`` in memory if the head stride of ``like`` is smaller than the row stride, else
    contiguous. ``dtype`` defaults to the dtype of ``like``.
    """
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((batch, rows, heads, last_dim), dtype=dtype).transpose(1, 2)
    return like.new_empty((batch, heads, rows, last_dim), dtype=dtype)


def sum_over_tokens(rows: Tensor, samples: int = 0) -> Tensor:
    """Sums ``rows [..., N]`` to ``[N]`` in float32 and rounds once; the first ``samples`` dimensions are kept.

    Used for the gradient of a bias in calls for which no kernel computes that gradient.
    """
    rows = rows.unsqueeze(samples).flatten(samples, -2)  # if rows is [N], flatten needs a dim before N
    return rows.sum(samples, dtype=torch.float32).to(rows.dtype)
