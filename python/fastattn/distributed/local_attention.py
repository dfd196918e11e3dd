"""Computes attention within one rank: blocks for some or all of the heads, and the effect of sinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.call import AttentionCall
from fastattn.dispatch.thread_state import Asked, as_asked
from fastattn.distributed.blocks import Block
from fastattn.functional.attention_block import BackwardTensors, add_gradients_of_block, attention_block

Tensors: TypeAlias = tuple[Tensor, ...]
OtherSums: TypeAlias = tuple[Tensor, Tensor | None]  # sums of the gradients of query, and of slopes or None


class LocalAttention(NamedTuple):
    """Holds the options that all blocks share. The rank's heads begin at number ``first_head`` of ``all_heads``.

    ``options`` is a call without query, key and value; each block sets its own window. ``asked`` is what the calling
    thread has asked for, such as a backend. It also applies to gradients, which autograd computes in another thread.
    """

    options: AttentionCall
    first_head: int
    all_heads: int
    asked: Asked

    def with_options(self, **options: Any) -> LocalAttention:
        return self._replace(options=self.options._replace(**options))

    def for_heads(self, heads: slice) -> LocalAttention:
        """Returns this attention for some of its heads."""
        slopes, ranges = self.options.alibi_slopes, self.options.key_ranges
        attention = self.with_options(
            alibi_slopes=None if slopes is None else slopes[..., heads],
            key_ranges=ranges if ranges is None or ranges.shape[1] == 1 else ranges[:, heads],
        )
        return attention._replace(first_head=self.first_head + heads.start)

    def results(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Returns output and lse of ``query`` over ``key`` and ``value``, which are the rows and keys of ``block``."""
        return joined([attention_block(call) for call in self.calls(query, key, value, block)], 0)

    def gradients(
        self, tensors: BackwardTensors, heads: slice, blocks: Iterable[Block], other_sums: OtherSums
    ) -> tuple[Tensor, Tensor]:
        """Returns gradients of the keys and values of ``heads``; adds gradients of query and slopes to ``other_sums``.

        In ``tensors``, keys and values have only the KV heads of ``heads``. The other tensors and ``other_sums`` have
        all heads of the rank.
        """
        query_sum, slopes_sum = other_sums
        key_sum, value_sum = (zeros_of_sums(t, tensors.lse.dtype) for t in (tensors.key, tensors.value))
        own_slopes = None if slopes_sum is None else slopes_sum[..., heads]
        attention = self.for_heads(heads)
        for block in blocks:
            sums = query_sum[:, heads, block.rows], key_sum[:, :, block.keys], value_sum[:, :, block.keys]
            of_block = tensors.of(heads, block.rows, block.keys)
            for entries, call in attention._calls_of_entries(of_block.query, block):
                grad_query, grad_key, grad_value = (total[entries] for total in sums)
                grad_slopes = _slopes_of(own_slopes, block, entries)
                of_entries = BackwardTensors._make(tensor[entries] for tensor in of_block)
                with as_asked(self.asked):
                    add_gradients_of_block((grad_query, grad_key, grad_value), grad_slopes, of_entries, call)
        return key_sum, value_sum

    def calls(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> list[AttentionCall]:
        """Returns the calls that compute ``block``, whose rows and keys are those of the tensors."""
        return [
            call._replace(query=query[entries], key=key[entries], value=value[entries])
            for entries, call in self._calls_of_entries(query, block)
        ]

    def _calls_of_entries(self, query: Tensor, block: Block) -> list[tuple[slice, AttentionCall]]:
        """Returns the calls that compute a block, without query, key and value, each with its slice of the batch.

        Dropout numbers the heads through all batch entries or documents. If the rank has only some of the heads, their
        numbers are not consecutive from one batch entry to the next, so each call computes one batch entry.
        """
        batch, heads = query.shape[:2]
        if block.document is not None:
            firsts = [(slice(0, batch), block.document * self.all_heads)]
        elif self.options.dropout_p == 0 or heads == self.all_heads or batch < 2:
            firsts = [(slice(0, batch), 0)]
        else:
            firsts = [(slice(b, b + 1), b * self.all_heads) for b in range(batch)]
        return [
            (
                entries,
                self.options._replace(
                    window=block.window,
                    alibi_slopes=_slopes_of(self.options.alibi_slopes, block, entries),
                    key_ranges=_ranges_of(self.options.key_ranges, block, entries),
                    first_row=block.first_row,
                    first_key=block.first_key,
                    first_head=self.first_head + first,
                ),
            )
            for entries, first in firsts
        ]


class Inputs(NamedTuple):
    """Holds the tensors with which a rank attends (query, key and value are ``[B, H, rows, D]``) and the options.

    The slopes and sinks are not in the options, because autograd only tracks tensors that are themselves arguments of
    a ``torch.autograd.Function``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None
    sinks: Tensor | None
    attention: LocalAttention

    def exchanged(self, group: dist.ProcessGroup, to_own_heads: Callable[[Tensor], Tensor]) -> Inputs:
        """Returns the inputs with this rank's heads, after the ranks of ``group`` have exchanged rows for heads."""
        heads = self.query.shape[1] // dist.get_world_size(group)
        own = slice(dist.get_rank(group) * heads, (dist.get_rank(group) + 1) * heads)
        slopes = None if self.slopes is None else self.slopes[..., own]
        sinks = None if self.sinks is None else self.sinks[own]
        query, key, value = map(to_own_heads, self[:3])
        attention, ranges = self.attention.for_heads(own), self.attention.options.key_ranges
        if ranges is not None:
            if ranges.shape[1] == 1:  # repeat the head for each rank, so that all receive it
                ranges = ranges.expand(-1, dist.get_world_size(group), -1, -1, -1)
            attention = attention.with_options(key_ranges=to_own_heads(ranges.flatten(-2)).unflatten(-1, (-1, 2)))
        return Inputs(query, key, value, slopes, sinks, attention)


def joined(results: Sequence[tuple[Tensor, ...]], dim: int) -> tuple[Tensor, Tensor]:
    """Concatenates the outputs, and the lses, of several calls in ``dim``. A single result is not copied."""
    out, lse = results[0] if len(results) == 1 else (torch.cat(each, dim) for each in zip(*results, strict=True))
    return out, lse


def no_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and lse of rows that have seen no key yet, in at least float32."""
    exact = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=exact)
    return out, query.new_full(query.shape[:3], -math.inf, dtype=exact)


def _slopes_of(slopes: Tensor | None, block: Block, entries: slice) -> Tensor | None:
    """Returns the rows of ``slopes`` (or of the sums of their gradients) that belong to a block, as a view.

    ``slopes`` is ``[Hq]``, or ``[B, Hq]`` with a row for each batch entry or document.
    """
    if slopes is None or slopes.dim() == 1:
        return slopes
    return slopes[entries] if block.document is None else slopes[block.document]


def _ranges_of(ranges: Tensor | None, block: Block, entries: slice) -> Tensor | None:
    """Returns the ranges of a block's rows, counted from the block's first key and clipped to the block's keys."""
    if ranges is None:
        return None
    own = (ranges if ranges.shape[0] == 1 else ranges[entries])[:, :, block.rows]
    return (own - block.first_key).clamp(0, block.keys.stop - block.keys.start)


def query_heads(kv_heads: slice, query: Tensor, key: Tensor) -> slice:
    """Returns the query heads that attend to ``kv_heads``."""
    per_kv_head = query.shape[1] // max(1, key.shape[1])
    return slice(kv_heads.start * per_kv_head, kv_heads.stop * per_kv_head)


def zeros_of_sums(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns zeros for sums of gradients ``[B, H, S, D]``, contiguous as the kernels need them."""
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns output and lse after each row has also attended to its head's sink, a logit without a value."""
    if sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    fraction = (lse - with_sink).exp().masked_fill(lse == -math.inf, 0.0)
    return out * fraction[..., None], with_sink


def gradient_of_sinks(
    sinks: Tensor | None, grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor
) -> Tensor | None:
    """Returns the gradient of the sinks from this rank's rows; ``out`` and ``lse`` are the results with sinks."""
    if sinks is None:
        return None
    fraction = (sinks.to(lse.dtype)[None, :, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
    row_gradient = fraction * (grad_lse - (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1))
    return row_gradient.sum((0, 2)).to(sinks.dtype)
