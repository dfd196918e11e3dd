"""Converts int8 and fp8 caches to 16-bit floats for the attention kernel, which reads a prompt's keys many times.

    k_out[b * max_pages + p] = k_scale[page] * k_cache[page]          page = block_table[b, p]
    v_out[b * max_pages + p] = v_scale[page] * v_cache[page]

One program converts BLOCK_T tokens of one KV head of one sequence, keys then values. Products are in fp32, rounded
once. Tokens beyond a sequence's length, or without a page, are not written.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .decode_append import BLOCK_T
from .decode_cache import (
    NOT_SPECIALIZED,
    cache_arguments,
    cache_constexprs,
    locate_tokens,
    table_arguments,
    tokens_before,
)
from .fp8 import decode_fp8
from .tiles import ceil_div


@triton.jit
def dequantize_tokens(
    cache, cache_strides, scales, scale_strides,  # scales None: all are 1
    out,  # contiguous [blocks, Hkv, rows, HEAD_DIM]
    block, row, exists, kv_head_idx,
    out_row,  # int64 [BLOCK_T], counted in rows of HEAD_DIM elements
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    dim = tl.arange(0, D_PAD)
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    offset = tl.multiple_of(block * cache_strides[0] + kv_head_idx * cache_strides[1] + row * cache_strides[2], 16)
    x = tl.load(cache + offset[:, None] + dim[None, :], mask=mask, other=0)
    x = decode_fp8(x) if IS_FP8 else x.to(tl.float32)
    if scales is not None:
        scale_offset = block * scale_strides[0] + kv_head_idx * scale_strides[1] + row * scale_strides[2]
        x *= tl.load(scales + scale_offset, mask=exists, other=1.0)[:, None]
    out_offset = tl.multiple_of(out_row * HEAD_DIM, 8)  # 16 bytes
    tl.store(out + out_offset[:, None] + dim[None, :], x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def dequantize_kernel(
    k_cache, k_strides, v_cache, v_strides,  # [blocks, Hkv, rows, D or Dv]
    k_scale, k_scale_strides, v_scale, v_scale_strides,  # [blocks, Hkv, rows] fp32, or one for all tokens, or None
    seqlens,  # [B] int32
    block_table, table_stride, page_stride, num_pages,  # [B, max_pages] int32, or None
    k_out, v_out, capacity, max_pages, num_kv_heads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, IS_FP8: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    num_t_blocks = tl.cdiv(capacity, BLOCK_T)
    pid = tl.program_id(0)
    kv_head_idx = (pid // num_t_blocks % num_kv_heads).to(tl.int64)
    batch_idx = (pid // (num_t_blocks * num_kv_heads)).to(tl.int64)
    position = pid % num_t_blocks * BLOCK_T + tl.arange(0, BLOCK_T)

    # Where the tokens are in the cache and in the output.
    wanted = position < tokens_before(seqlens, batch_idx, capacity)
    block, row, exists = locate_tokens(
        position, wanted, block_table, table_stride, page_stride, num_pages, batch_idx, PAGE_SIZE, SAME_PAGE=False
    )
    rows_of_block = capacity if PAGE_SIZE == 0 else PAGE_SIZE
    out_block = batch_idx * max_pages + position // rows_of_block
    out_row = (out_block * num_kv_heads + kv_head_idx) * rows_of_block + position % rows_of_block

    dequantize_tokens(
        k_cache, k_strides, k_scale, k_scale_strides, k_out, block, row, exists, kv_head_idx, out_row, HEAD_DIM, D_PAD,
        IS_FP8,
    )  # fmt: skip
    dequantize_tokens(
        v_cache, v_strides, v_scale, v_scale_strides, v_out, block, row, exists, kv_head_idx, out_row, VALUE_DIM,
        DV_PAD, IS_FP8,
    )  # fmt: skip


def dequantize_cache(given: Any) -> None:
    """Dequantises the first ``seqlens[b]`` tokens of each sequence b of 8-bit caches into ``k_out`` and ``v_out``.

    ``given`` holds the op's arguments, which the caller has checked.
    `Dequantization` (fastattn/ops/decode.py) describes them.
    """
    seqlens, block_table = given.seqlens, given.block_table
    batch, max_pages = (seqlens.shape[0], 1) if block_table is None else block_table.shape
    kv_heads, page_size = given.k_cache.shape[1:3]
    capacity = max_pages * page_size
    grid = (batch * kv_heads * ceil_div(capacity, BLOCK_T),)
    if grid[0] == 0:
        return
    dequantize_kernel[grid](
        *cache_arguments(given), seqlens, *table_arguments(given),
        given.k_out, given.v_out, capacity, max_pages, kv_heads,
        **cache_constexprs(given),
        PAGE_SIZE=0 if block_table is None else page_size,
        BLOCK_T=BLOCK_T, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
