"""Defines marks, by which the mask function describes a mask to the attention function in a few numbers.

transformers passes the result of a mask function to the attention function unchanged if it is None or has four
dimensions (`generate` makes it contiguous for a static cache). A user's own mask, bool or floating, comes the same way.
Therefore a mark is a tensor of four dimensions and an integer dtype. Facts that the host needs are in its shape,
because the host would have to wait for values on a GPU.

======  =====================  =======================================================================================
dtype   shape                  meaning
======  =====================  =======================================================================================
int8    ``[B or 0, R, 1, N]``  the first N keys take part where the mark is not 0 (``B = 0``: all do). ``R = 1``: the
                               queries are at the last of the N positions, and causal. Otherwise a query sees
                               ``R - 2`` keys on either side, or all keys if ``R - 2`` is N or more
int32   ``[B, 1, 1, 1]``       the only query of each sequence is the last of this many keys of a static cache
int32   ``[1, 1, N + 1, M]``   N packed sequences of at most M tokens: N + 1 offsets, each repeated M times
int16   ``[B, 4 R, 1, Sq]``    R ranges of keys for each query: their int32 bounds, each as two int16
======  =====================  =======================================================================================

Repeated values are expanded views, which take no memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CAUSAL = 1


class Keys(NamedTuple):
    """Holds which keys take part: of the first ``num_keys`` keys, those for which ``present`` is true.

    ``present`` is bool ``[B, 1, 1, num_keys]``, or None if all take part. ``reach`` is the number of keys that a query
    sees on either side, -1 for all, or None if it sees the keys up to its own.
    """

    num_keys: int
    present: Tensor | None
    reach: int | None


class Lengths(NamedTuple):
    """Holds the numbers of keys in a static cache, int32 ``[B]``. The only query of a sequence is at its last key."""

    lengths: Tensor


class Offsets(NamedTuple):
    """Holds the offsets and longest length of packed sequences, as ``fastattn.attention_varlen`` takes them."""

    cu_seqlens: Tensor
    max_seqlen: int


class Ranges(NamedTuple):
    """Holds the ranges of keys that each query sees, int32 ``[B, 1, Sq, R, 2]``."""

    key_ranges: Tensor


def mark_keys(present: Tensor | None, count: int, reach: int | None, device: torch.device | str) -> Tensor:
    """Returns the mark for ``Keys``; ``present`` is bool ``[B, count]`` or None."""
    if present is None:
        rows = torch.empty(0, 1, 1, count, dtype=torch.int8, device=device)
    else:
        rows = present.to(torch.int8)[:, None, None, :]
    if reach is None:
        return rows
    return rows.expand(-1, _CAUSAL + 1 + (count if reach < 0 else min(reach, count)), -1, -1)


def mark_lengths(length: int | Tensor, batch: int, device: torch.device | str) -> Tensor:
    if isinstance(length, Tensor):
        return length.to(device=device, dtype=torch.int32).view(1, 1, 1, 1).expand(batch, -1, -1, -1)
    return torch.full((batch, 1, 1, 1), length, dtype=torch.int32, device=device)


def mark_offsets(sequence_ids: Tensor) -> Tensor:
    """Returns the mark for ``Offsets``; ``sequence_ids [B, S]`` has the same number for all tokens of a sequence.

    It waits for the GPU.
    """
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    offsets = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())
    longest = int(offsets.diff().max())
    return offsets.to(torch.int32)[None, None, :, None].expand(-1, -1, -1, longest)


def mark_ranges(ranges: Tensor) -> Tensor:
    """Encodes ``ranges``, int32 ``[B, 1, Sq, R, 2]``, as an int16 mark, which `read` decodes to ``Ranges``."""
    return ranges.contiguous().view(torch.int16).flatten(-2).transpose(-2, -1)[:, 0, :, None]


def read(mark: Tensor) -> Keys | Lengths | Offsets | Ranges | None:
    """Decodes a mark. Returns None if ``mark`` is not a mark but a mask."""
    if mark.dtype == torch.int8:
        rows, reach, _, count = mark.shape
        present = mark[:, :1].view(torch.bool) if rows else None
        if reach == _CAUSAL:
            return Keys(count, present, None)
        reach -= _CAUSAL + 1
        return Keys(count, present, reach if reach < count else -1)
    if mark.dtype == torch.int32:
        if mark.shape[2] == 1:
            return Lengths(mark.flatten())
        return Offsets(mark[0, 0, :, 0].contiguous(), mark.shape[3])
    if mark.dtype == torch.int16:
        return Ranges(mark.movedim(1, -1).contiguous().view(torch.int32).unflatten(-1, (-1, 2)))
    return None
