"""Runs attention over a cache as the choice says: by the decoding kernel, or for a prompt by the attention kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.dispatch.call import Choice
from fastattn.dispatch.support import FEATURE_OF_CACHE
from fastattn.ops.attention import AttentionArguments, attention_forward
from fastattn.ops.decode import DecodeArguments, attention_decode, attention_decode_out
from fastattn.ops.dequantize import DequantizeArguments, dequantize_cache
from fastattn.rotary import rotary


def kv_cache_attention(choice: Choice, arguments: DecodeArguments, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Appends to the caches in place, attends over them, and returns output and lse, not differentiable.

    If ``out`` is given, the output is written to it.
    """
    if choice.prefills:
        result, lse = _prefill(choice.backend, arguments)
        return (result if out is None else out.copy_(result)), lse
    if out is not None:
        return out, attention_decode_out(choice.backend, arguments, out)
    return attention_decode(choice.backend, arguments)


# The 16-bit copy of 8-bit caches has at most this many bytes at a time, or what one KV head of a sequence needs.
_DEQUANTISED_BYTES = 256 << 20


def _prefill(backend: str, arguments: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Attends with the many queries of a prompt: one launch appends, then the attention kernel runs.

    The decoding kernel would read all keys once for every 16 or 32 rows of queries; the attention kernel reads them
    once for every 128. It needs 16-bit floats: another kernel converts 8-bit caches, once for all rows.
    """
    query, cos, sin = arguments.query, arguments.rotary_cos, arguments.rotary_sin
    if arguments.k_new is not None:
        attention_decode(backend, arguments._replace(query=query[:, :, :0]))
    num_queries, capacity = query.shape[2], _capacity(arguments)
    num_new = 0 if arguments.k_new is None else arguments.k_new.shape[2]
    total = (arguments.cache_seqlens.clamp(0, capacity) + num_new).clamp(max=capacity)
    if cos is not None and sin is not None:
        position = (total - num_queries)[:, None] + torch.arange(num_queries, device=query.device)
        position = position.clamp(0, cos.shape[0] - 1)
        query = rotary(query, cos[position], sin[position], arguments.rotary_interleaved)
    appended = arguments._replace(query=query, cache_seqlens=total)
    if arguments.k_cache.dtype not in FEATURE_OF_CACHE:
        return _attend(backend, appended)
    parts = list(_parts(appended))
    if len(parts) == 1:
        return _attend(backend, _dequantised(backend, appended))
    out = query.new_empty(*query.shape[:3], arguments.v_cache.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for sequences, heads, part in parts:
        out[sequences, heads], lse[sequences, heads] = _attend(backend, _dequantised(backend, part))
    return out, lse


def _capacity(arguments: DecodeArguments) -> int:
    """Returns how many tokens of a sequence fit into the cache."""
    table, rows = arguments.block_table, arguments.k_cache.shape[2]
    return rows if table is None else table.shape[1] * rows


def _attend(backend: str, arguments: DecodeArguments) -> tuple[Tensor, Tensor]:
    """Attends by the attention kernel over ``cache_seqlens`` tokens in pages; a sequence's part of a contiguous cache
    is one page."""
    query, table = arguments.query, arguments.block_table
    (batch, heads, num_queries, head_dim), device = query.shape, query.device
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    packed_out, packed_lse, _ = attention_forward(
        backend,
        AttentionArguments(
            query.transpose(1, 2).reshape(batch * num_queries, heads, head_dim),
            arguments.k_cache,
            arguments.v_cache,
            alibi_slopes=arguments.alibi_slopes,
            sinks=arguments.sinks,
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
            cu_seqlens_k=F.pad(arguments.cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=num_queries,
            max_seqlen_k=_capacity(arguments),
            scale=arguments.scale,
            window_left=arguments.window_left,
            window_right=arguments.window_right,
            softcap=arguments.softcap,
            block_table=table,
            batch_invariant=arguments.batch_invariant,
        ),
    )
    out = packed_out.view(batch, num_queries, heads, -1).transpose(1, 2)
    return out, packed_lse.view(heads, batch, num_queries).transpose(0, 1)


def _dequantised(backend: str, arguments: DecodeArguments) -> DecodeArguments:
    """Returns the same call over a 16-bit copy of its 8-bit caches, with a page for each entry of the table."""
    k_cache, v_cache, table, query = arguments.k_cache, arguments.v_cache, arguments.block_table, arguments.query
    blocks = query.shape[0] * (1 if table is None else table.shape[1])
    k_out, v_out = (query.new_empty(blocks, *cache.shape[1:]) for cache in (k_cache, v_cache))
    dequantize_cache(
        backend,
        DequantizeArguments(
            k_cache, v_cache, arguments.k_scale, arguments.v_scale, arguments.cache_seqlens, table, k_out, v_out
        ),
    )
    if table is not None:
        own = torch.arange(blocks, dtype=torch.int32, device=query.device).view(table.shape)
        table = torch.where((table >= 0) & (table < k_cache.shape[0]), own, -1)
    return arguments._replace(k_cache=k_out, v_cache=v_out, k_scale=None, v_scale=None, block_table=table)


def _parts(arguments: DecodeArguments) -> Iterator[tuple[slice, slice, DecodeArguments]]:
    """Yields parts of the call, each with so few sequences and heads that its 16-bit copy stays within the limit."""
    query, k_cache, v_cache, slopes = arguments.query, arguments.k_cache, arguments.v_cache, arguments.alibi_slopes
    k_scale, v_scale = arguments.k_scale, arguments.v_scale
    batch, kv_heads = query.shape[0], k_cache.shape[1]
    group = query.shape[1] // kv_heads
    of_head = _capacity(arguments) * (k_cache.shape[3] + v_cache.shape[3]) * query.element_size()
    at_once = max(_DEQUANTISED_BYTES // of_head, 1)
    num_heads, num_sequences = min(at_once, kv_heads), min(max(at_once // kv_heads, 1), batch)
    is_paged = arguments.block_table is not None

    def of_cache(tensor: Tensor, sequences: slice, heads: slice) -> Tensor:
        """Returns a part of a cache or of its scales, which may be given ones, [Hkv], [1] or []."""
        if tensor.dim() < 3:
            return tensor if tensor.numel() == 1 else tensor[heads]
        return tensor[:, heads] if is_paged else tensor[sequences, heads]

    for first, kv_first in itertools.product(range(0, batch, num_sequences), range(0, kv_heads, num_heads)):
        sequences, of_kv = slice(first, first + num_sequences), slice(kv_first, kv_first + num_heads)
        heads = slice(of_kv.start * group, of_kv.stop * group)
        part = arguments._replace(
            query=query[sequences, heads],
            cache_seqlens=arguments.cache_seqlens[sequences],
            block_table=None if arguments.block_table is None else arguments.block_table[sequences],
            alibi_slopes=None if slopes is None else slopes[sequences if slopes.shape[0] > 1 else slice(None), heads],
            sinks=None if arguments.sinks is None else arguments.sinks[heads],
            k_cache=of_cache(k_cache, sequences, of_kv),
            v_cache=of_cache(v_cache, sequences, of_kv),
            k_scale=None if k_scale is None else of_cache(k_scale, sequences, of_kv),
            v_scale=None if v_scale is None else of_cache(v_scale, sequences, of_kv),
        )
        yield sequences, heads, part
