"""Runs attention over a cache on the chosen backend, by the decoding kernel, or for prompts by the attention kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.call import AttentionCall, DecodeCall
from fastattn.dispatch.request import Choice
from fastattn.dispatch.support import FEATURE_OF_CACHE
from fastattn.ops.attention import attention_forward
from fastattn.ops.decode import Dequantization, attention_decode, attention_decode_out, dequantize_cache
from fastattn.rotary import rotary_at
from fastattn.run.attention import with_exact_options


def kv_cache_attention(choice: Choice, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Appends to the caches in place, attends over them, and returns output and lse without gradients.

    If the call has an ``out``, the output is written to it. ``tree_mask`` may have any shape that the public function
    takes, and the slopes any dtype.
    """
    call, tree = with_exact_options(call), call.tree_mask
    if tree is not None:
        call = call._replace(tree_mask=tree.expand(call.query.shape[0], *tree.shape[-2:]))
    if choice.op.name == "attention":
        result, lse = _prefill(choice.backend, call)
        return (result if call.out is None else call.out.copy_(result)), lse
    if call.out is not None:
        return call.out, attention_decode_out(choice.backend, call)
    return attention_decode(choice.backend, call)


# The 16-bit copy of 8-bit caches takes at most so many bytes at a time, unless one KV head of a sequence needs more.
_DEQUANTISED_BYTES = 256 << 20


def _prefill(backend: str, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Attends with the many queries of a prompt: one launch appends, then the attention kernel runs.

    The decoding kernel would read all keys once for every 16 or 32 rows of queries; the attention kernel reads them
    once for every 128. It needs 16-bit floats, so another kernel converts 8-bit caches first, once for all rows.
    """
    query, cos, sin = call.query, call.rotary_cos, call.rotary_sin
    if call.k_new is not None:
        attention_decode(backend, call._replace(query=query[:, :, :0]))
    num_queries, capacity = query.shape[2], call.capacity
    total = (call.cache_seqlens.clamp(0, capacity) + call.num_new).clamp(max=capacity)
    if cos is not None and sin is not None:
        position = (total - num_queries)[:, None] + torch.arange(num_queries, device=query.device)
        query = rotary_at(query, cos, sin, position, call.rotary_interleaved)
    appended = call._replace(query=query, cache_seqlens=total)
    if call.k_cache.dtype not in FEATURE_OF_CACHE:
        return _attend(backend, appended)
    calls = list(_within_limit(appended))
    if len(calls) == 1:
        return _attend(backend, _dequantised(backend, appended))
    out = query.new_empty(*query.shape[:3], call.v_cache.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for sequences, heads, smaller in calls:
        out[sequences, heads], lse[sequences, heads] = _attend(backend, _dequantised(backend, smaller))
    return out, lse


def _attend(backend: str, call: DecodeCall) -> tuple[Tensor, Tensor]:
    """Runs the attention kernel over ``cache_seqlens`` tokens in pages; a contiguous cache is a page per sequence."""
    query, table = call.query, call.block_table
    (batch, heads, num_queries, head_dim), device = query.shape, query.device
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    packed_out, packed_lse, _ = attention_forward(
        backend,
        AttentionCall(
            query.transpose(1, 2).reshape(batch * num_queries, heads, head_dim),
            call.k_cache,
            call.v_cache,
            alibi_slopes=call.alibi_slopes,
            sinks=call.sinks,
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
            cu_seqlens_k=F.pad(call.cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=num_queries,
            max_seqlen_k=call.capacity,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            block_table=table,
            batch_invariant=call.batch_invariant,
        ),
    )
    out = packed_out.view(batch, num_queries, heads, -1).transpose(1, 2)
    return out, packed_lse.view(heads, batch, num_queries).transpose(0, 1)


def _dequantised(backend: str, call: DecodeCall) -> DecodeCall:
    """Returns the same call over a 16-bit copy of its 8-bit caches, with a page for each entry of the table."""
    k_cache, v_cache, table, query = call.k_cache, call.v_cache, call.block_table, call.query
    blocks = query.shape[0] * (1 if table is None else table.shape[1])
    k_out, v_out = (query.new_empty(blocks, *cache.shape[1:]) for cache in (k_cache, v_cache))
    dequantize_cache(
        backend,
        Dequantization(k_cache, v_cache, call.k_scale, call.v_scale, call.cache_seqlens, table, k_out, v_out),
    )
    if table is not None:
        own = torch.arange(blocks, dtype=torch.int32, device=query.device).view(table.shape)
        table = torch.where((table >= 0) & (table < k_cache.shape[0]), own, -1)
    return call._replace(k_cache=k_out, v_cache=v_out, k_scale=None, v_scale=None, block_table=table)


def _within_limit(call: DecodeCall) -> Iterator[tuple[slice, slice, DecodeCall]]:
    """Yields slices of the sequences and of the query heads, with the call over them. The call's 16-bit copy takes at
    most _DEQUANTISED_BYTES, or holds one KV head of one sequence."""
    query, k_cache, v_cache, slopes = call.query, call.k_cache, call.v_cache, call.alibi_slopes
    batch, kv_heads = query.shape[0], k_cache.shape[1]
    group = query.shape[1] // kv_heads
    head_bytes = call.capacity * (k_cache.shape[3] + v_cache.shape[3]) * query.element_size()
    at_once = max(_DEQUANTISED_BYTES // head_bytes, 1)
    num_heads, num_sequences = min(at_once, kv_heads), min(max(at_once // kv_heads, 1), batch)
    is_paged = call.block_table is not None

    def sliced(tensor: Tensor | None, sequences: slice, heads: slice) -> Any:
        """Slices a cache or its scales; given scales are [Hkv], [1] or []."""
        if tensor is None:
            return None
        if tensor.dim() < 3:
            return tensor if tensor.numel() == 1 else tensor[heads]
        return tensor[:, heads] if is_paged else tensor[sequences, heads]

    for first, kv_first in itertools.product(range(0, batch, num_sequences), range(0, kv_heads, num_heads)):
        sequences, kv = slice(first, first + num_sequences), slice(kv_first, kv_first + num_heads)
        heads = slice(kv.start * group, kv.stop * group)
        smaller = call._replace(
            query=query[sequences, heads],
            cache_seqlens=call.cache_seqlens[sequences],
            block_table=None if call.block_table is None else call.block_table[sequences],
            alibi_slopes=None if slopes is None else slopes[sequences if slopes.shape[0] > 1 else slice(None), heads],
            sinks=None if call.sinks is None else call.sinks[heads],
            k_cache=sliced(k_cache, sequences, kv),
            v_cache=sliced(v_cache, sequences, kv),
            k_scale=sliced(call.k_scale, sequences, kv),
            v_scale=sliced(call.v_scale, sequences, kv),
        )
        yield sequences, heads, smaller
