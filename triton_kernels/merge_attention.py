"""Merges two results of attention over different keys (Liu et al., "Ring attention", 2023, section 3).

    level = max(lse_a, lse_b)
    total = exp(lse_a - level) + exp(lse_b - level)
    lse = level + log(total)
    out = exp(lse_a - level) / total * out_a + exp(lse_b - level) / total * out_b

One CTA merges BLOCK_S rows of one head, BLOCK_D dims at a time, in fp32. It reads and writes each number once. The
output of a side whose weight is 0 may hold anything: it is not read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import ceil_div, padded_head_dim

# With four warps, a thread loads 16 of the 2048 numbers of each side: for fp32, four loads of 16 bytes in flight.
# A head of more than 512 dims takes several blocks.
BLOCK_NUMBERS = 2048
MOST_BLOCK_DIMS = 512


@triton.jit
def rows_of_cta(num_rows, num_heads, BLOCK_S: tl.constexpr):
    """Returns the batch entry, head and rows (int64 ``[BLOCK_S]``) of this CTA.

    Neighbouring CTAs have the same rows of different heads, which are adjacent in memory in the layout [B, S, H, D].
    """
    num_tiles = tl.cdiv(num_rows, BLOCK_S)
    pid = tl.program_id(0)
    row = (pid // num_heads % num_tiles).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    return (pid // (num_heads * num_tiles)).to(tl.int64), (pid % num_heads).to(tl.int64), row


@triton.jit
def lse_pointers(lse, strides, batch, head, row):
    return lse + batch * strides[0] + head * strides[1] + row * strides[2]


@triton.jit
def row_pointers(matrix, strides, batch, head, row, dim):
    start = matrix + batch * strides[0] + head * strides[1]
    return start + row[:, None] * strides[2] + dim.to(tl.int64)[None, :] * strides[3]


@triton.jit
def load_lse(lse, strides, batch, head, row, num_rows):
    return tl.load(lse_pointers(lse, strides, batch, head, row), mask=row < num_rows, other=0.0).to(tl.float32)


@triton.jit
def weights_of(lse_a, lse_b):
    """Returns the weight of each side in the merged output, and the merged lse.

    If both sides are -inf, the results are 0, 0 and -inf. If a side is NaN or +inf, all results are NaN.
    """
    level = tl.maximum(lse_a, lse_b)
    level = tl.where(level == float("-inf"), 0.0, level)
    sum_a, sum_b = tl.exp(lse_a - level), tl.exp(lse_b - level)
    total = sum_a + sum_b
    divisor = tl.where(total == 0.0, 1.0, total)
    return tl.math.div_rn(sum_a, divisor), tl.math.div_rn(sum_b, divisor), level + tl.log(total)


@triton.jit
def merge_attention_kernel(
    out_a, out_a_strides, lse_a, lse_a_strides,  # [B, H, S, VALUE_DIM] and [B, H, S]
    out_b, out_b_strides, lse_b, lse_b_strides,
    out, out_strides, lse, lse_strides,  # may be out_a and lse_a
    num_rows, num_heads, VALUE_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch, head, row = rows_of_cta(num_rows, num_heads, BLOCK_S)
    exists = row < num_rows

    weight_a, weight_b, row_lse = weights_of(
        load_lse(lse_a, lse_a_strides, batch, head, row, num_rows),
        load_lse(lse_b, lse_b_strides, batch, head, row, num_rows),
    )
    # Several warps may load the same number. The barriers keep a warp from overwriting an input that another has yet to
    # read, because ``out`` and ``lse`` may be inputs.
    tl.debug_barrier()
    tl.store(lse_pointers(lse, lse_strides, batch, head, row), row_lse.to(lse.dtype.element_ty), mask=exists)

    for first_dim in range(0, VALUE_DIM, BLOCK_D):
        dim = first_dim + tl.arange(0, BLOCK_D)
        mask = exists[:, None] & (dim < VALUE_DIM)[None, :]
        read_a, read_b = mask & (weight_a != 0.0)[:, None], mask & (weight_b != 0.0)[:, None]
        a = tl.load(row_pointers(out_a, out_a_strides, batch, head, row, dim), mask=read_a, other=0.0)
        b = tl.load(row_pointers(out_b, out_b_strides, batch, head, row, dim), mask=read_b, other=0.0)
        merged = weight_a[:, None] * a.to(tl.float32) + weight_b[:, None] * b.to(tl.float32)
        tl.debug_barrier()
        out_pointers = row_pointers(out, out_strides, batch, head, row, dim)
        tl.store(out_pointers, merged.to(out.dtype.element_ty), mask=mask)


def dense_strides(out: Tensor) -> tuple[int, ...]:
    """Returns the strides of an output ``[B, H, S, D]``; packed ``[total, H, D]`` counts as one batch entry."""
    return out.stride() if out.dim() == 4 else (0, out.stride(1), out.stride(0), out.stride(2))


def dense_lse_strides(lse: Tensor) -> tuple[int, ...]:
    """Returns the strides of an lse ``[B, H, S]``; packed ``[H, total]`` counts as one batch entry."""
    return lse.stride() if lse.dim() == 3 else (0, *lse.stride())


def merge_constexprs(value_dim: int) -> dict[str, Any]:
    """Returns the constexprs of both merge kernels (forward and backward), and the launch options."""
    block_d = min(padded_head_dim(value_dim), MOST_BLOCK_DIMS)
    blocks = {"VALUE_DIM": value_dim, "BLOCK_S": BLOCK_NUMBERS // block_d, "BLOCK_D": block_d}
    return {**blocks, "num_warps": 4, "enable_fp_fusion": True}


def launch(kernel: Any, *tensors: Tensor) -> None:
    """Runs ``kernel`` over all rows; ``tensors`` are its arguments, alternately an output and an lse."""
    out, lse = tensors[:2]
    constexprs = merge_constexprs(out.shape[-1])
    num_heads, num_rows = lse.shape[-2:]
    num_ctas = lse.shape[:-1].numel() * ceil_div(num_rows, constexprs["BLOCK_S"])
    if num_ctas == 0:
        return
    strides = [(dense_lse_strides if i % 2 else dense_strides)(tensor) for i, tensor in enumerate(tensors)]
    arguments = [argument for pair in zip(tensors, strides, strict=True) for argument in pair]
    kernel[(num_ctas,)](*arguments, num_rows, num_heads, **constexprs)


def merge_attention(given: Any) -> tuple[Tensor, Tensor]:
    """Returns the merged output and lse, fp32, in the dimension order of ``out_a`` and ``lse_a``; ``given`` holds the
    op's arguments by name, which the caller has checked."""
    out, lse = (torch.empty_like(tensor, dtype=torch.float32) for tensor in (given.out_a, given.lse_a))
    launch(merge_attention_kernel, *given, out, lse)
    return out, lse


def merge_attention_into(given: Any) -> None:
    """Merges the output and lse of a block of keys into ``out`` and ``lse``, in place."""
    launch(merge_attention_kernel, *given, given.out, given.lse)
