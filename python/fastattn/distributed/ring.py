"""Attends over the keys and values of one rank after the other (Liu et al., "Ring attention", 2023).

In step s, rank r attends to the keys of rank r - s, while the keys of the next step arrive. Results are merged in
float32. The backward pass repeats the same blocks, with the output and the lse over all keys, and sends the gradients
of a block's keys in float32 to the rank that owns the keys. It computes half of the heads of a rank's own block last,
while the last gradients arrive. Unlike in the paper, a rank sends its keys directly to each rank that reads them, and
ranks do not pass keys on. The number of bytes is the same, and no rank waits until another rank has finished its work.
Keys that a window hides are neither sent nor read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.distributed.blocks import AnySpread, Reading
from fastattn.distributed.collectives import naming
from fastattn.distributed.local_attention import LocalAttention, OtherSums, Tensors, query_heads, zeros_of_sums
from fastattn.distributed.merge import merge_into
from fastattn.functional.attention_block import BackwardTensors


def attend_to_keys(
    attention: LocalAttention, inputs: Tensors, spread: AnySpread, group: dist.ProcessGroup, results: Tensors
) -> None:
    """Merges this rank's results over the keys of all ranks into ``results``, the output and the lse."""
    (query, key, value), (out, lse) = inputs, results
    _connect(group, query.device)
    for _, reading, keys, values in _readings(key, value, spread, group):
        for block in reading.blocks:
            rows = block.rows
            found = attention.results(query[:, :, rows], keys[:, :, block.keys], values[:, :, block.keys], block)
            merge_into(out[:, :, rows], lse[:, :, rows], *found)


def gradients_of_keys(
    attention: LocalAttention, tensors: BackwardTensors, spread: AnySpread, group: dist.ProcessGroup, sums: OtherSums
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of this rank's keys and values; adds the gradients of query and slopes to ``sums``."""
    query, key, value = tensors.query, tensors.key, tensors.value
    key_sum, value_sum = (zeros_of_sums(t, tensors.lse.dtype) for t in (key, value))
    own_sums = _GradientsOfKeys((key_sum, value_sum), spread, group)

    def gradients(reading: Reading, keys: Tensor, values: Tensor, kv_heads: slice) -> tuple[Tensor, Tensor]:
        given = tensors._replace(key=keys[:, kv_heads], value=values[:, kv_heads])
        heads = query_heads(kv_heads, query, key)
        return attention.gradients(given, heads, reading.blocks, sums)

    num_heads = key.shape[1]
    # The first heads of the rank's own block are computed while the first keys arrive, the last heads while the last
    # gradients arrive.
    num_first = (num_heads + 1) // 2 if spread.world_size > 1 else num_heads
    first_heads, last_heads = slice(0, num_first), slice(num_first, num_heads)
    for step, reading, keys, values in _readings(key, value, spread, group):
        if step == 0:
            own = reading
            own_sums.add(own, gradients(own, keys, values, first_heads), first_heads)
        else:
            own_sums.exchange(step, reading, gradients(reading, keys, values, slice(0, num_heads)))
    if num_first < num_heads:
        own_sums.add(own, gradients(own, _read(key, own), _read(value, own), last_heads), last_heads)
    own_sums.finish()
    return key_sum.to(key.dtype), value_sum.to(value.dtype)


# Group → the device types on which `_connect` has connected its ranks. A group can have one backend per device type.
_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def _connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Runs one collective before a group's first messages: NCCL needs all ranks of a group in the group's first call,
    but some ranks may have no message to send or receive.

    It does so on every device except the CPU, because the name of a group's backend, such as "undefined" or
    "cpu:gloo,cuda:nccl", does not tell whether the backend is NCCL.
    """
    connected = _connected.setdefault(group, {"cpu"})
    if device.type not in connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        connected.add(device.type)


# --- Communication ----------------------------------------------------------------------------------------------------


class _Transfer:
    """Holds messages in flight: ``(rank, tensors)`` to send to a rank, and ``(rank, tensors)`` to receive from one."""

    def __init__(
        self,
        sent: tuple[int, list[Tensor]],
        received: tuple[int, list[Tensor]],
        first_tag: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._sent, self._received = sent, received  # keeps the tensors alive while they are in flight
        messages = [
            dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group=group, tag=tag)
            for operation, (peer, tensors) in ((dist.isend, sent), (dist.irecv, received))
            for tag, tensor in enumerate(tensors, first_tag)
        ]
        self._works: list[dist.Work] = dist.batch_isend_irecv(messages) if messages else []

    def wait(self) -> list[Tensor]:
        """Waits for all messages and returns the received tensors."""
        with naming(_CALL):
            for work in self._works:
                work.wait()
        return self._received[1]


_CALL = "context_parallel_attention with strategy 'ring'"
_KEYS_TAG, _GRADIENTS_TAG = 0, 2  # each is the tag for keys; the next number is the tag for values


def _readings(
    key: Tensor, value: Tensor, spread: AnySpread, group: dist.ProcessGroup
) -> Iterator[tuple[int, Reading, Tensor, Tensor]]:
    """Yields for each step its number, the reading, and the keys and values that are read."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)

    def start(step: int) -> tuple[Reading, _Transfer]:
        reader, source = (rank + step) % world_size, (rank - step) % world_size
        wanted, reading = spread.reading(reader, rank), spread.reading(rank, source)
        sent = reader, [_read(tensor, wanted).contiguous() for tensor in (key, value) if wanted.keys]
        received = source, [_room(tensor, reading) for tensor in (key, value) if reading.keys]
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


def _room(like: Tensor, reading: Reading) -> Tensor:
    """Returns memory for the keys that ``reading`` names, or for their gradients."""
    num_keys = sum(keys.stop - keys.start for keys in reading.keys)
    return like.new_empty(*like.shape[:2], num_keys, like.shape[3])


class _GradientsOfKeys:
    """Sums the gradients of this rank's keys and values from every rank that has read them."""

    def __init__(self, sums: tuple[Tensor, Tensor], spread: AnySpread, group: dist.ProcessGroup) -> None:
        self._sums, self._spread, self._group = sums, spread, group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._under_way: tuple[Reading, _Transfer] | None = None

    def exchange(self, step: int, reading: Reading, found: tuple[Tensor, ...]) -> None:
        """Starts to send ``found``, the gradients of the keys that this rank has read, to the owner of these keys.

        Also starts to receive the gradients of this rank's own keys from the rank that has read them in this step.
        """
        owner, reader = (self._rank - step) % self._world_size, (self._rank + step) % self._world_size
        wanted = self._spread.reading(reader, self._rank)
        received = reader, [_room(total, wanted) for total in self._sums if wanted.keys]
        sent = owner, list(found) if reading.keys else []
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
