"""Deals packed sequences, here called documents, to the ranks of a group, whole or cut into parts.

``"balanced"``: all ranks have about as many rows and as much attention to compute. The longest document is dealt first.
Each stays whole if it fits on a rank, and goes to the rank with the least work so far (Graham, "Bounds on
multiprocessing timing anomalies", 1969). The others are cut: large ones into 2 W parts in zigzag order, small ones to
fill ranks up with rows. ``"contiguous"`` and ``"zigzag"`` cut the packed rows as if they were one sequence, wherever
the cuts fall in documents.

Parts begin at a multiple of four places, because dropout draws for four keys at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from fastattn.distributed.blocks import KEYS_OF_A_DRAW, Part, Window
from fastattn.distributed.sequence import parts_of_rank, parts_per_rank
from fastattn.profiler.work import visible_pairs

LAYOUTS = ("balanced", "contiguous", "zigzag")

# A document is large if each of 2 W parts would have at least this many rows. Only then is it cut to even out work.
_ROWS_OF_A_PART = 16
# The most work that a rank may have after it takes a large document whole, as a multiple of the ranks' average.
_MOST_WORK = 1.1


def deal(lengths: Sequence[int], world_size: int, layout: str, window: Window) -> list[list[Part]]:
    """Returns the parts of each rank, in no particular order. Their rows are those of the packed tensor."""
    if layout == "balanced":
        return _balanced(lengths, world_size, window)
    begins = [0, *accumulate(lengths)]
    num_parts = parts_per_rank(layout) * world_size
    cuts = [_cut_in_document(begins, begins[-1] * i // num_parts) for i in range(num_parts)] + [begins[-1]]
    by_part = [
        [
            Part(slice(max(begin, low), min(end, high)), max(begin, low) - begin, document)
            for document, (begin, end) in enumerate(pairwise(begins))
            if max(begin, low) < min(end, high)
        ]
        for low, high in pairwise(cuts)
    ]
    of_ranks = (parts_of_rank(layout, rank, world_size) for rank in range(world_size))
    return [[part for i in parts for part in by_part[i]] for parts in of_ranks]


def _cut_in_document(begins: Sequence[int], row: int) -> int:
    """Returns the last row up to ``row`` where a part may begin."""
    begin = max(begin for begin in begins if begin <= row)
    return begin + (row - begin) // KEYS_OF_A_DRAW * KEYS_OF_A_DRAW


def _balanced(lengths: Sequence[int], world_size: int, window: Window) -> list[list[Part]]:
    begins = [0, *accumulate(lengths)]
    # Each rank gets three rows of room more than its share: so some rank always has room for four more rows, or for all
    # that are left.
    room = [-(-begins[-1] // world_size) + KEYS_OF_A_DRAW - 1] * world_size
    work = [0] * world_size
    works = [visible_pairs(length, length, *window, offset=0) for length in lengths]
    fair = sum(works) / world_size
    dealt: list[list[Part]] = [[] for _ in range(world_size)]

    def give(rank: int, document: int, first: int, end: int) -> None:
        if first == end:
            return
        begin = begins[document]
        dealt[rank].append(Part(slice(begin + first, begin + end), first, document))
        room[rank] -= end - first
        work[rank] += visible_pairs(end - first, lengths[document], *window, offset=first)

    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length = lengths[document]
        is_large = length >= 2 * world_size * _ROWS_OF_A_PART
        most_work = _MOST_WORK * fair - works[document] if is_large else fair * world_size
        fits = [rank for rank in range(world_size) if room[rank] >= length and work[rank] <= most_work]
        if fits:
            give(min(fits, key=work.__getitem__), document, 0, length)
        elif is_large:
            parts = 2 * world_size
            cuts = [length * i // parts // KEYS_OF_A_DRAW * KEYS_OF_A_DRAW for i in range(parts)] + [length]
            for rank in range(world_size):
                for part in parts_of_rank("zigzag", rank, world_size):
                    give(rank, document, cuts[part], cuts[part + 1])
        else:
            first = 0
            while first < length:
                rank = max(range(world_size), key=room.__getitem__)
                most = room[rank] // KEYS_OF_A_DRAW * KEYS_OF_A_DRAW
                end = length if room[rank] >= length - first or most <= 0 else first + most
                give(rank, document, first, end)
                first = end
    return dealt
