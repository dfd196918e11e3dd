"""Attention of this rank's rows over the keys of all ranks, or over those that it reads, gathered some heads at a time.

The keys of the next heads arrive while the rank attends with the heads before. The backward pass gathers again, so that
between the two passes a rank holds its own keys alone. It adds up the gradients of keys in float32, and each rank gets
the sums for its own keys (Grattafiori et al., "The Llama 3 herd of models", 2024, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.distributed.blocks import PackedSpread, Spread
from fastattn.distributed.collectives import Started
from fastattn.distributed.gathering import Gathering, gathering_of
from fastattn.distributed.local_attention import (
    LocalAttention,
    gradient_of_sinks,
    query_heads,
    with_sinks,
    zeros_of_sums,
)
from fastattn.functional.attention_block import BackwardTensors

_CALL = "context_parallel_attention with strategy 'allgather'"

MOST_GROUPS_OF_HEADS = 4  # more groups mean more messages and launches, and hide little more of the communication


@torch.compiler.disable  # for the same reason as ring_attention
def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    spread: Spread | PackedSpread,
    local: LocalAttention,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Returns output and lse of this rank's rows, differentiable in all tensors; ``local`` has no slopes."""
    out, lse = _GatheredAttention.apply(query, key, value, slopes, sinks, spread, local, group)
    return out, lse


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        spread: Spread | PackedSpread,
        local: LocalAttention,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=exact)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=exact)
        attention, gathering = local.with_slopes(slopes), gathering_of(spread, group)
        for heads, _, keys, values in _gathered(query, key, value, gathering, spread.world_size):
            for block in gathering.blocks:
                own_query = query[:, heads, block.rows]
                found = attention.of_heads(heads).attend(
                    own_query, keys[:, :, block.keys], values[:, :, block.keys], block
                )
                out[:, heads, block.rows], lse[:, heads, block.rows] = found
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, slopes, sinks, out, lse)
        ctx.spread, ctx.local, ctx.group = spread, local, group
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, sinks, out, lse = ctx.saved_tensors
        attention, gathering = ctx.local.with_slopes(slopes), gathering_of(ctx.spread, ctx.group)
        of_query = zeros_of_sums(query, lse.dtype)
        of_slopes = torch.zeros_like(slopes, dtype=lse.dtype) if ctx.needs_input_grad[3] else None
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        sent_back = None  # at most one group of heads at a time, as its sums take memory while the next one computes
        for heads, kv_heads, keys, values in _gathered(query, key, value, gathering, ctx.spread.world_size):
            tensors = BackwardTensors(grad_out, grad_lse, query, keys, values, out, lse)
            of_keys, of_values = attention.gradients(tensors, heads, gathering.blocks, of_query, of_slopes)
            _finish(sent_back, (grad_key, grad_value), gathering)
            sent_back = kv_heads, [gathering.start_back(t.movedim(2, 0)) for t in (of_keys, of_values)]
        _finish(sent_back, (grad_key, grad_value), gathering)
        grad_slopes = None if of_slopes is None else of_slopes.to(slopes.dtype)
        grad_sinks = gradient_of_sinks(sinks, grad_out, grad_lse, out, lse)
        return of_query.to(query.dtype), grad_key, grad_value, grad_slopes, grad_sinks, None, None, None


# --- What travels -----------------------------------------------------------------------------------------------------


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, gathering: Gathering, world_size: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields the query heads, KV heads, gathered keys and gathered values of each group of heads."""
    kv_heads = key.shape[1]
    num_groups = min(kv_heads, MOST_GROUPS_OF_HEADS) if world_size > 1 else 1
    bounds = [kv_heads * i // num_groups for i in range(num_groups + 1)] if num_groups else [0]
    of_keys = [slice(begin, end) for begin, end in pairwise(bounds)]

    def start(heads: slice) -> list[Started]:
        return [gathering.start(tensor[:, heads].movedim(2, 0)) for tensor in (key, value)]

    under_way = start(of_keys[0]) if of_keys else []
    for i, heads in enumerate(of_keys):
        keys, values = (gathering.by_places(started.wait(_CALL)).movedim(0, 2) for started in under_way)
        under_way = start(of_keys[i + 1]) if i + 1 < len(of_keys) else []
        yield query_heads(heads, query, key), heads, keys, values


def _finish(
    sent_back: tuple[slice, list[Started]] | None, gradients: tuple[Tensor, Tensor], gathering: Gathering
) -> None:
    if sent_back is None:
        return
    kv_heads, under_way = sent_back
    for gradient, started in zip(gradients, under_way, strict=True):
        gradient[:, kv_heads] = gathering.own_sums(started.wait(_CALL)).movedim(0, 2)
