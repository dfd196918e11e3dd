"""Attends over the keys and values of one rank after the other (Liu et al., "Ring attention", 2023).

In step s, rank r attends to the keys of rank r - s, while the keys of the next step arrive. Results are merged in
float32. The backward pass repeats the same blocks, with the output and the lse over all keys, and sends the gradients
of a block's keys in float32 to the rank that owns the keys. It computes half of the heads of a rank's own block last,
while the last gradients arrive. Keys come directly from their owner instead of from rank to rank: this sends as many
bytes, and no rank waits for another's work. Keys that a window hides are neither sent nor read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastattn.distributed.blocks import PackedSpread, Reading, Spread
from fastattn.distributed.collectives import naming
from fastattn.distributed.local_attention import (
    Inputs,
    LocalAttention,
    gradient_of_sinks,
    no_results,
    query_heads,
    with_sinks,
    zeros_of_sums,
)
from fastattn.distributed.merge import merge_into
from fastattn.functional.attention_block import BackwardTensors


@torch.compiler.disable  # asynchronous messages cannot be traced: a graph ends before the call
def ring_attention(inputs: Inputs, spread: Spread | PackedSpread, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Returns output and lse of this rank's rows, differentiable in all tensors."""
    device = inputs.query.device
    if device.type not in _connected.setdefault(group, set()):
        _connect(group, device)
    out, lse = _RingAttention.apply(*inputs, spread, group)
    return out, lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        local: LocalAttention,
        spread: Spread | PackedSpread,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        out, lse = no_results(query, value)
        attention = local.with_slopes(slopes)
        for _, reading, keys, values in _readings(key, value, spread, group):
            for block in reading.blocks:
                rows = block.rows
                found = attention.attend(query[:, :, rows], keys[:, :, block.keys], values[:, :, block.keys], block)
                merge_into(out[:, :, rows], lse[:, :, rows], *found)
        out, lse = with_sinks(out, lse, sinks)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, slopes, sinks, out, lse)
        ctx.spread, ctx.local, ctx.group = spread, local, group
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, sinks, out, lse = ctx.saved_tensors
        attention: LocalAttention = ctx.local.with_slopes(slopes)
        query_sum, key_sum, value_sum = (zeros_of_sums(t, lse.dtype) for t in (query, key, value))
        slopes_sum = torch.zeros_like(slopes, dtype=lse.dtype) if ctx.needs_input_grad[3] else None
        sums = _GradientsOfKeys((key_sum, value_sum), ctx.spread, ctx.group)

        def gradients(reading: Reading, keys: Tensor, values: Tensor, kv_heads: slice) -> tuple[Tensor, Tensor]:
            tensors = BackwardTensors(grad_out, grad_lse, query, keys[:, kv_heads], values[:, kv_heads], out, lse)
            heads = query_heads(kv_heads, query, key)
            return attention.gradients(tensors, heads, reading.blocks, query_sum, slopes_sum)

        first_heads, last_heads = heads_of_own_block(key.shape[1], ctx.spread.world_size)
        for step, reading, keys, values in _readings(key, value, ctx.spread, ctx.group):
            if step == 0:
                own = reading
                sums.add(own, gradients(own, keys, values, first_heads), first_heads)
            else:
                sums.exchange(step, reading, gradients(reading, keys, values, slice(0, key.shape[1])))
        if last_heads.start < last_heads.stop:
            sums.add(own, gradients(own, _read(key, own), _read(value, own), last_heads), last_heads)
        sums.finish()
        grads = (
            total.to(t.dtype) for total, t in zip((query_sum, key_sum, value_sum), (query, key, value), strict=True)
        )
        grad_slopes = None if slopes_sum is None else slopes_sum.to(slopes.dtype)
        return *grads, grad_slopes, gradient_of_sinks(sinks, grad_out, grad_lse, out, lse), None, None, None


def heads_of_own_block(kv_heads: int, world_size: int) -> tuple[slice, slice]:
    """Splits the KV heads of a rank's own block in the backward pass: the first heads are computed while the first keys
    arrive, the others while the last gradients arrive."""
    num_first = (kv_heads + 1) // 2 if world_size > 1 else kv_heads
    return slice(0, num_first), slice(num_first, kv_heads)


# Group → the device types on which its ranks are connected; a group may have a backend for each.
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Runs one collective on all ranks of a group: NCCL needs all of them in a group's first call, but some ranks may
    have no message to send.

    It does so on every device but the CPU, because a group's backend name does not tell whether it is NCCL
    ("undefined", "cpu:gloo,cuda:nccl").
    """
    if device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    _connected[group].add(device.type)


# --- Communication ----------------------------------------------------------------------------------------------------


class _Transfer:
    """Holds messages in flight between ranks: ``(peer, tensors)`` to send, and ``(peer, tensors)`` to receive into."""

    def __init__(
        self,
        sent: tuple[int, list[Tensor]] | None,
        received: tuple[int, list[Tensor]] | None,
        first_tag: int,
        group: dist.ProcessGroup,
    ) -> None:
        self.received = received[1] if received is not None else []
        self._sent = sent  # keeps the tensors alive while they are in flight
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
        with naming(_CALL):
            for work in self._works:
                work.wait()
        return self.received


_CALL = "context_parallel_attention with strategy 'ring'"
_KEYS_TAG, _GRADIENTS_TAG = 0, 2  # each is the tag for keys; the next number is the tag for values


def _readings(
    key: Tensor, value: Tensor, spread: Spread | PackedSpread, group: dist.ProcessGroup
) -> Iterator[tuple[int, Reading, Tensor, Tensor]]:
    """Yields for each step its number, the reading, and the keys and values that are read."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def start(step: int) -> tuple[Reading, _Transfer]:
        reader, source = (rank + step) % world_size, (rank - step) % world_size
        wanted, reading = spread.reading(reader, rank), spread.reading(rank, source)
        sent = received = None
        if wanted.keys:
            sent = reader, [_read(tensor, wanted).contiguous() for tensor in (key, value)]
        if reading.keys:
            received = source, [_room(tensor, reading, tensor.dtype) for tensor in (key, value)]
        return reading, _Transfer(sent, received, _KEYS_TAG, group)

    under_way = start(1) if world_size > 1 else None  # in flight while the caller computes its own block
    own = spread.reading(rank, rank)
    yield 0, own, _read(key, own), _read(value, own)
    for step in range(1, world_size):
        assert under_way is not None
        reading, transfer = under_way
        received = transfer.wait()
        under_way = start(step + 1) if step + 1 < world_size else None
        keys, values = received if received else (key[:, :, :0], value[:, :, :0])
        yield step, reading, keys, values


def _read(tensor: Tensor, reading: Reading) -> Tensor:
    """Returns the keys (or values) of ``tensor [B, H, S, D]`` that ``reading`` names, concatenated."""
    if len(reading.keys) == 1:
        return tensor[:, :, reading.keys[0]]
    return torch.cat([tensor[:, :, keys] for keys in (slice(0, 0), *reading.keys)], dim=2)


def _room(like: Tensor, reading: Reading, dtype: torch.dtype) -> Tensor:
    batch, heads, _, dim = like.shape
    num_keys = sum(keys.stop - keys.start for keys in reading.keys)
    return like.new_empty(batch, heads, num_keys, dim, dtype=dtype)


class _GradientsOfKeys:
    """Sums the gradients of this rank's keys and values from every rank that has read them."""

    def __init__(self, sums: tuple[Tensor, Tensor], spread: Spread | PackedSpread, group: dist.ProcessGroup) -> None:
        self._sums, self._spread, self._group = sums, spread, group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._under_way: tuple[Reading, _Transfer] | None = None

    def exchange(self, step: int, reading: Reading, found: tuple[Tensor, ...]) -> None:
        """Starts to send the gradients of the keys that this rank has read to their owner, and to receive the gradients
        of its own keys from the rank that has read them in this step."""
        owner, reader = (self._rank - step) % self._world_size, (self._rank + step) % self._world_size
        wanted = self._spread.reading(reader, self._rank)
        received = (reader, [_room(total, wanted, total.dtype) for total in self._sums]) if wanted.keys else None
        sent = (owner, list(found)) if reading.keys else None
        self.finish()
        self._under_way = wanted, _Transfer(sent, received, _GRADIENTS_TAG, self._group)

    def finish(self) -> None:
        """Waits for the gradients of the last exchange and adds them."""
        if self._under_way is not None:
            reading, transfer = self._under_way
            self.add(reading, transfer.wait())
            self._under_way = None

    def add(self, reading: Reading, gradients: Sequence[Tensor], heads: slice = slice(None)) -> None:
        """Adds gradients of the keys and values of ``reading``, for some KV heads."""
        for total, gradient in zip(self._sums, gradients, strict=False):
            parts = gradient.split([keys.stop - keys.start for keys in reading.keys], dim=2)
            for keys, part in zip(reading.keys, parts, strict=True):
                total[:, heads, keys] += part
