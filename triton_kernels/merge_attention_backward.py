"""Computes the gradients of `merge_attention` in one pass.

    weight_a = exp(lse_a - lse)                               weight_b = exp(lse_b - lse)
    dout_a = weight_a dout                                    dout_b = weight_b dout
    delta = rowsum(dout (out_a - out_b))
    dlse_a = weight_a (dlse + weight_b delta)                  dlse_b = weight_b (dlse - weight_a delta)

The grid, and the rows that each CTA reads, are as in the forward kernel. A row whose weight is 0 has gradient 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .merge_attention import launch, load_lse, lse_pointers, row_pointers, rows_of_cta, weights_of


@triton.jit
def merge_attention_backward_kernel(
    grad_out, grad_out_strides, grad_lse, grad_lse_strides,  # [B, H, S, VALUE_DIM] and [B, H, S]
    out_a, out_a_strides, lse_a, lse_a_strides,
    out_b, out_b_strides, lse_b, lse_b_strides,
    grad_out_a, grad_out_a_strides, grad_lse_a, grad_lse_a_strides,
    grad_out_b, grad_out_b_strides, grad_lse_b, grad_lse_b_strides,
    num_rows, num_heads, VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, head, row = rows_of_cta(num_rows, num_heads, BLOCK_S)
    exists = row < num_rows

    weight_a, weight_b, _row_lse = weights_of(
        load_lse(lse_a, lse_a_strides, batch, head, row, num_rows),
        load_lse(lse_b, lse_b_strides, batch, head, row, num_rows),
    )
    has_a, has_b = weight_a != 0.0, weight_b != 0.0

    delta = tl.zeros([BLOCK_S], tl.float32)
    for first_dim in range(0, VALUE_DIM, BLOCK_D):
        dim = first_dim + tl.arange(0, BLOCK_D)
        mask = exists[:, None] & (dim < VALUE_DIM)[None, :]
        read_a, read_b = mask & has_a[:, None], mask & has_b[:, None]
        a = tl.load(row_pointers(out_a, out_a_strides, batch, head, row, dim), mask=read_a, other=0.0)
        b = tl.load(row_pointers(out_b, out_b_strides, batch, head, row, dim), mask=read_b, other=0.0)
        grad = tl.load(
            row_pointers(grad_out, grad_out_strides, batch, head, row, dim), mask=read_a | read_b, other=0.0
        ).to(tl.float32)
        delta += tl.sum(grad * (a.to(tl.float32) - b.to(tl.float32)), axis=1)
        grad_a = tl.where(has_a[:, None], weight_a[:, None] * grad, 0.0)
        grad_b = tl.where(has_b[:, None], weight_b[:, None] * grad, 0.0)
        a_pointers = row_pointers(grad_out_a, grad_out_a_strides, batch, head, row, dim)
        b_pointers = row_pointers(grad_out_b, grad_out_b_strides, batch, head, row, dim)
        tl.store(a_pointers, grad_a.to(grad_out_a.dtype.element_ty), mask=mask)
        tl.store(b_pointers, grad_b.to(grad_out_b.dtype.element_ty), mask=mask)

    grad_row = load_lse(grad_lse, grad_lse_strides, batch, head, row, num_rows)
    grad_row_a = tl.where(has_a, weight_a * (grad_row + weight_b * delta), 0.0)
    grad_row_b = tl.where(has_b, weight_b * (grad_row - weight_a * delta), 0.0)
    a_pointers = lse_pointers(grad_lse_a, grad_lse_a_strides, batch, head, row)
    b_pointers = lse_pointers(grad_lse_b, grad_lse_b_strides, batch, head, row)
    tl.store(a_pointers, grad_row_a.to(grad_lse_a.dtype.element_ty), mask=exists)
    tl.store(b_pointers, grad_row_b.to(grad_lse_b.dtype.element_ty), mask=exists)


def merge_attention_backward(given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of ``out_a``, ``lse_a``, ``out_b`` and ``lse_b``, each in its dtype and dimension order."""
    grad_out_a, grad_lse_a, grad_out_b, grad_lse_b = grads = tuple(map(torch.empty_like, given[2:]))
    launch(merge_attention_backward_kernel, *given, *grads)
    return grad_out_a, grad_lse_a, grad_out_b, grad_lse_b
