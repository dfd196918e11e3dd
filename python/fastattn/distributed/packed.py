"""Packed sequences on the ranks of a group: what each rank has of them, and how it gets there and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.checks import check_bool, check_choice, check_tensor, expect
from fastattn.distributed.blocks import Part, Window, index_of, place_of
from fastattn.distributed.collectives import Group, all_gather, process_groups
from fastattn.distributed.dealing import LAYOUTS, deal
from fastattn.distributed.sequence import checked_dim
from fastattn.functional.attention_checks import UNBOUNDED, check_window


@dataclass(frozen=True)
class PackedShards:
    """Which rows of packed sequences, ``[total, …]``, are on which rank: what ``shard_varlen`` returns.

    A rank has ``num_rows`` rows, as all others: of sequences that are cut, one after the other by their places, then of
    whole ones, then padding. Attention is not computed for padding.
    """

    group: Group
    lengths: tuple[int, ...]  # of each sequence
    parts: tuple[tuple[Part, ...], ...]  # of each rank, in the order of its rows
    _sources: tuple[tuple[slice, ...], ...]  # the rows of each rank, as they are packed

    @functools.cached_property
    def rank(self) -> int:
        """This one's, in the order of the group's dimensions."""
        rank = 0
        for group in process_groups(self.group):
            rank = rank * dist.get_world_size(group) + dist.get_rank(group)
        return rank

    @functools.cached_property
    def num_rows(self) -> int:
        """Of each rank, with its padding."""
        return max(parts[-1].rows.stop if parts else 0 for parts in self.parts)

    def shard(self, x: Tensor, dim: int = 0, padding: float = 0) -> Tensor:
        """This rank's rows of what all ranks hold, with ``num_rows`` in ``dim``; those of no sequence are ``padding``.

        Differentiable, as ``shard_sequence``.

        Raises:
            InputError, TypeError: a tensor that has not as many rows in ``dim`` as there are in all sequences.
        """
        check_tensor("x", x)
        dim, total = checked_dim(x, dim), sum(self.lengths)
        expect(x.shape[dim] == total, "x", f"{total} rows in dim {dim}, those of all sequences", x.shape[dim])
        own = x.index_select(dim, index_of(self._sources[self.rank], x.device))
        missing = [*x.shape[:dim], self.num_rows - own.shape[dim], *x.shape[dim + 1 :]]
        return torch.cat([own, x.new_full(missing, padding)], dim)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """The packed sequences on all ranks, of which each has its rows: the inverse of ``shard``.

        Differentiable, as ``gather_sequence``.

        Raises:
            InputError, TypeError: a tensor that has not ``num_rows`` rows in ``dim``.
        """
        check_tensor("x", x)
        dim = checked_dim(x, dim)
        expect(x.shape[dim] == self.num_rows, "x", f"{self.num_rows} rows in dim {dim}", x.shape[dim])
        gathered = x.movedim(dim, 0)
        for group in reversed(process_groups(self.group)):
            gathered = all_gather(gathered, group)
        moved = (part.moved(rank * self.num_rows) for rank, parts in enumerate(self.parts) for part in parts)
        rows = [part.rows for part in sorted(moved, key=place_of)]
        return gathered.index_select(0, index_of(rows, x.device)).movedim(0, dim)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """int64 ``[num_rows]``: where each of this rank's rows stands in its sequence, as RoPE wants it; padding: 0."""
        places = (torch.arange(part.first, part.first + part.length) for part in self.parts[self.rank])
        return self._padded(places, 0).to(device)

    def sequences(self, device: torch.device | str | None = None) -> Tensor:
        """int64 ``[num_rows]``: to which sequence each of this rank's rows belongs; padding: -1."""
        numbers = (torch.full((part.length,), part.document or 0) for part in self.parts[self.rank])
        return self._padded(numbers, -1).to(device)

    def _padded(self, of_parts: Iterable[Tensor], padding: int) -> Tensor:
        own = torch.cat([torch.empty(0, dtype=torch.int64), *of_parts])
        return torch.nn.functional.pad(own, (0, self.num_rows - own.shape[0]), value=padding)


def shard_varlen(
    cu_seqlens: Tensor | Sequence[int],
    *,
    group: Group = None,
    layout: str = "balanced",
    causal: bool = False,
    window: Window = (UNBOUNDED, UNBOUNDED),
) -> PackedShards:
    """How packed sequences lie on the ranks of a group, for ``context_parallel_attention_varlen``.

    Sequences that stay whole on a rank cost no communication. The others are cut, and their rows spread.

    Args:
        cu_seqlens: ``[B + 1]``: sequence ``b`` is the rows from ``cu_seqlens[b]`` up to ``cu_seqlens[b + 1]``. The host
            reads it: a tensor on a GPU makes it wait, once. The same on all ranks.
        group: a process group, a mesh of one or two dimensions, or None: the default group.
        layout: ``"balanced"``: ranks get about as many rows, and about as much attention to compute. ``"contiguous"``:
            rows in their order, in W parts. ``"zigzag"``: rows in 2 W parts, rank r has parts r and 2 W - 1 - r.
        causal, window: as attention will have them: which work is to be balanced.

    Raises:
        InputError, TypeError: offsets that do not begin with 0 or that fall; a group that is not initialised.
    """
    groups = process_groups(group)
    check_choice("layout", layout, LAYOUTS)
    left, right = check_window(window)
    offsets = _checked_offsets(cu_seqlens)
    lengths = tuple(end - begin for begin, end in pairwise(offsets))
    world_size = 1
    for of_dim in groups:
        world_size *= dist.get_world_size(of_dim)
    dealt = deal(lengths, world_size, layout, (left, 0 if check_bool("causal", causal) else right))
    arranged = [arrange(parts, lengths) for parts in dealt]
    return PackedShards(group, lengths, tuple(parts for parts, _ in arranged), tuple(rows for _, rows in arranged))


def _checked_offsets(cu_seqlens: Any) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        expect(cu_seqlens.dim() == 1, "cu_seqlens", "one dimension, [B + 1]", list(cu_seqlens.shape))
        expect(not cu_seqlens.is_floating_point(), "cu_seqlens", "integers", cu_seqlens.dtype)
        cu_seqlens = cu_seqlens.tolist()
    offsets = [int(offset) for offset in cu_seqlens]
    rises = all(begin <= end for begin, end in pairwise(offsets))
    expect(
        bool(offsets) and offsets[0] == 0 and rises, "cu_seqlens", "offsets that begin with 0 and do not fall", offsets
    )
    return offsets


def arrange(parts: Iterable[Part], lengths: Sequence[int]) -> tuple[tuple[Part, ...], tuple[slice, ...]]:
    """The parts of one rank as it has them, and which rows these are of those of the given ones.

    First those of documents that are cut, then whole documents, each by their places. What lies side by side in a
    document is one part.
    """
    merged: list[tuple[int, int, int, list[slice]]] = []  # document, first, length; rows
    for part in sorted(parts, key=place_of):
        document, first = place_of(part)
        if merged and merged[-1][0] == document and merged[-1][1] + merged[-1][2] == first:
            _, first_of_all, length, rows = merged[-1]
            merged[-1] = (document, first_of_all, length + part.length, [*rows, part.rows])
        else:
            merged.append((document, first, part.length, [part.rows]))
    merged.sort(key=lambda each: each[2] == lengths[each[0]])  # stable: by places within both
    ends = list(accumulate(length for _, _, length, _ in merged))
    arranged = (
        Part(slice(end - length, end), first, document)
        for end, (document, first, length, _) in zip(ends, merged, strict=True)
    )
    return tuple(arranged), tuple(of for _, _, _, rows in merged for of in rows)
