"""How keys of all ranks come to each, and gradients of them go back: all keys, or those that a rank reads.

With a window, and where packed sequences lie on a few ranks each, a rank reads a small part of all keys. Then each rank
sends to every other what that one reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.distributed.blocks import (
    KEYS_OF_A_DRAW,
    Block,
    PackedSpread,
    Part,
    Spread,
    Window,
    keys_seen,
    place_of,
    seen_pieces,
)
from fastattn.distributed.collectives import Started, start_all_gather, start_all_to_all, start_reduce_scatter

# Gathered one by one are keys of which no rank reads more than this share, its own apart. Below one because NCCL's
# gathering brings a key into a node once, and messages to each rank bring it to each GPU of the node that reads it.
MOST_READ = 0.25


class Gathering(Protocol):
    """Tensors have keys in their first dimension: those of a rank, or those that are gathered, by their places."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Of this rank's rows over what is gathered."""

    def start(self, own: Tensor) -> Started: ...

    def by_places(self, arrived: Tensor) -> Tensor:
        """What is gathered."""

    def start_back(self, sums: Tensor) -> Started:
        """Sends sums over what is gathered to the ranks whose keys these are."""

    def own_sums(self, arrived: Tensor) -> Tensor:
        """Those of this rank's keys, of all ranks."""


def gathering_of(spread: Spread | PackedSpread, group: dist.ProcessGroup) -> Gathering:
    return KeysThatAreRead(spread, group) if spread.kept(reads_little) else AllKeys(spread, group)


class AllKeys:
    def __init__(self, spread: Spread | PackedSpread, group: dist.ProcessGroup) -> None:
        self._spread, self._group = spread, group
        self.blocks: Sequence[Block] = spread.blocks_over_all_keys(dist.get_rank(group))

    def start(self, own: Tensor) -> Started:
        return start_all_gather(own.contiguous(), self._group)

    def by_places(self, arrived: Tensor) -> Tensor:
        return self._spread.in_order(arrived)

    def start_back(self, sums: Tensor) -> Started:
        return start_reduce_scatter(self._spread.by_rank(sums).contiguous(), self._group)

    def own_sums(self, arrived: Tensor) -> Tensor:
        return arrived


class KeysThatAreRead:
    def __init__(self, spread: Spread | PackedSpread, group: dist.ProcessGroup) -> None:
        self._group, self._num_own = group, spread.length
        self._plan = spread.kept(plan_of, dist.get_rank(group))
        self.blocks: Sequence[Block] = self._plan.blocks

    def start(self, own: Tensor) -> Started:
        given, read = self._plan.given, self._plan.read
        return self._exchange(torch.cat([own[:0], *(own[piece.rows] for piece in given.all)]), given, read)

    def by_places(self, arrived: Tensor) -> Tensor:
        if self._plan.arrives_in_order:
            return arrived
        parts = arrived.split(self._plan.read.lengths)
        return torch.cat([arrived[:0], *(parts[i] for i in self._plan.order)])

    def start_back(self, sums: Tensor) -> Started:
        given, read, order = self._plan.given, self._plan.read, self._plan.order
        if self._plan.arrives_in_order:
            return self._exchange(sums.contiguous(), read, given)
        by_places = sums.split([piece.length for piece in self._plan.pieces])
        in_order_of_ranks = (part for _, part in sorted(zip(order, by_places, strict=True), key=itemgetter(0)))
        return self._exchange(torch.cat([sums[:0], *in_order_of_ranks]), read, given)

    def own_sums(self, arrived: Tensor) -> Tensor:
        given = self._plan.given
        sums = arrived.new_zeros(self._num_own, *arrived.shape[1:])
        for piece, part in zip(given.all, arrived.split(given.lengths), strict=True):
            sums[piece.rows] += part
        return sums

    def _exchange(self, x: Tensor, given: Pieces, read: Pieces) -> Started:
        return start_all_to_all(x, read.by_rank, given.by_rank, self._group)


# --- What a rank reads ------------------------------------------------------------------------------------------------


def reads_little(spread: Spread | PackedSpread) -> bool:
    """Whether every rank reads little of other ranks' keys."""

    def most_read(parts: Sequence[Part]) -> int:
        """What each part sees, or all there is of a sequence."""
        seen: dict[int | None, int] = {}
        for part in parts:
            whole = Part(slice(0, spread.length_of(part.document)), 0, part.document)
            of_part = len(keys_seen(part, whole, spread.window))
            seen[part.document] = min(seen.get(part.document, 0) + of_part, whole.length)
        return sum(seen.values()) - sum(part.length for part in parts)

    ranks = [spread.parts_of(rank) for rank in range(spread.world_size)]
    # With dropout, pieces begin where a draw does; parts of packed sequences do anyway.
    may_draw = isinstance(spread, Spread) and spread.goes_by_places
    begin_with_draws = all(part.first % KEYS_OF_A_DRAW == 0 for parts in ranks for part in parts)
    if len(ranks) < 2 or (may_draw and not begin_with_draws):
        return False
    return all(most_read(parts) <= MOST_READ * (len(ranks) - 1) * spread.length for parts in ranks)


class Pieces(NamedTuple):
    """Keys as they are sent: those of one rank, or for one, after the other's."""

    all: tuple[Part, ...]
    by_rank: list[int]

    @property
    def lengths(self) -> list[int]:
        return [piece.length for piece in self.all]

    @staticmethod
    def of(pieces: Iterable[Sequence[Part]]) -> Pieces:
        of_ranks = tuple(pieces)
        return Pieces(tuple(chain(*of_ranks)), [sum(piece.length for piece in of_rank) for of_rank in of_ranks])


class Plan(NamedTuple):
    """What a rank reads of each rank, and gives to each; the order of places of what it has read, and its blocks over
    that."""

    read: Pieces
    given: Pieces
    order: list[int]
    blocks: list[Block]

    @property
    def arrives_in_order(self) -> bool:
        return self.order == list(range(len(self.order)))

    @property
    def pieces(self) -> list[Part]:
        """What it has read, by places."""
        return [self.read.all[i] for i in self.order]


def plan_of(spread: Spread | PackedSpread, rank: int) -> Plan:
    parts = [spread.parts_of(other) for other in range(spread.world_size)]
    read = Pieces.of(seen_pieces(parts[rank], of_source, spread.window) for of_source in parts)
    given = Pieces.of(seen_pieces(of_reader, parts[rank], spread.window) for of_reader in parts)
    order = sorted(range(len(read.all)), key=lambda i: place_of(read.all[i]))
    blocks = _blocks_over([read.all[i] for i in order], parts[rank], spread.window)
    return Plan(read, given, order, blocks)


def _blocks_over(pieces: Sequence[Part], own: Sequence[Part], window: Window) -> list[Block]:
    """Of own parts over what they see of ``pieces``, by places: of those that a part sees, none between is missing."""
    begins = list(accumulate((piece.length for piece in pieces), initial=0))
    blocks = []
    for part in own:
        seen = [
            (begin + of.start, begin + of.stop, piece.first + of.start)
            for piece, begin in zip(pieces, begins, strict=False)
            if piece.document == part.document and (of := keys_seen(part, piece, window))
        ]
        if seen:
            keys, first_key = slice(seen[0][0], seen[-1][1]), seen[0][2]
            blocks.append(Block(part.rows, keys, part.first, first_key, window, part.document))
    return blocks
