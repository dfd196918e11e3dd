"""Defines the benchmarks' masks of visible key ranges, for fastattn and for FlexAttention."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattn import masks

MASKS = ("documents", "prefix", "shared prompt", "blocks")
BLOCK = 128  # the queries, and the keys, of a block of the mask "blocks": a query sees all keys of a block or none


@functools.cache
def ranges_of(mask: str, seqlen: int) -> Tensor:
    """Returns the visible key ranges under a mask, int32 ``[1, 1, S, R, 2]``, on the CPU."""
    if mask == "documents":
        return masks.documents(_document_offsets(seqlen))
    if mask == "prefix":
        return masks.prefix(seqlen // 4, seqlen)
    if mask == "shared prompt":
        return masks.shared_prompt(*_prompt_and_answers(seqlen))
    block_of_row = torch.arange(seqlen) // BLOCK
    return masks.from_bool(_visible_blocks(seqlen))[block_of_row].mul(BLOCK).clamp(max=seqlen)[None, None]


def mask_mod(mask: str, seqlen: int, device: torch.device) -> Callable[..., Any]:
    """Returns the same mask as a function of indices, in the form that FlexAttention takes."""
    if mask == "documents":
        offsets = _document_offsets(seqlen)
        document = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff()).to(device)
        return lambda batch, head, row, column: (column <= row) & (document[row] == document[column])
    if mask == "prefix":
        return lambda batch, head, row, column: (column <= row) | (column < seqlen // 4)
    if mask == "shared prompt":
        prompt, answers = _prompt_and_answers(seqlen)
        lengths = torch.tensor([prompt, *answers])
        part = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
        return lambda batch, head, row, column: (column <= row) & ((part[column] == 0) | (part[row] == part[column]))
    blocks = _visible_blocks(seqlen).to(device)
    return lambda batch, head, row, column: blocks[row // BLOCK, column // BLOCK]


def _document_offsets(seqlen: int) -> Tensor:
    """Returns the offsets of documents of 1/32 to 1/4 of the sequence each; the last one may be shorter."""
    draw = random.Random(seqlen)
    ends = [0]
    while ends[-1] < seqlen:
        ends.append(min(ends[-1] + draw.randint(seqlen // 32 + 1, seqlen // 4), seqlen))
    return torch.tensor(ends, dtype=torch.int32)


def _prompt_and_answers(seqlen: int) -> tuple[int, list[int]]:
    """Returns the lengths of a prompt, a fourth of the sequence, and of eight answers, the rest."""
    prompt = seqlen // 4
    ends = [(seqlen - prompt) * i // 8 for i in range(9)]
    return prompt, [end - begin for begin, end in itertools.pairwise(ends)]


def _visible_blocks(seqlen: int) -> Tensor:
    """Returns which blocks of keys each block of queries sees, bool ``[blocks, blocks]``: its own and three random
    runs, together about a tenth of all blocks, as in sparse attention over video."""
    count = -(-seqlen // BLOCK)
    draw = random.Random(seqlen)
    visible = torch.eye(count, dtype=torch.bool)
    for row in visible:
        for _ in range(3):
            begin, length = draw.randrange(count), max(count // 30, 1)
            row[begin : begin + length] = True
    return visible
