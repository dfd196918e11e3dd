"""Predicts how busy the backward pass for Hopper keeps the SMs with key tiles as csrc/attention/row_shares.h cuts them.

The figures are a PREDICTION, never a result. Time is counted in steps of the kernel for dK and dV, each of which
processes one tile of query rows. CTAs claim shares of key tiles in order, the next one as soon as they finish one, as
csrc/attention/backward_work_sm90.cuh says. Beside its steps, a tile that one CTA computes costs ``STEPS_PER_TILE``, and
each share of a tile that several CTAs share ``STEPS_PER_SHARE``: to load K and V, and to write dK and dV.

In deterministic order, key tiles add to the sums of a dQ tile one after the other: an addition of 16 KiB has to
complete in the L2 cache before its CTA passes the turn on, and the next CTA has to see that. Meanwhile a CTA computes,
until its next part is done.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from fastattn import native

# The same values as in csrc/attention/row_shares.h and plan_row_shares.h.
STEPS_PER_TILE, STEPS_PER_SHARE, LEAST_STEPS_OF_SHARE = 0.75, 1.5, 4
# A step of 128 dims is predicted to take 3650 clocks. Assumed are 1000 clocks until an addition is complete, 500 for a
# fence and an addition to the counter, and 500 until another CTA sees it. A part's place in shared memory is free as
# soon as the addition has read it, after 500.
PASSED_ON = 1500 / 3650
SEEN = 500 / 3650
READ = 500 / 3650


@dataclass(frozen=True)
class BackwardShape:
    """The shape of a backward pass. ``lengths`` has the query rows and the keys of each sequence.

    ``window`` is how many keys a row sees before and after its own key, which is as far from the last key as the row is
    from the last row; -1 means all.
    """

    lengths: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    window: tuple[int, int] = (-1, -1)
    packed: bool = False
    deterministic: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Schedule:
    """The result of a schedule.

    ``busy`` is the fraction of all SMs' time in which they have work: steps, or the cost of a tile or share beside
    them. ``useful`` is the fraction in which they have steps, and ``steps`` the mean number of steps of an SM.
    """

    busy: float
    useful: float
    steps: float


def row_tiles(rows: int, keys: int, window: tuple[int, int], first_key: int, dealt: native.DealtBackward) -> range:
    """Returns the tiles of query rows that see some key of the key tile from ``first_key`` on."""
    left, right = window
    last_key, offset = min(first_key + dealt.block_n, keys) - 1, keys - rows
    begin = 0 if right < 0 else min(max(first_key - offset - right, 0), rows)
    end = rows if left < 0 else max(min(last_key - offset + left + 1, rows), 0)
    return range(begin // dealt.block_m, max(-(-end // dealt.block_m), begin // dealt.block_m))


def _tiles(shape: BackwardShape, dealt: native.DealtBackward) -> Iterator[tuple[int, int, int]]:
    """Yields sequence, KV head and first key of each key tile, in the order in which CTAs claim them (tile_order.h)."""
    heads = [(index, head) for index in range(len(shape.lengths)) for head in range(shape.kv_heads)]
    # Packed sequences may differ in length, so they come one after the other.
    of_sequences = [heads] if not shape.packed else [list(own) for _, own in itertools.groupby(heads, lambda at: at[0])]
    for own in of_sequences:
        for first in range(0, len(own), dealt.heads_per_group):
            for first_key in range(0, shape.lengths[own[0][0]][1], dealt.block_n):
                yield from ((*at, first_key) for at in own[first : first + dealt.heads_per_group])


def _shares(heads: range, rows: range, dealt: native.DealtBackward, is_cut: bool) -> Iterator[tuple[range, range]]:
    """Yields the query heads and the row tiles of each CTA that computes a share of a key tile."""
    steps_of_heads = len(heads) // dealt.of_heads * len(rows)
    if not is_cut or steps_of_heads < LEAST_STEPS_OF_SHARE:
        yield heads, rows
        return
    of_rows = min(steps_of_heads // LEAST_STEPS_OF_SHARE, len(rows), dealt.of_rows)
    per_part = len(heads) // dealt.of_heads
    for first in range(0, len(heads), per_part):
        left = rows
        for more in range(of_rows, 0, -1):  # the last rows first
            count = -(-len(left) // more)
            yield heads[first : first + per_part], left[len(left) - count :]
            left = left[: len(left) - count]


def schedule(shape: BackwardShape, dealt: native.DealtBackward, num_sms: int) -> Schedule:
    free = [0.0] * num_sms  # when each CTA is free
    turns: dict[tuple[int, int, int], float] = {}  # when the next part may be added to a query head's tile of rows
    steps, busy = 0, 0.0
    for number, (index, kv_head, first_key) in enumerate(_tiles(shape, dealt)):
        seen = row_tiles(*shape.lengths[index], shape.window, first_key, dealt)
        group = range(kv_head * shape.group, (kv_head + 1) * shape.group)
        shares = list(_shares(group, seen, dealt, number >= dealt.first_tile))
        cost = STEPS_PER_TILE if len(shares) == 1 else STEPS_PER_SHARE
        for heads, rows in shares:
            begin = heapq.heappop(free) + cost
            end = begin + len(heads) * len(rows)
            if shape.deterministic:
                end = _end_with_turns([(index, head, row) for row in reversed(rows) for head in heads], begin, turns)
            heapq.heappush(free, end)
            steps += len(heads) * len(rows)
            busy += cost + len(heads) * len(rows)
    last = max(free)
    return Schedule(busy / (num_sms * last), steps / (num_sms * last), steps / num_sms)


def _end_with_turns(walk: list[tuple[int, int, int]], begin: float, turns: dict[tuple[int, int, int], float]) -> float:
    """Returns when a CTA that begins to compute at ``begin`` has added its last part, and updates ``turns``."""
    computed = place_free = adder_free = begin
    for at in walk:
        computed = max(computed + 1, place_free)
        added = max(computed, adder_free, turns.get(at, 0.0))
        place_free = added + READ
        adder_free = added + PASSED_ON  # it passes the turn on before it takes the next part
        turns[at] = adder_free + SEEN
    return max(computed, adder_free)
