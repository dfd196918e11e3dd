"""Which rows of a rank see which keys of another: blocks of attention, by their places in the whole sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from fastattn.distributed.sequence import in_order_of_parts, in_order_of_ranks, parts_of_rank, parts_per_rank

Found = TypeVar("Found")
Window = tuple[int, int]  # keys that a row sees before and after its place; -1: all
_ALL, _ALL_KEYS, _CAUSAL = slice(None), (-1, -1), (-1, 0)
KEYS_OF_A_DRAW = 4  # dropout draws for so many keys at a time: blocks begin at a multiple of this


class Part(NamedTuple):
    """Rows that lie side by side on a rank, the place of the first, and of packed sequences the document."""

    rows: slice
    first: int
    document: int | None = None

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start

    def moved(self, rows: int) -> Part:
        """The same so many rows further on."""
        return self._replace(rows=slice(self.rows.start + rows, self.rows.stop + rows))


class Block(NamedTuple):
    """Rows and keys of tensors, the places of the first of each, the window that applies to these places, and of packed
    sequences the one in which they count."""

    rows: slice
    keys: slice
    first_row: int
    first_key: int
    window: Window
    document: int | None = None


class Reading(NamedTuple):
    """What a rank reads of another's keys: these, one after the other; and its blocks over what it has read."""

    keys: tuple[slice, ...]
    blocks: tuple[Block, ...]


class Spread(NamedTuple):
    """A sequence of which each rank has ``length`` rows and keys. ``goes_by_places``: with ALiBi or dropout, what is
    computed of a row and a key depends on their places too."""

    layout: str
    world_size: int
    length: int
    window: Window
    goes_by_places: bool

    def reading(self, rank: int, source: int) -> Reading:
        """Of the keys of ``source``, what ``rank`` reads; nothing where its rows see none."""
        if not self.goes_by_places and self.window in (_ALL_KEYS, _CAUSAL):
            return self._reading_of_whole_parts(rank, source)
        return _reading_of_parts(self.parts_of(rank), self.parts_of(source), self.window)

    def kept(self, find: Callable[..., Found], *args: Any) -> Found:
        """``find(self, *args)``, once: every layer asks for the same."""
        return cast(Found, _found_for(find, self, *args))

    def blocks_over_all_keys(self, rank: int) -> list[Block]:
        """Of the rows of ``rank`` over all keys in the order of their places."""
        total = self.world_size * self.length
        if not self.goes_by_places and self.window == _ALL_KEYS:
            return [Block(_ALL, slice(0, total), 0, 0, _ALL_KEYS)]
        return [_block_over_sequence(part, 0, total, self.window) for part in self.parts_of(rank)]

    def in_order(self, x: Tensor) -> Tensor:
        """``[W * length, …]``, what one rank after the other has, by places."""
        return in_order_of_parts(x, 0, self.layout, self.world_size)

    def by_rank(self, x: Tensor) -> Tensor:
        """The inverse."""
        return in_order_of_ranks(x, 0, self.layout, self.world_size)

    def parts_of(self, rank: int) -> list[Part]:
        """Its rows, which are the places of its keys too."""
        length = self.length // parts_per_rank(self.layout)
        parts = parts_of_rank(self.layout, rank, self.world_size)
        return [Part(slice(i * length, (i + 1) * length), part * length) for i, part in enumerate(parts)]

    def length_of(self, document: int | None) -> int:
        """How many places there are in what parts are of."""
        return self.world_size * self.length

    def _reading_of_whole_parts(self, rank: int, source: int) -> Reading:
        """Without a mask, or with a causal one alone: one block, of whole parts, or with the rank's own keys causal.

        In zigzag order a rank's second part lies behind the first parts of all others, and in front of the second parts
        of those before it.
        """
        is_causal, half = self.window == _CAUSAL, self.length // 2
        rows = keys = slice(0, self.length)
        if is_causal and rank != source:
            if self.layout == "zigzag":
                rows = rows if source < rank else slice(half, self.length)
                keys = keys if source > rank else slice(0, half)
            elif source > rank:
                return Reading((), ())
        window = _CAUSAL if is_causal and rank == source else _ALL_KEYS
        return Reading((keys,), (Block(rows, slice(0, keys.stop), 0, 0, window),))


@dataclass(frozen=True, eq=False)
class PackedSpread:
    """Packed sequences, here documents, in parts on the ranks. Every layer asks for the same: it is found once.

    ``parts``: of each rank, in the order of its rows, of which all ranks have ``length``: the last may belong to no
    document. ``lengths``: of each document.
    """

    parts: tuple[tuple[Part, ...], ...]
    length: int
    lengths: tuple[int, ...]
    window: Window
    _kept: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.parts)

    def reading(self, rank: int, source: int) -> Reading:
        """As that of ``Spread``."""
        return self.kept(_reading_of_packed, rank, source)

    def kept(self, find: Callable[..., Found], *args: Any) -> Found:
        """As that of ``Spread``; it lives as long as this."""
        call = (find, *args)
        if call not in self._kept:
            self._kept[call] = find(self, *args)
        found: Found = self._kept[call]
        return found

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        """As that of ``Spread``."""
        return self.parts[rank]

    def length_of(self, document: int | None) -> int:
        """As that of ``Spread``."""
        return self.lengths[document or 0]

    def blocks_over_all_keys(self, rank: int) -> list[Block]:
        """Of the rows of ``rank`` over the keys of all ranks, one document after the other."""
        first_of: dict[int | None, int] = {}
        num_keys = 0
        for part in self._in_order:
            first_of.setdefault(part.document, num_keys)
            num_keys += part.length
        return [
            _block_over_sequence(part, first_of[part.document], self.length_of(part.document), self.window)
            for part in self.parts[rank]
        ]

    def in_order(self, x: Tensor) -> Tensor:
        """``[W * length, …]``, what one rank after the other has, by documents and places."""
        return x.index_select(0, self._rows_in_order(x.device))

    def by_rank(self, x: Tensor) -> Tensor:
        """The inverse; rows of no document are 0."""
        result = x.new_zeros(self.world_size * self.length, *x.shape[1:])
        return result.index_copy_(0, self._rows_in_order(x.device), x)

    @functools.cached_property
    def _in_order(self) -> list[Part]:
        return in_order_of_documents(self.parts, self.length)

    @functools.cached_property
    def _rows_in_order(self) -> Rows:
        return Rows(part.rows for part in self._in_order)


def _reading_of_packed(spread: PackedSpread, rank: int, source: int) -> Reading:
    return _reading_of_parts(spread.parts[rank], spread.parts[source], spread.window)


@functools.lru_cache(maxsize=64)
def _found_for(find: Callable[..., Any], spread: Spread, *args: Any) -> Any:
    return find(spread, *args)


def in_order_of_documents(parts: Sequence[Sequence[Part]], length: int) -> list[Part]:
    """The parts of all ranks, with rows as they lie where one rank's ``length`` rows come after the other's."""
    moved = (part.moved(rank * length) for rank, of_rank in enumerate(parts) for part in of_rank)
    return sorted(moved, key=place_of)


def place_of(part: Part) -> tuple[int, int]:
    """Document and place of its first row: parts in this order are the documents, one after the other."""
    return part.document or 0, part.first


class Rows:
    """Numbers of rows, as int64 on a device, where they are kept."""

    def __init__(self, slices: Iterable[slice]) -> None:
        ranges = (torch.arange(of.start, of.stop) for of in slices)
        with torch.inference_mode(False):
            self._on: dict[torch.device, Tensor] = {
                torch.device("cpu"): torch.cat([torch.empty(0, dtype=torch.int64), *ranges])
            }

    def __call__(self, device: torch.device) -> Tensor:
        if device not in self._on:
            with torch.inference_mode(False):
                self._on[device] = self._on[torch.device("cpu")].to(device)
        return self._on[device]


def seen_pieces(own: Sequence[Part], of_source: Sequence[Part], window: Window) -> list[Part]:
    """Of the source's keys those that some of the own parts see: what one sees of a part is in one piece."""
    pieces = []
    for source in of_source:
        of_one = (keys_seen(part, source, window) for part in own if part.document == source.document)
        for keys in _merged(seen for seen in of_one if seen):
            rows = slice(source.rows.start + keys.start, source.rows.start + keys.stop)
            pieces.append(Part(rows, source.first + keys.start, source.document))
    return pieces


def _merged(ranges: Iterable[range]) -> list[range]:
    """What is in any of them, in order."""
    merged: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if merged and each.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
        else:
            merged.append(each)
    return merged


def keys_seen(part: Part, keys: Part, window: Window) -> range:
    """Of the keys of a part of the same sequence, those that some of the rows of ``part`` see."""
    return _seen(part, keys.first, keys.length, window)


def _reading_of_parts(own: Sequence[Part], of_source: Sequence[Part], window: Window) -> Reading:
    pieces = seen_pieces(own, of_source, window)
    blocks: list[Block] = []
    num_read = 0
    for piece in pieces:
        for part in own:
            if part.document == piece.document and (of := keys_seen(part, piece, window)):
                here = slice(num_read + of.start, num_read + of.stop)
                blocks.append(Block(part.rows, here, part.first, piece.first + of.start, window, part.document))
        num_read += piece.length
    return Reading(tuple(piece.rows for piece in pieces), tuple(blocks))


def _block_over_sequence(part: Part, first_key: int, length: int, window: Window) -> Block:
    """Over the keys of the whole sequence, which lie from ``first_key`` on."""
    seen = _seen(part, 0, length, window)
    keys = slice(first_key + seen.start, first_key + seen.stop)
    return Block(part.rows, keys, part.first, seen.start, window, part.document)


def _seen(part: Part, first_key: int, num_keys: int, window: Window) -> range:
    """Of keys from place ``first_key`` on, those that some of the rows see, from a multiple of four on."""
    left, right = window
    ahead = part.first - first_key
    begin = 0 if left < 0 else max(0, ahead - left)
    end = num_keys if right < 0 else min(num_keys, ahead + part.length + right)
    return range(begin // KEYS_OF_A_DRAW * KEYS_OF_A_DRAW, end) if begin < end else range(0)
