"""Marks: what the mask function tells the attention function where it needs no mask ``[B, 1, Sq, Sk]``.

transformers carries what a mask function returns to the attention function, as it is, if it is None or has four
dimensions; `generate` makes it contiguous where the cache is static. A mask of the user's own comes the same way, bool
or floating. So a mark is a tensor of four dimensions and an integer dtype. What the host has to know stands in the
shape: values would have to be waited for on a GPU.

======  =====================  =======================================================================================
dtype   shape                  meaning
======  =====================  =======================================================================================
int8    ``[B or 0, R, 1, N]``  of the first N keys, those take part that are not 0 (``B = 0``: all). ``R = 1``: the
                               queries are the last of them, and causal. Otherwise a query sees ``R - 2`` keys on
                               either side; all, where that is N or more
int32   ``[B, 1, 1, 1]``       the one query of each sequence comes last of this many keys: of a static cache
int32   ``[1, 1, N + 1, M]``   sequences packed one after the other, of at most M tokens: N + 1 offsets, M times each
======  =====================  =======================================================================================

Repeated values are expanded, and take no memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CAUSAL = 1


class Keys(NamedTuple):
    """Which keys take part: of the first ``num_keys`` those that are ``present``, bool ``[B, 1, 1, num_keys]`` or None.

    ``reach``: how many keys a query sees on either side, -1 for all; None: it sees those up to its own.
    """

    num_keys: int
    present: Tensor | None
    reach: int | None


class Lengths(NamedTuple):
    """``[B]`` int32: how many of a static cache's keys there are. The one query is the last of them."""

    lengths: Tensor


class Offsets(NamedTuple):
    """Packed sequences, as ``fastattn.attention_varlen`` takes them."""

    cu_seqlens: Tensor
    max_seqlen: int


def mark_keys(present: Tensor | None, count: int, reach: int | None, device: torch.device | str) -> Tensor:
    """``present``: bool ``[B, count]``."""
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
    """``sequence_ids``: ``[B, S]``, one number for all tokens of a sequence. Waits for the GPU."""
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    offsets = torch.nn.functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())
    longest = int(offsets.diff().max())
    return offsets.to(torch.int32)[None, None, :, None].expand(-1, -1, -1, longest)


def read(mark: Tensor) -> Keys | Lengths | Offsets | None:
    """What a mark says; None: it is a mask."""
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
    return None
