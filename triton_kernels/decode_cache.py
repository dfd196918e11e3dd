"""Locates and loads a sequence's tokens, for the append and the split kernel of flash-decoding.

A cache is ``[blocks, Hkv, block_rows, D]``. In a contiguous cache, a sequence is one block, and ``block_rows`` its
capacity. In a paged cache, a sequence's row of the block table names its pages. Lengths and tables are in device memory
and may hold any number: lengths are clamped, and tokens whose page does not exist are neither read nor written.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastattn.layout import contiguous
from fastattn.quantization import FP8, are_given, as_numbers

from .tiles import padded_head_dim

# The numbers that change between a server's calls. Triton would compile again where one of them becomes 1 or a multiple
# of 16. Rows are aligned whatever the numbers are: kernels say so with `tl.multiple_of`.
NOT_SPECIALIZED = [
    "table_stride", "page_stride", "num_pages", "max_pages", "rotary_stride", "num_positions", "alibi_batch_stride",
    "window_left", "window_right", "capacity", "num_new", "num_kv_heads", "num_queries", "num_splits",
    "blocks_per_split", "slot_stride", "num_tokens", "num_slots",
]  # fmt: skip


@triton.jit
def tokens_before(cache_seqlens, batch_idx, capacity):
    """Returns the number of tokens of a sequence before this call's append, from 0 to ``capacity``."""
    return tl.minimum(tl.maximum(tl.load(cache_seqlens + batch_idx), 0), capacity)


@triton.jit
def locate_tokens(
    position, wanted,  # [R] int32 and bool; wanted implies 0 <= position < capacity
    block_table, table_stride, page_stride, num_pages,
    batch_idx,  # int64
    PAGE_SIZE: tl.constexpr,  # 0: contiguous cache
    SAME_PAGE: tl.constexpr,  # all positions are in one page: one look-up instead of a gather
):  # fmt: skip
    """Returns the tokens' block (int64, scalar or [R]), their row in it (int64 [R]), and which exist (bool [R])."""
    if PAGE_SIZE == 0:
        return batch_idx, position.to(tl.int64), wanted
    else:
        page_row = block_table + batch_idx * table_stride
        page_idx = position // PAGE_SIZE
        if SAME_PAGE:
            page_idx = tl.max(page_idx, axis=0)
            any_wanted = tl.max(wanted.to(tl.int32), axis=0) > 0
            page = tl.load(page_row + page_idx * page_stride, mask=any_wanted, other=-1)
        else:
            page = tl.load(page_row + page_idx * page_stride, mask=wanted, other=-1)
        row_page = tl.broadcast_to(page, position.shape)
        exists = (row_page >= 0) & (row_page < num_pages)
        return page.to(tl.int64), (position % PAGE_SIZE).to(tl.int64), wanted & exists


@triton.jit
def load_rotated(
    row_ptrs,  # [R] pointers to rows of HEAD_DIM elements, 16-byte aligned
    row_mask,  # [R] bool: which rows to read; the others are 0
    position,  # [R] int32: the position of each row in its sequence
    rotary_cos, rotary_sin, rotary_stride, num_positions,  # [num_positions, ROTARY_DIM / 2]
    dim,  # [D_PAD] int32: 0, 1, ...
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,  # ROTARY_DIM 0: no RoPE
):  # fmt: skip
    """Loads rows and applies RoPE to their first ROTARY_DIM dims, ``[R, D_PAD]``.

    Computes in fp32 and rounds to the rows' dtype. Su et al., "RoFormer" (2021), section 3.4.2: a pair (a, b)
    becomes (a cos - b sin, a sin + b cos). Pairs are (2i, 2i + 1) if interleaved, else (i, i + ROTARY_DIM / 2). Each
    element's partner is loaded a second time, from L1 or L2. Positions outside the table are clamped to it.
    """
    row_ptrs = tl.multiple_of(row_ptrs, 16)
    x = tl.load(row_ptrs[:, None] + dim[None, :], mask=row_mask[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        if INTERLEAVED:
            is_first = dim % 2 == 0
            angle_idx = dim // 2
            partner = tl.where(is_first, dim + 1, dim - 1)
        else:
            is_first = dim < HALF
            angle_idx = dim % HALF
            partner = tl.where(is_first, dim + HALF, dim - HALF)
        turns = row_mask[:, None] & (dim < ROTARY_DIM)[None, :]
        y = tl.load(row_ptrs[:, None] + partner[None, :], mask=turns, other=0.0)

        table_row = tl.maximum(tl.minimum(position, num_positions - 1), 0)
        angle_offset = table_row.to(tl.int64)[:, None] * rotary_stride + angle_idx[None, :]
        in_table = turns & (table_row < num_positions)[:, None]  # false if the table is empty
        cos = tl.load(rotary_cos + angle_offset, mask=in_table, other=1.0).to(tl.float32)
        sin = tl.load(rotary_sin + angle_offset, mask=in_table, other=0.0).to(tl.float32)

        x_cos = x.to(tl.float32) * cos
        y_sin = y.to(tl.float32) * sin
        turned = tl.where(is_first[None, :], x_cos - y_sin, y_sin + x_cos)
        x = tl.where(turns, turned.to(x.dtype), x)
    return x


def cache_arguments(given: Any) -> tuple[Any, ...]:
    """Returns the caches and their scales, each with its strides, as the kernels take them: fp8 as bytes."""
    k_cache, v_cache = as_numbers(given.k_cache), as_numbers(given.v_cache)
    return (
        k_cache,
        k_cache.stride()[:3],
        v_cache,
        v_cache.stride()[:3],
        given.k_scale,
        _scale_strides(given.k_scale),
        given.v_scale,
        _scale_strides(given.v_scale),
    )


def table_arguments(given: Any) -> tuple[Any, ...]:
    """Returns the block table, its strides, and the number of pages; None and zeros for a contiguous cache."""
    table = given.block_table
    return (None, 0, 0, 0) if table is None else (table, *table.stride(), given.k_cache.shape[0])


def rotary_arguments(given: Any) -> tuple[Any, ...]:
    """Returns the cosines, the sines, their row stride and number of rows; None and zeros without RoPE."""
    cos = contiguous(given.rotary_cos)
    return (None, None, 0, 0) if cos is None else (cos, contiguous(given.rotary_sin), cos.stride(0), cos.shape[0])


def cache_constexprs(given: Any) -> dict[str, Any]:
    """Returns the constexprs that all kernels over a cache have."""
    head_dim, value_dim = given.k_cache.shape[3], given.v_cache.shape[3]
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "D_PAD": padded_head_dim(head_dim),
        "DV_PAD": padded_head_dim(value_dim),
        "IS_FP8": given.k_cache.dtype == FP8,
    }


def _scale_strides(scales: Tensor | None) -> tuple[int, ...]:
    """Returns the strides of scales ``[blocks, Hkv, rows]``; scales that the caller gives, ``[Hkv]`` or a single one,
    have stride 0 over blocks and rows."""
    if scales is None:
        return 0, 0, 0
    if are_given(scales):
        return 0, scales.stride(0) if scales.numel() > 1 else 0, 0
    return scales.stride()
