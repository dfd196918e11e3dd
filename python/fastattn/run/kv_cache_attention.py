"""Attention over a cache as the choice says: by the decoding kernel, or a prompt by the attention kernel over pages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.dispatch.call import Choice
from fastattn.ops.attention import AttentionArguments, attention_forward
from fastattn.ops.decode import DecodeArguments, attention_decode, attention_decode_out
from fastattn.rotary import rotary


def kv_cache_attention(choice: Choice, arguments: DecodeArguments, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Appends to the caches in place, then attends over them: output and lse. Not differentiable.

    ``out``: the output is to be there.
    """
    if choice.prefills:
        result, lse = _prefill(choice.backend, arguments)
        return (result if out is None else out.copy_(result)), lse
    if out is not None:
        return out, attention_decode_out(choice.backend, arguments, out)
    return attention_decode(choice.backend, arguments)


def _prefill(backend: str, arguments: DecodeArguments) -> tuple[Tensor, Tensor]:
    """For many queries, a prompt: the append is a launch of its own, and the attention kernel follows.

    The decoding kernel would read all keys once for every 16 rows of queries; the attention kernel does for every 128.
    """
    query, k_cache = arguments.query, arguments.k_cache
    if arguments.k_new is not None:
        attention_decode(backend, arguments._replace(query=query[:, :, :0]))
    (batch, heads, num_queries, head_dim), device = query.shape, query.device
    table = arguments.block_table
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
    capacity = table.shape[1] * k_cache.shape[2]
    num_new = 0 if arguments.k_new is None else arguments.k_new.shape[2]
    total = (arguments.cache_seqlens.clamp(0, capacity) + num_new).clamp(max=capacity)
    cos, sin = arguments.rotary_cos, arguments.rotary_sin
    if cos is not None and sin is not None:
        position = (total - num_queries)[:, None] + torch.arange(num_queries, device=device)
        position = position.clamp(0, cos.shape[0] - 1)
        query = rotary(query, cos[position], sin[position], arguments.rotary_interleaved)
    packed_out, packed_lse, _ = attention_forward(
        backend,
        AttentionArguments(
            query.transpose(1, 2).reshape(batch * num_queries, heads, head_dim),
            k_cache,
            arguments.v_cache,
            alibi_slopes=arguments.alibi_slopes,
            sinks=arguments.sinks,
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device) * num_queries,
            cu_seqlens_k=F.pad(total.cumsum(0, dtype=torch.int32), (1, 0)),
            max_seqlen_q=num_queries,
            max_seqlen_k=capacity,
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
