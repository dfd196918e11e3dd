"""Assigns the rows of packed sequences, here called documents, to the ranks of a group, and shards and gathers them.

``"balanced"`` gives all ranks about the same number of rows and the same attention work. It assigns the longest
document first. A document that fits on a rank stays whole and goes to the rank with the least work so far (Graham,
"Bounds on multiprocessing timing anomalies", 1969). A document that fits on none of the W ranks is cut: a large one
into 2 W parts in zigzag order, a small one into pieces that fill the ranks with the most free rows. ``"contiguous"``
and ``"zigzag"`` cut the packed rows as if they were one sequence.

Parts begin at a multiple of four positions in a document, because dropout draws for four keys at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.call import UNBOUNDED
from fastattn.checks import check_bool, check_choice, check_dtype, check_int, check_tensor, expect
from fastattn.distributed.blocks import (
    KEYS_OF_A_DRAW,
    PackedSpread,
    Part,
    Window,
    cached_in_first,
    in_order_of_documents,
    position_of,
    row_numbers,
)
from fastattn.distributed.collectives import Group, all_gather, process_groups
from fastattn.distributed.sequence import checked_dim, parts_of_rank, parts_per_rank
from fastattn.functional.attention_checks import check_window
from fastattn.profiler.work import visible_pairs

LAYOUTS = ("balanced", "contiguous", "zigzag")

# A document is large if each of its 2 W parts has at least this many rows. Only large documents are cut to balance the
# work of ranks. Small documents are cut only if no rank has enough free rows.
_ROWS_OF_A_PART = 16
# The most work that a rank may have after it takes a large document whole, as a multiple of the ranks' average.
_MOST_WORK = 1.1


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Holds the parts of documents on each rank, or on each group of ranks that pool their rows (``exchanged``).

    ``parts`` lists the parts of each rank in the order of its rows: first parts of cut documents, then whole documents.
    """

    lengths: tuple[int, ...]  # the length of each document
    parts: tuple[tuple[Part, ...], ...]

    def is_whole(self, part: Part) -> bool:
        return part.length == self.lengths[part.document or 0]

    @functools.cached_property
    def cut_parts(self) -> tuple[tuple[Part, ...], ...]:
        return tuple(tuple(part for part in parts if not self.is_whole(part)) for parts in self.parts)

    @functools.cached_property
    def cut_rows(self) -> int:
        """Returns the largest number of rows of cut documents on any rank."""
        return max((part.rows.stop for parts in self.cut_parts for part in parts), default=0)

    @cached_in_first
    def spread(self, window: Window) -> PackedSpread:
        """Returns how the cut documents are spread over the ranks, for attention with ``window``."""
        return PackedSpread(self.cut_parts, self.cut_rows, self.lengths, window)

    @cached_in_first
    def exchanged(self, num_ranks: int, group: int, device: torch.device) -> tuple[PackedLayout, Tensor]:
        """Returns the layout of cut documents over groups of ``num_ranks`` consecutive ranks that pool their rows.

        Also returns, for the rows of ``group`` in the order of that layout, their indices in the concatenation of the
        ``cut_rows`` rows of each of the group's ranks, int64.
        """
        groups = [self.cut_parts[first : first + num_ranks] for first in range(0, len(self.parts), num_ranks)]
        together = (arrange(in_order_of_documents(ranks, self.cut_rows), self.lengths) for ranks in groups)
        parts, rows = zip(*together, strict=True)
        return PackedLayout(self.lengths, parts), row_numbers(rows[group], device)

    @cached_in_first
    def offsets(self, documents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the ``cu_seqlens`` of these documents, int32, and the documents' numbers, int64."""
        with torch.inference_mode(False):
            ends = [0, *accumulate(self.lengths[document] for document in documents)]
            return torch.tensor(ends, dtype=torch.int32, device=device), torch.tensor(documents, device=device)


@dataclass(frozen=True, eq=False)
class PackedShards:
    """Assigns the rows of packed sequences, ``[total, …]``, to ranks; ``shard_varlen`` returns it.

    Every rank has ``num_rows`` rows: first the rows of cut sequences, sorted by sequence and position, then whole
    sequences, then padding. Attention is not computed for padding.
    """

    group: Group
    layout: PackedLayout
    _sources: tuple[slice, ...]  # this rank's rows in the packed tensor

    @functools.cached_property
    def rank(self) -> int:
        """Returns this rank's number in the group; the last dimension of a mesh varies fastest."""
        return rank_in(process_groups(self.group))

    @functools.cached_property
    def num_rows(self) -> int:
        """Returns the number of rows of each rank, including padding."""
        return max(parts[-1].rows.stop if parts else 0 for parts in self.layout.parts)

    def shard(self, x: Tensor, dim: int = 0, padding: float = 0) -> Tensor:
        """Returns this rank's rows of ``x``, with ``padding`` after them up to ``num_rows`` rows in ``dim``.

        All ranks pass the same whole ``x``. The result is differentiable, like that of ``shard_sequence``.

        Raises:
            InputError, TypeError: the number of rows in ``dim`` is not the total of all sequences.
        """
        check_tensor("x", x)
        dim, total = checked_dim(x, dim), sum(self.layout.lengths)
        expect(x.shape[dim] == total, "x", f"{total} rows in dim {dim}, all sequences together", x.shape[dim])
        own = x.index_select(dim, self._own_rows(x.device))
        missing = [*x.shape[:dim], self.num_rows - own.shape[dim], *x.shape[dim + 1 :]]
        return torch.cat([own, x.new_full(missing, padding)], dim)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Gathers the rows of all ranks into the packed sequences, on all ranks: the inverse of ``shard``.

        It is differentiable, like ``gather_sequence``.

        Raises:
            InputError, TypeError: a tensor without ``num_rows`` rows in ``dim``.
        """
        check_tensor("x", x)
        dim = checked_dim(x, dim)
        expect(x.shape[dim] == self.num_rows, "x", f"{self.num_rows} rows in dim {dim}, as shard() gives", x.shape[dim])
        gathered = x.movedim(dim, 0)
        for group in reversed(process_groups(self.group)):
            gathered = all_gather(gathered, group)
        return gathered.index_select(0, self._rows_in_order(x.device)).movedim(0, dim)

    @cached_in_first
    def _own_rows(self, device: torch.device) -> Tensor:
        return row_numbers(self._sources, device)

    @cached_in_first
    def _rows_in_order(self, device: torch.device) -> Tensor:
        return row_numbers((part.rows for part in in_order_of_documents(self.layout.parts, self.num_rows)), device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the position of each of this rank's rows in its sequence, for RoPE: int64 ``[num_rows]``, 0 for
        padding."""
        positions = (torch.arange(part.first, part.first + part.length) for part in self.layout.parts[self.rank])
        return self._padded(positions, 0).to(device)

    def sequences(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the sequence to which each of this rank's rows belongs: int64 ``[num_rows]``, -1 for padding."""
        numbers = (torch.full((part.length,), part.document or 0) for part in self.layout.parts[self.rank])
        return self._padded(numbers, -1).to(device)

    def _padded(self, parts: Iterable[Tensor], padding: int) -> Tensor:
        own = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        return torch.nn.functional.pad(own, (0, self.num_rows - own.shape[0]), value=padding)


def shard_varlen(
    cu_seqlens: Tensor | Sequence[int],
    *,
    group: Group = None,
    layout: str = "balanced",
    causal: bool = False,
    window: Window = (UNBOUNDED, UNBOUNDED),
) -> PackedShards:
    """Assigns the rows of packed sequences to the ranks of a group, for ``context_parallel_attention_varlen``.

    Sequences that stay whole on a rank cost no communication. The others are cut and spread over ranks.

    Args:
        cu_seqlens: ``[B + 1]``, the same on all ranks: sequence ``b`` is the rows from ``cu_seqlens[b]`` up to
            ``cu_seqlens[b + 1]``. The host reads it, so a tensor on a GPU makes the host wait, once.
        group: a process group, a mesh of one or two dimensions, or None for the default group.
        layout: ``"balanced"``: all ranks get about the same number of rows and the same attention work.
            ``"contiguous"``: W parts of the rows, rank r has part r. ``"zigzag"``: 2 W parts of the rows, rank r has
            parts r and 2 W - 1 - r.
        causal, window: the mask that attention will have; the work of each sequence depends on it.

    Raises:
        InputError, TypeError: offsets that do not begin with 0 or that decrease, or a group that is not initialised.
    """
    groups = process_groups(group)
    check_choice("layout", layout, LAYOUTS)
    left, right = check_window(window)
    offsets = _checked_offsets(cu_seqlens)
    lengths = tuple(end - begin for begin, end in pairwise(offsets))
    world_size = math.prod(map(dist.get_world_size, groups))
    dealt = deal(lengths, world_size, layout, (left, 0 if check_bool("causal", causal) else right))
    arranged = [arrange(parts, lengths) for parts in dealt]
    layout_of_ranks = PackedLayout(lengths, tuple(parts for parts, _ in arranged))
    return PackedShards(group, layout_of_ranks, arranged[rank_in(groups)][1])


def rank_in(groups: Sequence[dist.ProcessGroup]) -> int:
    """Returns this rank's number in a mesh, whose last dimension varies fastest."""
    rank = 0
    for group in groups:
        rank = rank * dist.get_world_size(group) + dist.get_rank(group)
    return rank


def _checked_offsets(cu_seqlens: Any) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        expect(cu_seqlens.dim() == 1, "cu_seqlens", "one dimension, [B + 1]", list(cu_seqlens.shape))
        check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
        cu_seqlens = cu_seqlens.tolist()
    offsets = [check_int("cu_seqlens", offset) for offset in cu_seqlens]
    rises = all(begin <= end for begin, end in pairwise(offsets))
    expect(
        bool(offsets) and offsets[0] == 0 and rises, "cu_seqlens", "offsets that begin with 0 and do not fall", offsets
    )
    return offsets


def arrange(parts: Iterable[Part], lengths: Sequence[int]) -> tuple[tuple[Part, ...], tuple[slice, ...]]:
    """Returns the parts of one rank in the order in which it holds them, and the given parts' ``rows`` in this order.

    Parts of cut documents come first, then whole documents, both sorted by document and position. Adjacent parts of a
    document are joined.
    """
    runs: list[list[Part]] = []  # adjacent parts
    for part in sorted(parts, key=position_of):
        last = runs[-1][-1] if runs else None
        if last is not None and (last.document, last.first + last.length) == (part.document, part.first):
            runs[-1].append(part)
        else:
            runs.append([part])
    # The sort is stable: runs of cut documents and whole documents each stay sorted.
    runs.sort(key=lambda run: sum(part.length for part in run) == lengths[run[0].document or 0])
    arranged, end = [], 0
    for run in runs:
        begin, end = end, end + sum(part.length for part in run)
        arranged.append(Part(slice(begin, end), run[0].first, run[0].document))
    return tuple(arranged), tuple(part.rows for run in runs for part in run)


# --- Which rank gets which rows ---------------------------------------------------------------------------------------


def deal(lengths: Sequence[int], world_size: int, layout: str, window: Window) -> list[list[Part]]:
    """Returns the parts of each rank, in no particular order. Their ``rows`` index the packed tensor."""
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
    parts_by_rank = (parts_of_rank(layout, rank, world_size) for rank in range(world_size))
    return [[part for i in parts for part in by_part[i]] for parts in parts_by_rank]


def _cut_in_document(begins: Sequence[int], row: int) -> int:
    """Returns the largest row index up to ``row`` at which a part is allowed to begin."""
    begin = max(begin for begin in begins if begin <= row)
    return begin + (row - begin) // KEYS_OF_A_DRAW * KEYS_OF_A_DRAW


def _balanced(lengths: Sequence[int], world_size: int, window: Window) -> list[list[Part]]:
    begins = [0, *accumulate(lengths)]
    # Each rank has room for three rows more than the average. So at any time, some rank has room for four more rows, or
    # for all rows that are left.
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
