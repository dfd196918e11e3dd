"""Reads keys and values in pages ``[num_pages, Hkv, page_size, D]``, for the attention kernel.

A key whose page does not exist is absent: it is loaded as zeros, and masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastattn.triton_kernels.attention_common import sequence_range


@triton.jit
def paged_length(cu_seqlens, batch, max_seqlen):
    """Returns the number of keys of sequence ``batch``, from 0 to ``max_seqlen``, whatever the offsets say."""
    length = tl.load(cu_seqlens + batch + 1).to(tl.int64) - tl.load(cu_seqlens + batch)
    return tl.minimum(tl.maximum(length, 0), max_seqlen).to(tl.int32)


@triton.jit
def key_range(cu_seqlens, batch, total, max_seqlen, PAGED: tl.constexpr):
    """Returns where the keys of sequence ``batch`` start in the packed tensor (0 in pages), and their number."""
    if PAGED:
        begin = 0
        length = paged_length(cu_seqlens, batch, max_seqlen)
    else:
        begin, length = sequence_range(cu_seqlens, batch, total, max_seqlen)
    return begin, length


@triton.jit
def locate_keys(
    first_key, num_keys, block_table, max_pages, num_pages, batch, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """Returns, for keys ``first_key`` … ``first_key + BLOCK - 1``, their pages, their rows in the pages (both int64),
    and which keys exist."""
    key = first_key + tl.arange(0, BLOCK)
    wanted = key < num_keys
    page = tl.load(block_table + batch * max_pages + key // PAGE_SIZE, mask=wanted, other=-1)
    return page.to(tl.int64), (key % PAGE_SIZE).to(tl.int64), (page >= 0) & (page < num_pages)


@triton.jit
def load_paged_rows(base, page, row, exists, stride_page, stride_row, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Loads rows of pages, ``[BLOCK, WIDTH]``; zeros for rows that do not exist, and from dim ``DIM`` on."""
    VECTOR: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, WIDTH)
    offset = tl.multiple_of(page * stride_page + row * stride_row, VECTOR)
    mask = exists[:, None]
    if DIM != WIDTH:
        mask = mask & (column < DIM)[None, :]
    return tl.load(tl.multiple_of(base, 16) + (offset[:, None] + column[None, :]), mask=mask, other=0.0)
