"""Computes flash-decoding: attention of a few queries over a long KV cache.

Dao et al., "Flash-Decoding for long-context inference" (2023).

    S = mask(ALiBi(softcap(scale * rotate(Q) K^T)))     P = exp(S - lse)     out = P V

Three kernels run in this order:
  append   (decode_append.py, if there are new tokens) writes them into the cache.
  split    has one CTA per (sequence, KV head, row tile, split). The rows of a tile are all query heads of the KV head
           times the queries, so that each key is loaded once for all of them:  row = query_idx * group + head_in_group.
           A split walks over some of the sequence's key blocks with an online softmax, and stores its own
           normalised output (fp32) and log-sum-exp. With a single split it writes the result itself.
  combine  (decode_combine.py) has one CTA per row, which weights the splits' outputs by exp(lse_split - lse) and adds
           the sink.
The grid depends only on shapes. Lengths are read on the device, where each split computes its own key range.
Preconditions: last dims are contiguous, rows are 16-byte aligned, and the capacity is below 2^30 tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.dispatch.device import kernel_facts
from fastattn.dispatch.support import FEATURE_OF_CACHE
from fastattn.layout import contiguous, empty_like_heads, readable

from .decode_append import launch_append
from .decode_cache import (
    NOT_SPECIALIZED,
    cache_arguments,
    cache_constexprs,
    load_rotated,
    locate_tokens,
    rotary_arguments,
    table_arguments,
    tokens_before,
)
from .decode_combine import COMBINE_SPLITS, combine_kernel, finish_row
from .device_math import tanh
from .fp8 import decode_fp8
from .tiles import ceil_div, decode_key_blocks, decode_splits, decode_tile, padded_head_dim

# A window side of this size masks nothing, because no key is so far from a query.
UNBOUNDED = 1 << 30


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def split_kernel(
    query, q_strides,  # [B, Hq, Sq, D]
    k_cache, k_strides, v_cache, v_strides,  # [blocks, Hkv, rows, D or Dv]
    k_scale, k_scale_strides, v_scale, v_scale_strides,  # [blocks, Hkv, rows] fp32, or None, which is 1 for fp8
    cache_seqlens,  # [B] int32
    block_table, table_stride, page_stride, num_pages,  # [B, max_pages] int32, or None
    rotary_cos, rotary_sin, rotary_stride, num_positions,  # [num_positions, ROTARY_DIM / 2], or None
    alibi_slopes, alibi_batch_stride,  # [B or 1, Hq] fp32, or None
    sinks,  # [Hq] fp32, or None
    tree_mask, tree_strides,  # [B, Sq, Sq] bytes, or None: which of the last Sq tokens each query sees
    out, out_strides,  # [B, Hq, Sq, Dv]; or, where SPLIT, [num_splits, B, Hq, Sq, Dv] fp32
    lse, lse_strides,  # [B, Hq, Sq] fp32; or, where SPLIT, [num_splits, B, Hq, Sq]; strides begin with the split
    inner_scale, softcap,  # inner_scale: scale / softcap if HAS_SOFTCAP, else scale
    window_left, window_right,  # at least 0; UNBOUNDED masks nothing
    capacity, num_new, num_kv_heads, num_queries,
    num_splits, blocks_per_split,  # 0 blocks: split the sequence's blocks evenly
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: contiguous
    QUANTISED: tl.constexpr, IS_FP8: tl.constexpr,  # QUANTISED: int8 or fp8
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINK: tl.constexpr,
    ROWS_DIFFER: tl.constexpr,  # the rows of a tile do not all see the same keys
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The sequence, KV head, split and rows of this CTA. The row tile varies fastest: row tiles share keys in L2.
    num_m_blocks = tl.cdiv(num_queries * GROUP, BLOCK_M)
    pid = tl.program_id(0)
    m_block = pid % num_m_blocks
    split_idx = pid // num_m_blocks % num_splits
    kv_head_idx = (pid // (num_m_blocks * num_splits) % num_kv_heads).to(tl.int64)
    batch_idx = (pid // (num_m_blocks * num_splits * num_kv_heads)).to(tl.int64)
    row = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_queries * GROUP
    query_idx = tl.minimum(row // GROUP, num_queries - 1)
    head_idx = kv_head_idx * GROUP + row % GROUP

    # The keys that some row sees, [first_key, last_key), and this split's blocks of them, [begin, end).
    total = tl.minimum(tokens_before(cache_seqlens, batch_idx, capacity) + num_new, capacity)
    row_position = total - num_queries + query_idx
    first_position = total - num_queries + m_block * BLOCK_M // GROUP
    last_position = total - num_queries + tl.minimum(((m_block + 1) * BLOCK_M - 1) // GROUP, num_queries - 1)
    first_key = tl.maximum(first_position - window_left, 0)
    last_key = tl.maximum(tl.minimum(last_position + window_right + 1, total), first_key)
    first_block = first_key // BLOCK_N
    num_blocks = tl.where(last_key > first_key, tl.cdiv(last_key, BLOCK_N) - first_block, 0)
    if blocks_per_split > 0:
        begin = tl.minimum(split_idx * blocks_per_split, num_blocks)
        end = tl.minimum(begin + blocks_per_split, num_blocks)
    else:
        begin = (split_idx.to(tl.int64) * num_blocks // num_splits).to(tl.int32)
        end = ((split_idx.to(tl.int64) + 1) * num_blocks // num_splits).to(tl.int32)
    begin += first_block
    end += first_block

    lse_ptrs = lse + split_idx.to(tl.int64) * lse_strides[0] + batch_idx * lse_strides[1]
    lse_ptrs += head_idx * lse_strides[2] + query_idx * lse_strides[3]
    if SPLIT:
        if begin >= end:  # combine does not read the output of a split whose lse is -inf
            tl.store(lse_ptrs, float("-inf") + tl.zeros([BLOCK_M], tl.float32), mask=is_row)
            return

    # Every row sees all keys of the blocks [full_begin, full_end).
    full_begin = tl.cdiv(tl.maximum(last_position - window_left, 0), BLOCK_N)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(first_position + window_right + 1, total)
    if tree_mask is not None:
        full_end = tl.minimum(full_end, total - num_queries)
    full_end = tl.maximum(full_end, 0) // BLOCK_N
    full_end = tl.maximum(tl.minimum(full_end, end), full_begin)

    VECTOR: tl.constexpr = 128 // k_cache.dtype.element_ty.primitive_bitwidth  # rows are 16-byte aligned
    dim = tl.arange(0, D_PAD)
    value_dim = tl.arange(0, DV_PAD)
    q_rows = query + batch_idx * q_strides[0] + head_idx * q_strides[1] + query_idx.to(tl.int64) * q_strides[2]
    q = load_rotated(
        q_rows, is_row, row_position, rotary_cos, rotary_sin, rotary_stride, num_positions, dim,
        HEAD_DIM, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + batch_idx * alibi_batch_stride + head_idx, mask=is_row, other=0.0)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    # The blocks without a mask come first, then those at the edges. If all rows see the same keys, one loop is enough,
    # because it loads no other keys.
    for AT_EDGE in tl.static_range(0 if ROWS_DIFFER else 1, 2):
        if not ROWS_DIFFER:
            num_steps = end - begin
        elif AT_EDGE:
            num_steps = (full_begin - begin) + (end - full_end)
        else:
            num_steps = full_end - full_begin
        for step in range(num_steps):
            if not ROWS_DIFFER:
                key_block = begin + step
            elif AT_EDGE:
                key_block = tl.where(begin + step < full_begin, begin + step, full_end + step - (full_begin - begin))
            else:
                key_block = full_begin + step

            # Load K and V, [BLOCK_N, D_PAD] and [BLOCK_N, DV_PAD]; absent keys are zeros.
            position = key_block * BLOCK_N + tl.arange(0, BLOCK_N)
            wanted = (position >= first_key) & (position < last_key)
            block, slot, is_present = locate_tokens(
                position, wanted, block_table, table_stride, page_stride, num_pages, batch_idx,
                PAGE_SIZE, SAME_PAGE=PAGE_SIZE % BLOCK_N == 0,
            )  # fmt: skip
            k_offset = block * k_strides[0] + kv_head_idx * k_strides[1] + slot * k_strides[2]
            v_offset = block * v_strides[0] + kv_head_idx * v_strides[1] + slot * v_strides[2]
            k_offset, v_offset = tl.multiple_of(k_offset, VECTOR), tl.multiple_of(v_offset, VECTOR)
            k_mask = is_present[:, None] & (dim < HEAD_DIM)[None, :]
            v_mask = is_present[:, None] & (value_dim < VALUE_DIM)[None, :]
            k = tl.load(k_cache + k_offset[:, None] + dim[None, :], mask=k_mask, other=0.0)
            v = tl.load(v_cache + v_offset[:, None] + value_dim[None, :], mask=v_mask, other=0.0)

            if IS_FP8:
                k, v = decode_fp8(k), decode_fp8(v)

            # Scores are in nats: multiplying by log2(e) would cost large scores another rounding.
            s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            if QUANTISED and k_scale is not None:
                scale_offset = block * k_scale_strides[0] + kv_head_idx * k_scale_strides[1] + slot * k_scale_strides[2]
                s *= tl.load(k_scale + scale_offset, mask=is_present, other=0.0)[None, :]
            s *= inner_scale
            if HAS_SOFTCAP:
                s = tanh(s) * softcap
            if HAS_ALIBI:
                distance = tl.abs(row_position[:, None] - position[None, :]).to(tl.float32)
                s -= slope[:, None] * distance
            visible = tl.broadcast_to(is_present[None, :], s.shape)
            if ROWS_DIFFER and AT_EDGE:
                visible &= position[None, :] >= row_position[:, None] - window_left
                visible &= position[None, :] <= row_position[:, None] + window_right
                if tree_mask is not None:
                    token = position - (total - num_queries)
                    tree_rows = tree_mask + batch_idx * tree_strides[0] + query_idx.to(tl.int64) * tree_strides[1]
                    is_asked = visible & is_row[:, None] & (token >= 0)[None, :]
                    tree_ptrs = tree_rows[:, None] + token.to(tl.int64)[None, :] * tree_strides[2]
                    visible &= tl.load(tree_ptrs, mask=is_asked, other=1) != 0
            s = tl.where(visible, s, float("-inf"))

            # Online softmax.
            new_max = tl.maximum(row_max, tl.max(s, axis=1))
            max_safe = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp(s - max_safe[:, None])
            rescale = tl.exp(row_max - max_safe)
            row_sum = row_sum * rescale + tl.sum(p, axis=1)
            row_max = new_max
            acc *= rescale[:, None]

            # Multiply P by V.
            if ROWS_DIFFER and AT_EDGE and (IS_FP8 or not QUANTISED):
                # A probability of zero times NaN is NaN, but only rows that see a non-finite value may become NaN.
                is_finite = tl.abs(v.to(tl.float32)) < float("inf")
                is_spoiled = tl.where(is_finite, 0.0, 1.0).to(q.dtype)
                v = tl.where(is_finite, v, 0.0)
                num_spoiled = tl.dot(visible.to(q.dtype), is_spoiled, input_precision="ieee")
                acc = tl.where(num_spoiled > 0.0, float("nan"), acc)
            if QUANTISED and v_scale is not None:
                # V's scales multiply P, as fractions of the block's largest: scales may be below fp16's normal range.
                scale_offset = block * v_scale_strides[0] + kv_head_idx * v_scale_strides[1] + slot * v_scale_strides[2]
                scale = tl.load(v_scale + scale_offset, mask=is_present, other=0.0)
                largest = tl.max(tl.where(tl.abs(scale) < float("inf"), tl.abs(scale), 0.0), axis=0)
                largest = tl.where(largest == 0.0, 1.0, largest)
                p = tl.where(visible, p * (scale / largest)[None, :], 0.0)  # a masked key's scale may be NaN
                acc += tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee") * largest
            else:
                acc += tl.dot(p.to(q.dtype), v.to(q.dtype), input_precision="ieee")

    # Store the split's own result, or the final one.
    if SPLIT:
        out_tile, row_lse = finish_row(acc, row_max, row_sum, row_max, HAS_SINK=False)
        tl.store(lse_ptrs, row_lse, mask=is_row)
    else:
        sink = row_max
        if HAS_SINK:
            sink = tl.load(sinks + head_idx, mask=is_row, other=0.0)
        out_tile, row_lse = finish_row(acc, row_max, row_sum, sink, HAS_SINK)
        tl.store(lse_ptrs, row_lse, mask=is_row)
    out_rows = out + split_idx.to(tl.int64) * out_strides[0] + batch_idx * out_strides[1]
    out_rows += head_idx * out_strides[2] + query_idx.to(tl.int64) * out_strides[3]
    out_mask = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    out_rows = tl.multiple_of(out_rows, 16)  # bytes
    tl.store(out_rows[:, None] + value_dim[None, :], out_tile.to(out.dtype.element_ty), mask=out_mask)


def attention_decode_out(given: Any) -> Tensor:
    """Does `attention_decode`, but writes the output to ``given.out`` and returns only the lse.

    Each row of ``given.out`` must begin at a multiple of 16 bytes.
    """
    return _decode(given, given.out)


def attention_decode(given: Any) -> tuple[Tensor, Tensor]:
    """Appends ``k_new``, ``v_new`` to the caches, attends over them, and returns ``out [B, Hq, Sq, Dv]``, in the
    query's order of dims, and ``lse [B, Hq, Sq]`` fp32.

    ``given`` holds the op's arguments by name (csrc/bindings.cpp). Shapes and meanings are as in
    ``fastattn.attention_with_kv_cache``; the caller has checked them. A negative window side is unbounded; ``causal``
    is ``window_right = 0``. ``num_splits`` > 0 is honoured up to the number of key blocks that a query can see; 0 lets
    `tiles.decode_splits` choose. Raises ValueError if the capacity is 2^30 tokens or more.
    """
    out = empty_like_heads(given.query, given.v_cache.shape[3])
    return out, _decode(given, out)


def attention_split_keys(given: Any) -> tuple[Tensor, Tensor]:
    """Does `attention_decode` over all of the keys ``[B, Hkv, Sk, D]`` and values ``[B, Hkv, Sk, Dv]``, copied where
    they are not aligned."""
    key = readable(given.key)
    absent = ("k_new", "v_new", "rotary_cos", "rotary_sin", "block_table", "k_scale", "v_scale", "tree_mask")
    call = SimpleNamespace(
        **given._asdict(),
        **dict.fromkeys(absent),
        k_cache=key,
        v_cache=readable(given.value),
        cache_seqlens=torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device),
        rotary_interleaved=False,
        num_splits=0,
        batch_invariant=False,
    )
    return attention_decode(call)


def _decode(given: Any, out: Tensor) -> Tensor:
    """Does `attention_decode` with the output written to ``out``, and returns the lse."""
    query, k_cache, v_cache, block_table = given.query, given.k_cache, given.v_cache, given.block_table
    batch, num_heads, num_queries, head_dim = query.shape
    kv_heads, block_rows, value_dim = v_cache.shape[1:]
    num_new = 0 if given.k_new is None else given.k_new.shape[2]
    capacity = block_rows if block_table is None else block_table.shape[1] * block_rows
    if capacity >= UNBOUNDED:
        raise ValueError(f"k_cache: expected a capacity below 2^30 tokens, got {capacity}")
    cache_seqlens = given.cache_seqlens.contiguous()
    if num_new > 0:
        launch_append(given, cache_seqlens, capacity)

    lse = query.new_empty((batch, num_heads, num_queries), dtype=torch.float32)
    if lse.numel() == 0:
        return lse

    device = kernel_facts(query.device)
    query = readable(query)
    group = num_heads // kv_heads
    page_size = 0 if block_table is None else block_rows
    rows, itemsize = num_queries * group, k_cache.element_size()
    tile = decode_tile(head_dim, value_dim, rows, itemsize, device.shared_memory_bytes, page_size)
    m_blocks = ceil_div(rows, tile.block_m)
    key_blocks = decode_key_blocks(capacity, num_queries, given.window_left, tile.block_n)
    splits = decode_splits(
        batch, kv_heads, m_blocks, key_blocks, device.num_sms, tile, given.num_splits, given.batch_invariant
    )

    is_split = splits.num_splits > 1
    split_out, split_lse = out[None], lse[None]
    if is_split:
        split_out = query.new_empty((splits.num_splits, *out.shape), dtype=torch.float32)
        split_lse = query.new_empty((splits.num_splits, *lse.shape), dtype=torch.float32)
    alibi_slopes, sinks, tree_mask = contiguous(given.alibi_slopes), contiguous(given.sinks), given.tree_mask
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.view(-1, num_heads)
    scale, softcap, window_left, window_right = given.scale, given.softcap, given.window_left, given.window_right

    split_kernel[(batch * kv_heads * splits.num_splits * m_blocks,)](
        query, query.stride()[:3], *cache_arguments(given), cache_seqlens,
        *table_arguments(given), *rotary_arguments(given),
        alibi_slopes, 0 if alibi_slopes is None or alibi_slopes.shape[0] == 1 else num_heads, sinks,
        None if tree_mask is None else tree_mask.view(torch.uint8),
        (0, 0, 0) if tree_mask is None else tree_mask.stride(),
        split_out, split_out.stride()[:4], split_lse, split_lse.stride(),
        scale / softcap if softcap > 0 else scale, softcap,
        min(window_left, UNBOUNDED) if window_left >= 0 else UNBOUNDED,
        min(window_right, UNBOUNDED) if window_right >= 0 else UNBOUNDED,
        capacity, num_new, kv_heads, num_queries, splits.num_splits, splits.blocks_per_split,
        GROUP=group,
        **cache_constexprs(given),
        ROTARY_DIM=0 if given.rotary_cos is None else 2 * given.rotary_cos.shape[1],
        INTERLEAVED=given.rotary_interleaved,
        PAGE_SIZE=page_size,
        QUANTISED=k_cache.dtype in FEATURE_OF_CACHE,
        HAS_SOFTCAP=softcap > 0, HAS_ALIBI=alibi_slopes is not None, HAS_SINK=sinks is not None,
        ROWS_DIFFER=tree_mask is not None or (num_queries > 1 and (window_left >= 0 or window_right >= 0)),
        SPLIT=is_split, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if is_split:
        combine_kernel[(lse.numel(),)](
            split_out, split_lse, sinks, out, out.stride()[:3], lse,
            splits.num_splits, lse.numel(), num_heads, num_queries,
            VALUE_DIM=value_dim, DV_PAD=padded_head_dim(value_dim), HAS_SINK=sinks is not None,
            COMBINE_SPLITS=COMBINE_SPLITS, num_warps=ceil_div(padded_head_dim(value_dim), 256), enable_fp_fusion=True,
        )  # fmt: skip
    return lse
