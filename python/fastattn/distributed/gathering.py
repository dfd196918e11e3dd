"""Attends with this rank's rows over gathered keys: the keys of all ranks, or only those that the rows see.

Keys are gathered for some heads at a time, and the keys of the next heads arrive while the rank attends with the
current heads. The backward pass gathers again, so that a rank holds only its own keys between the passes. It sums the
gradients of keys in float32, and each rank receives the sums for its own keys (Grattafiori et al., "The Llama 3 herd of
models", 2024, section 3.3.2).

With a window, or if each packed sequence is spread over only a few ranks, a rank sees few of all keys. Then each rank
sends to every other rank only the keys that the other rank reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.distributed.blocks import (
    KEYS_OF_A_DRAW,
    AnySpread,
    Block,
    Part,
    Spread,
    Window,
    cached_in_first,
    keys_seen,
    position_of,
    seen_ranges,
)
from fastattn.distributed.collectives import Started, start_all_gather, start_all_to_all, start_reduce_scatter
from fastattn.distributed.local_attention import LocalAttention, OtherSums, Tensors, query_heads
from fastattn.functional.attention_block import BackwardTensors

MOST_GROUPS_OF_HEADS = 4  # more groups mean more messages and launches, and hide little more of the communication


def attend_to_keys(
    attention: LocalAttention, inputs: Tensors, spread: AnySpread, group: dist.ProcessGroup, results: Tensors
) -> None:
    """Writes this rank's results over the keys of all ranks into ``results``, the output and the lse."""
    (query, key, value), (out, lse) = inputs, results
    gathering = gathering_of(spread, group)
    for heads, _, keys, values in _gathered(query, key, value, gathering, spread.world_size):
        for block in gathering.blocks:
            own_query, block_keys = query[:, heads, block.rows], keys[:, :, block.keys]
            found = attention.for_heads(heads).results(own_query, block_keys, values[:, :, block.keys], block)
            out[:, heads, block.rows], lse[:, heads, block.rows] = found


def gradients_of_keys(
    attention: LocalAttention, tensors: BackwardTensors, spread: AnySpread, group: dist.ProcessGroup, sums: OtherSums
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of this rank's keys and values; adds the gradients of query and slopes to ``sums``."""
    query, key, value = tensors.query, tensors.key, tensors.value
    gathering = gathering_of(spread, group)
    gradients = torch.empty_like(key), torch.empty_like(value)
    # Slices of ``gradients``, each with the sums that will arrive for it. Only one group of heads is in flight, because
    # its sums take memory while the next group computes.
    sent_back: list[tuple[Tensor, Started]] = []
    for heads, kv_heads, keys, values in _gathered(query, key, value, gathering, spread.world_size):
        given = tensors._replace(key=keys, value=values)
        key_sums = attention.gradients(given, heads, gathering.blocks, sums)
        _finish(sent_back, gathering)
        sent_back = [
            (gradient[:, kv_heads], gathering.start_back(key_sum.movedim(2, 0)))
            for gradient, key_sum in zip(gradients, key_sums, strict=True)
        ]
    _finish(sent_back, gathering)
    return gradients


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, gathering: Gathering, world_size: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields the query heads, KV heads, gathered keys and gathered values of each group of heads."""
    kv_heads = key.shape[1]
    num_groups = min(kv_heads, MOST_GROUPS_OF_HEADS) if world_size > 1 else 1
    bounds = [kv_heads * i // num_groups for i in range(num_groups + 1)] if num_groups else [0]
    groups = [slice(begin, end) for begin, end in pairwise(bounds)]

    def start(heads: slice) -> list[Started]:
        return [gathering.start(tensor[:, heads].movedim(2, 0)) for tensor in (key, value)]

    under_way = start(groups[0]) if groups else []
    for i, heads in enumerate(groups):
        keys, values = (gathering.by_positions(started.wait()).movedim(0, 2) for started in under_way)
        under_way = start(groups[i + 1]) if i + 1 < len(groups) else []
        yield query_heads(heads, query, key), heads, keys, values


def _finish(sent_back: list[tuple[Tensor, Started]], gathering: Gathering) -> None:
    for gradient, started in sent_back:
        gradient.copy_(gathering.own_sums(started.wait()).movedim(0, 2))


# --- Communication ----------------------------------------------------------------------------------------------------

# If every rank reads at most this fraction of the other ranks' keys, a rank receives only the keys that it reads. The
# fraction is small, because an NCCL all-gather sends a key to a node once, but an all-to-all sends it once for each GPU
# of the node that reads it.
MOST_READ = 0.25


class AllKeys:
    """Gathers the keys of all ranks.

    The first dimension of all tensors is the keys: this rank's own keys, or the gathered keys. Gathered keys arrive in
    the order of ranks, and `by_positions` sorts them. ``blocks`` has the blocks of this rank's rows over the sorted
    keys.
    """

    def __init__(self, spread: AnySpread, group: dist.ProcessGroup) -> None:
        self._spread, self._group = spread, group
        self.blocks: Sequence[Block] = spread.blocks_over_all_keys(dist.get_rank(group))

    def start(self, own: Tensor) -> Started:
        return start_all_gather(own.contiguous(), self._group)

    def by_positions(self, arrived: Tensor) -> Tensor:
        """Sorts the gathered keys by position; they arrive in the order of ranks."""
        return self._spread.in_order(arrived)

    def start_back(self, sums: Tensor) -> Started:
        """Starts to send ``sums``, the gradients of the gathered keys, to the ranks that own these keys."""
        return start_reduce_scatter(self._spread.by_rank(sums).contiguous(), self._group)

    def own_sums(self, arrived: Tensor) -> Tensor:
        """Returns the gradients of this rank's keys, summed over all ranks, from the tensor that has arrived."""
        return arrived


class KeysThatAreRead:
    """Gathers only the keys that this rank reads. It has the same methods as ``AllKeys``."""

    def __init__(self, spread: AnySpread, group: dist.ProcessGroup) -> None:
        self._group, self._num_own = group, spread.length
        self._keys = exchanged_keys(spread, dist.get_rank(group))
        self.blocks: Sequence[Block] = self._keys.blocks

    def start(self, own: Tensor) -> Started:
        given, read = self._keys.given, self._keys.read
        x = torch.cat([own[:0], *(own[keys.rows] for keys in given.ranges)])
        return start_all_to_all(x, read.by_rank, given.by_rank, self._group)

    def by_positions(self, arrived: Tensor) -> Tensor:
        order = self._keys.order
        return arrived if order is None else torch.cat([arrived[rows] for rows in order])

    def start_back(self, sums: Tensor) -> Started:
        keys = self._keys
        if keys.order is None:
            by_rank = sums.contiguous()
        else:
            by_rank = torch.empty_like(sums, memory_format=torch.contiguous_format)
            for rows, part in zip(keys.order, sums.split([each.length for each in keys.ranges]), strict=True):
                by_rank[rows] = part
        return start_all_to_all(by_rank, keys.given.by_rank, keys.read.by_rank, self._group)

    def own_sums(self, arrived: Tensor) -> Tensor:
        ranges = self._keys.given.ranges
        sums = arrived.new_zeros(self._num_own, *arrived.shape[1:])
        for keys, part in zip(ranges, arrived.split([keys.length for keys in ranges]), strict=True):
            sums[keys.rows] += part
        return sums


Gathering: TypeAlias = AllKeys | KeysThatAreRead


def gathering_of(spread: AnySpread, group: dist.ProcessGroup) -> Gathering:
    return KeysThatAreRead(spread, group) if reads_little(spread) else AllKeys(spread, group)


# --- The keys that a rank reads ---------------------------------------------------------------------------------------


@cached_in_first
def reads_little(spread: AnySpread) -> bool:
    """Returns whether every rank reads at most the fraction ``MOST_READ`` of the other ranks' keys."""

    def most_read(parts: Sequence[Part]) -> int:
        """Returns an upper bound on the number of keys that these parts read from other ranks.

        It is the sum over the parts. A sequence counts with at most all its keys.
        """
        seen: dict[int | None, int] = {}
        for part in parts:
            whole = Part(slice(0, spread.length_of(part.document)), 0, part.document)
            num_seen = len(keys_seen(part, whole, spread.window))
            seen[part.document] = min(seen.get(part.document, 0) + num_seen, whole.length)
        return sum(seen.values()) - sum(part.length for part in parts)

    ranks = [spread.parts_of(rank) for rank in range(spread.world_size)]
    # With dropout, parts must begin at a multiple of KEYS_OF_A_DRAW. Parts of packed sequences do.
    may_draw = isinstance(spread, Spread) and spread.uses_positions
    begin_with_draws = all(part.first % KEYS_OF_A_DRAW == 0 for parts in ranks for part in parts)
    if len(ranks) < 2 or (may_draw and not begin_with_draws):
        return False
    return all(most_read(parts) <= MOST_READ * (len(ranks) - 1) * spread.length for parts in ranks)


class Message(NamedTuple):
    """Holds the ranges of keys to send or receive, in order, and how many of the keys go to or come from each rank."""

    ranges: tuple[Part, ...]
    by_rank: list[int]

    @staticmethod
    def of(ranges_by_rank: Iterable[Sequence[Part]]) -> Message:
        listed = list(ranges_by_rank)
        return Message(tuple(chain(*listed)), [sum(keys.length for keys in ranges) for ranges in listed])


class ExchangedKeys(NamedTuple):
    """Holds the keys that a rank receives from each rank (``read``) and sends to each rank (``given``).

    ``ranges`` are the received keys, sorted by position. ``order`` has the slice of the received tensor in which each
    range arrives, or is None if the ranges arrive sorted. ``blocks`` has the blocks of the rank's rows over ``ranges``.
    """

    read: Message
    given: Message
    order: list[slice] | None
    ranges: list[Part]
    blocks: list[Block]


@cached_in_first
def exchanged_keys(spread: AnySpread, rank: int) -> ExchangedKeys:
    parts = [spread.parts_of(other) for other in range(spread.world_size)]
    read = Message.of(seen_ranges(parts[rank], source_parts, spread.window) for source_parts in parts)
    given = Message.of(seen_ranges(reader_parts, parts[rank], spread.window) for reader_parts in parts)
    ends = accumulate(keys.length for keys in read.ranges)
    arriving = [(keys, slice(end - keys.length, end)) for keys, end in zip(read.ranges, ends, strict=True)]
    in_order = sorted(arriving, key=lambda each: position_of(each[0]))
    order = None if in_order == arriving else [rows for _, rows in in_order]
    ranges = [keys for keys, _ in in_order]
    return ExchangedKeys(read, given, order, ranges, _blocks_over(ranges, parts[rank], spread.window))


def _blocks_over(ranges: Sequence[Part], own: Sequence[Part], window: Window) -> list[Block]:
    """Returns the blocks of the parts ``own`` over the keys that these parts see in ``ranges``, sorted by position.

    One block per part is enough: no keys are missing between two ranges that a part sees.
    """
    begins = list(accumulate((keys.length for keys in ranges), initial=0))
    blocks = []
    for part in own:
        seen = [
            (begin + of.start, begin + of.stop, keys.first + of.start)
            for keys, begin in zip(ranges, begins, strict=False)
            if keys.document == part.document and (of := keys_seen(part, keys, window))
        ]
        if seen:
            keys, first_key = slice(seen[0][0], seen[-1][1]), seen[0][2]
            blocks.append(Block(part.rows, keys, part.first, first_key, window, part.document))
    return blocks
