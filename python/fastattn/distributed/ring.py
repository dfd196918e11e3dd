"""Attention block by block: the keys and values of one rank after the other (Liu et al., "Ring attention", 2023).

In step s a rank attends to the keys of the rank s places before it, while those of the next step come in. What it
finds is merged in float32. In the backward pass it goes through the same blocks, with the output and the lse of all
keys, and sends the gradients of a block's keys to the rank that has them. Keys come from that rank itself, not from
hand to hand: as many bytes, and no rank waits for another's work. What a causal mask hides is not sent nor computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.distributed.merge import merge_attention
from fastattn.functional.attention import attention
from fastattn.functional.attention_backward import attention_backward

_ALL = slice(None)


class Block(NamedTuple):
    """The rows of a rank that attend to some of another's keys: all of them to all, or with its own keys causally."""

    rows: slice
    keys: slice
    is_causal: bool


def block_of(layout: str, causal: bool, rank: int, source: int, length: int) -> Block | None:
    """What ``rank`` computes of the keys of ``source``, each with ``length`` rows; None: nothing.

    In zigzag order a rank's second part lies behind the first parts of all others, and in front of the second parts of
    those before it.
    """
    if not causal or rank == source:
        return Block(_ALL, _ALL, causal)
    if layout == "zigzag":
        half = length // 2
        return Block(_ALL, slice(0, half), False) if source < rank else Block(slice(half, None), _ALL, False)
    return Block(_ALL, _ALL, False) if source < rank else None


class RingOptions(NamedTuple):
    layout: str
    causal: bool
    softcap: float
    scale: float | None
    deterministic: bool | None

    def of_attention(self, block: Block) -> dict[str, Any]:
        window = (-1, 0) if block.is_causal else (-1, -1)
        return {"window": window, "softcap": self.softcap, "scale": self.scale, "deterministic": self.deterministic}


@torch.compiler.disable  # messages that are under way while kernels run cannot be traced: a graph ends before the call
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: RingOptions, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows, differentiable in query, key, value and sinks."""
    out, lse = _RingAttention.apply(query, key, value, sinks, options, group)
    return out, lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        options: RingOptions,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=exact)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=exact)
        for _, block, keys, values in _blocks(key, value, options, group):
            if block is None:
                continue
            found = attention(query[:, :, block.rows], keys, values, return_lse=True, **options.of_attention(block))
            merged = merge_attention(out[:, :, block.rows], lse[:, :, block.rows], *found)
            out[:, :, block.rows], lse[:, :, block.rows] = merged
        if sinks is not None:
            of_sinks = sinks.to(exact)[None, :, None].expand_as(lse)
            out, lse = merge_attention(out, lse, torch.zeros_like(out), of_sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.options, ctx.group = options, group
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (query, key, value)]
        sent = _GradientsOfKeys(grads[1], grads[2], query.dtype, ctx.options, ctx.group)
        for step, block, keys, values in _blocks(key, value, ctx.options, ctx.group):
            of_keys: list[Tensor] = []
            if block is not None:
                rows = block.rows
                of_rows, *of_keys = attention_backward(
                    grad_out[:, :, rows],
                    query[:, :, rows],
                    keys,
                    values,
                    out[:, :, rows],
                    lse[:, :, rows],
                    grad_lse=grad_lse[:, :, rows],
                    **ctx.options.of_attention(block),
                )
                grads[0][:, :, rows] += of_rows
            sent.exchange(step, of_keys)
        sent.finish()
        grad_sinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[None, :, None] - lse).exp().masked_fill(lse == -math.inf, 0.0)
            of_sinks = share * (grad_lse - (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1))
            grad_sinks = of_sinks.sum((0, 2)).to(sinks.dtype)
        return *(grad.to(t.dtype) for grad, t in zip(grads, (query, key, value), strict=True)), grad_sinks, None, None


# --- What travels -----------------------------------------------------------------------------------------------------


class _Transfer:
    """Messages between ranks that are under way: ``(peer, tensors)`` to send, and to receive into."""

    def __init__(
        self,
        sent: tuple[int, list[Tensor]] | None,
        received: tuple[int, list[Tensor]] | None,
        first_tag: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.received = received[1] if received is not None else []
        self._sent = sent  # lives until the messages have left
        self._works: list[dist.Work] = []
        messages = []
        for operation, side in ((dist.isend, sent), (dist.irecv, received)):
            peer, tensors = side if side is not None else (0, [])
            for tag, tensor in enumerate(tensors, first_tag):
                global_peer = dist.get_global_rank(group, peer)
                messages.append(dist.P2POp(operation, tensor, global_peer, group=group, tag=tag))
        if messages:
            self._works = dist.batch_isend_irecv(messages)

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self.received


_KEYS_TAG, _GRADIENTS_TAG = 0, 2  # of keys, then of values


def _blocks(
    key: Tensor, value: Tensor, options: RingOptions, group: dist.ProcessGroup
) -> Iterator[tuple[int, Block | None, Tensor, Tensor]]:
    """For each step: its block, and the keys and values of that block."""
    rank, world_size, length = dist.get_rank(group), dist.get_world_size(group), key.shape[2]

    def start(step: int) -> tuple[Block | None, _Transfer]:
        reader, source = (rank + step) % world_size, (rank - step) % world_size
        wanted = block_of(options.layout, options.causal, reader, rank, length)
        block = block_of(options.layout, options.causal, rank, source, length)
        sent = received = None
        if wanted is not None:
            sent = reader, [tensor[:, :, wanted.keys].contiguous() for tensor in (key, value)]
        if block is not None:
            received = source, [torch.empty_like(t[:, :, block.keys]).contiguous() for t in (key, value)]
        return block, _Transfer(sent, received, _KEYS_TAG, group)

    under_way = start(1) if world_size > 1 else None  # before the caller has its own block to compute
    yield 0, block_of(options.layout, options.causal, rank, rank, length), key, value
    for step in range(1, world_size):
        assert under_way is not None
        block, transfer = under_way
        received = transfer.wait()
        under_way = start(step + 1) if step + 1 < world_size else None
        keys, values = received if received else (key, value)
        yield step, block, keys, values


class _GradientsOfKeys:
    """Sums of the gradients of this rank's keys and values, to which every rank that has read them adds."""

    def __init__(
        self, of_key: Tensor, of_value: Tensor, dtype: torch.dtype, options: RingOptions, group: dist.ProcessGroup
    ) -> None:
        self._sums, self._dtype, self._options, self._group = (of_key, of_value), dtype, options, group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._under_way: tuple[slice, _Transfer] | None = None

    def exchange(self, step: int, own: list[Tensor]) -> None:
        """Sends what this rank has found in a step, if anything, and receives what its keys get in that step."""
        if step == 0:
            self._add(_ALL, own)
            return
        owner, reader = (self._rank - step) % self._world_size, (self._rank + step) % self._world_size
        block = block_of(self._options.layout, self._options.causal, reader, self._rank, self._sums[0].shape[2])
        received = None
        if block is not None:
            parts = (grad[:, :, block.keys] for grad in self._sums)
            received = reader, [torch.empty_like(part, dtype=self._dtype).contiguous() for part in parts]
        sent = (owner, [tensor.contiguous() for tensor in own]) if own else None
        self.finish()
        keys = _ALL if block is None else block.keys
        self._under_way = keys, _Transfer(sent, received, _GRADIENTS_TAG, self._group)

    def finish(self) -> None:
        """Adds what the last step has brought."""
        if self._under_way is not None:
            keys, transfer = self._under_way
            self._add(keys, transfer.wait())
            self._under_way = None

    def _add(self, keys: slice, gradients: list[Tensor]) -> None:
        for total, gradient in zip(self._sums, gradients, strict=False):
            total[:, :, keys] += gradient
