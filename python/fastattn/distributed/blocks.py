"""Describes which rows of one rank attend to which keys of another rank, by positions in the whole sequence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fastattn.distributed.sequence import in_order_of_parts, in_order_of_ranks, parts_of_rank, parts_per_rank

_Function = TypeVar("_Function", bound=Callable[..., Any])
Window = tuple[int, int]  # how many keys a row sees before and after its own position; -1: all
_ALL, _ALL_KEYS, _CAUSAL = slice(None), (-1, -1), (-1, 0)
KEYS_OF_A_DRAW = 4  # dropout draws numbers for 4 keys at a time, so a block's keys begin at a multiple of 4


def cached_in_first(function: _Function) -> _Function:
    """Caches a function's results in the object that is its first argument. The other arguments are the cache's key.

    The results are worth caching because every layer of a model asks for the same ones.
    """

    @functools.wraps(function)
    def found(first: Any, *args: Any) -> Any:
        results = vars(first).setdefault("_cached", {})
        call = (function.__qualname__, *args)  # the name instead of the function, so that the object can be pickled
        if call not in results:
            results[call] = function(first, *args)
        return results[call]

    return cast(_Function, found)


class Part(NamedTuple):
    """Holds a range of consecutive rows on a rank.

    ``first`` is the position of the first row in its sequence. ``document`` is the number of this sequence among packed
    sequences, or None if the rank's sequence is not packed.
    """

    rows: slice
    first: int
    document: int | None = None

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start

    def moved(self, rows: int) -> Part:
        """Returns the part with its rows shifted by ``rows``."""
        return self._replace(rows=slice(self.rows.start + rows, self.rows.stop + rows))


class Block(NamedTuple):
    """Describes a block of scores: the slices of its rows and keys, the positions of its first row and first key in the
    sequence, and the window over these positions.

    If ``document`` is not None, the sequence is the packed sequence with this number.
    If ``first_row`` is None, the last row has the position of the last key.
    """

    rows: slice
    keys: slice
    first_row: int | None
    first_key: int
    window: Window
    document: int | None = None


class Reading(NamedTuple):
    """Holds the slices of a source rank's keys that a rank reads, and the blocks of the reading rank's rows over the
    concatenated slices."""

    keys: tuple[slice, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class Spread:
    """Describes a sequence that is spread over ranks. Each rank has ``length`` rows and keys.

    ``uses_positions`` is true with ALiBi, dropout or key ranges: scores then depend on the positions of row and key.
    """

    layout: str
    world_size: int
    length: int
    window: Window
    uses_positions: bool

    @cached_in_first
    def reading(self, rank: int, source: int) -> Reading:
        """Returns which keys of ``source`` are read by ``rank``: only keys that its rows see, so possibly none."""
        if not self.uses_positions and self.window in (_ALL_KEYS, _CAUSAL):
            return self._reading_of_whole_parts(rank, source)
        return _reading_of_parts(self.parts_of(rank), self.parts_of(source), self.window)

    def blocks_over_all_keys(self, rank: int) -> list[Block]:
        """Returns the blocks of the rows of ``rank`` over the keys of all ranks. These keys are sorted by position."""
        total = self.world_size * self.length
        if not self.uses_positions and self.window == _ALL_KEYS:
            return [Block(_ALL, slice(0, total), 0, 0, _ALL_KEYS)]
        return [_block_over(part, Part(slice(0, total), 0), self.window) for part in self.parts_of(rank)]

    def in_order(self, x: Tensor) -> Tensor:
        """Reorders the rows of ``x [W * length, …]`` from the order of ranks to the order of positions."""
        return in_order_of_parts(x, 0, self.layout, self.world_size)

    def by_rank(self, x: Tensor) -> Tensor:
        """Undoes ``in_order``."""
        return in_order_of_ranks(x, 0, self.layout, self.world_size)

    def parts_of(self, rank: int) -> list[Part]:
        """Returns the parts of ``rank``. They describe both the rows and the keys of this rank."""
        length = self.length // parts_per_rank(self.layout)
        parts = parts_of_rank(self.layout, rank, self.world_size)
        return [Part(slice(i * length, (i + 1) * length), part * length) for i, part in enumerate(parts)]

    def length_of(self, document: int | None) -> int:
        """Returns the length of the whole sequence. Only ``PackedSpread`` uses ``document``."""
        return self.world_size * self.length

    def _reading_of_whole_parts(self, rank: int, source: int) -> Reading:
        """Returns the reading for attention without a mask, or with only a causal mask. It has at most one block.

        With a causal mask, the block over the rank's own keys is causal. The block over another rank's keys needs no
        mask, because a row sees either all or no keys of a part: in zigzag order, a rank's second part follows the
        first parts of all ranks, and precedes the second parts of all ranks with a lower number.
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


spread_of = functools.lru_cache(maxsize=64)(Spread)  # so that all layers share one object and its cached results


@dataclass(frozen=True, eq=False)
class PackedSpread:
    """Describes packed sequences, here called documents, that are spread over ranks.

    ``parts`` lists the parts of each rank in the order of the rank's rows. Every rank has ``length`` rows. The last
    rows can be padding, which belongs to no document. ``lengths`` has the length of each document.
    """

    parts: tuple[tuple[Part, ...], ...]
    length: int
    lengths: tuple[int, ...]
    window: Window

    @property
    def world_size(self) -> int:
        return len(self.parts)

    @cached_in_first
    def reading(self, rank: int, source: int) -> Reading:
        return _reading_of_parts(self.parts[rank], self.parts[source], self.window)

    def parts_of(self, rank: int) -> tuple[Part, ...]:
        return self.parts[rank]

    def length_of(self, document: int | None) -> int:
        """Returns the length of ``document``."""
        return self.lengths[document or 0]

    def blocks_over_all_keys(self, rank: int) -> list[Block]:
        """Returns the blocks of the rows of ``rank`` over the keys of all ranks.

        These keys are sorted by document and position.
        """
        keys_of: dict[int | None, Part] = {}
        num_keys = 0
        for document in sorted({part.document or 0 for parts in self.parts for part in parts}):
            keys_of[document] = Part(slice(num_keys, num_keys + self.lengths[document]), 0, document)
            num_keys += self.lengths[document]
        return [_block_over(part, keys_of[part.document], self.window) for part in self.parts[rank]]

    def in_order(self, x: Tensor) -> Tensor:
        """Sorts the rows of ``x [W * length, …]`` by document and position, and leaves out padding."""
        return x.index_select(0, self._rows_in_order(x.device))

    def by_rank(self, x: Tensor) -> Tensor:
        """Undoes ``in_order``. Padding rows are 0."""
        result = x.new_zeros(self.world_size * self.length, *x.shape[1:])
        return result.index_copy_(0, self._rows_in_order(x.device), x)

    @cached_in_first
    def _rows_in_order(self, device: torch.device) -> Tensor:
        return row_numbers((part.rows for part in in_order_of_documents(self.parts, self.length)), device)


AnySpread: TypeAlias = Spread | PackedSpread


def in_order_of_documents(parts: Sequence[Sequence[Part]], length: int) -> list[Part]:
    """Returns the parts of all ranks, sorted by document and position. Rows of rank r are shifted by ``r * length``."""
    moved = (part.moved(rank * length) for rank, own in enumerate(parts) for part in own)
    return sorted(moved, key=position_of)


def position_of(part: Part) -> tuple[int, int]:
    """Returns the sort key of a part: its document, and the position of its first row in this document."""
    return part.document or 0, part.first


def row_numbers(slices: Iterable[slice], device: torch.device) -> Tensor:
    """Returns the indices of the rows in ``slices``, int64.

    The tensor is made outside of inference mode, because it is cached, and autograd may need it in a later call.
    """
    with torch.inference_mode(False):
        return torch.cat([torch.arange(0), *(torch.arange(of.start, of.stop) for of in slices)]).to(device)


def seen_ranges(own: Sequence[Part], source_parts: Sequence[Part], window: Window) -> list[Part]:
    """Returns the keys of ``source_parts`` that at least one part in ``own`` sees, as ranges of consecutive keys."""
    found = []
    for source in source_parts:
        ranges = (keys_seen(part, source, window) for part in own if part.document == source.document)
        for seen in _merged(seen for seen in ranges if seen):
            rows = slice(source.rows.start + seen.start, source.rows.start + seen.stop)
            found.append(Part(rows, source.first + seen.start, source.document))
    return found


def _merged(ranges: Iterable[range]) -> list[range]:
    """Returns the union of the ranges, in order and without overlaps."""
    merged: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if merged and each.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
        else:
            merged.append(each)
    return merged


def keys_seen(part: Part, keys: Part, window: Window) -> range:
    """Returns the range of keys in ``keys`` that at least one row of ``part`` sees; both are parts of one sequence.

    The range counts from the first key of ``keys`` and begins at a multiple of ``KEYS_OF_A_DRAW``.
    """
    left, right = window
    ahead = part.first - keys.first
    begin = 0 if left < 0 else max(0, ahead - left)
    end = keys.length if right < 0 else min(keys.length, ahead + part.length + right)
    return range(begin // KEYS_OF_A_DRAW * KEYS_OF_A_DRAW, end) if begin < end else range(0)


def _reading_of_parts(own: Sequence[Part], source_parts: Sequence[Part], window: Window) -> Reading:
    ranges = seen_ranges(own, source_parts, window)
    blocks: list[Block] = []
    num_read = 0
    for keys in ranges:
        read = keys._replace(rows=slice(num_read, num_read + keys.length))
        found = (_block_over(part, read, window) for part in own if part.document == keys.document)
        blocks += [block for block in found if block.keys.start < block.keys.stop]
        num_read += keys.length
    return Reading(tuple(keys.rows for keys in ranges), tuple(blocks))


def _block_over(part: Part, keys: Part, window: Window) -> Block:
    """Returns the block of the rows of ``part`` and the keys that they see within ``keys``.

    ``keys.rows`` is the place of ``keys`` in a tensor. ``Block.keys`` is a slice of the same tensor.
    """
    seen, first_key = keys_seen(part, keys, window), keys.rows.start
    read = slice(first_key + seen.start, first_key + seen.stop)
    return Block(part.rows, read, part.first, keys.first + seen.start, window, part.document)
