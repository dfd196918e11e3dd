"""How busy the backward pass for Hopper keeps the SMs: its tiles of keys, as csrc/attention/row_shares.h cuts them.

What comes out is a PREDICTION, never a result. Time is counted in steps of the kernel for dK and dV, a tile of query
rows each. CTAs claim shares of tiles in order, one as soon as they are done with another, as
csrc/attention/backward_work_sm90.cuh says. Beside its steps a tile costs ``STEPS_PER_TILE``, and each share of one that
CTAs share ``STEPS_PER_SHARE``: K and V have to come, and dK and dV to leave.

In deterministic order one tile of keys after the other adds to a tile of dQ's sums: an addition of 16 KiB has to be
complete in the L2 cache, its turn to be passed on and to be seen. A CTA computes meanwhile, until it has the next part.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from fastattn import native

# As in csrc/attention/row_shares.h and plan_row_shares.h.
STEPS_PER_TILE, STEPS_PER_SHARE, LEAST_STEPS_OF_SHARE = 0.75, 1.5, 4
# Assumptions, of the 3650 clocks that a step of 128 dims is predicted to take: 1000 until an addition is complete, 500
# for a fence and an addition to the counter, and 500 until another CTA sees it. The place of a part in shared memory is
# free as soon as it has been read.
PASSED_ON = 1500 / 3650
SEEN = 500 / 3650
READ = 500 / 3650


@dataclass(frozen=True)
class BackwardShape:
    """Of ``lengths``, one for each sequence: its query rows and its keys. ``window``: keys that a row sees before and
    after its own, which stands as far from the end; -1: all."""

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
    """``busy``: the part of all SMs' time in which they have work, be it steps or what each share costs beside them.
    ``useful``: the part in which they have steps. ``steps``: of the mean SM."""

    busy: float
    useful: float
    steps: float


def row_tiles(rows: int, keys: int, window: tuple[int, int], first_key: int, dealt: native.DealtBackward) -> range:
    """Tiles of rows that see some of the keys from ``first_key`` on."""
    left, right = window
    last_key, offset = min(first_key + dealt.block_n, keys) - 1, keys - rows
    begin = 0 if right < 0 else min(max(first_key - offset - right, 0), rows)
    end = rows if left < 0 else max(min(last_key - offset + left + 1, rows), 0)
    return range(begin // dealt.block_m, max(-(-end // dealt.block_m), begin // dealt.block_m))


def _tiles(shape: BackwardShape, dealt: native.DealtBackward) -> Iterator[tuple[int, int, int]]:
    """Sequence, KV head and first key of each tile, in the order in which they are claimed; see tile_order.h."""
    heads = [(index, head) for index in range(len(shape.lengths)) for head in range(shape.kv_heads)]
    # Sequences that are packed come one after the other, as they may differ in length.
    of_sequences = [heads] if not shape.packed else [list(own) for _, own in itertools.groupby(heads, lambda at: at[0])]
    for own in of_sequences:
        for first in range(0, len(own), dealt.heads_per_group):
            for first_key in range(0, shape.lengths[own[0][0]][1], dealt.block_n):
                yield from ((*at, first_key) for at in own[first : first + dealt.heads_per_group])


def _shares(heads: range, rows: range, dealt: native.DealtBackward, is_cut: bool) -> Iterator[tuple[range, range]]:
    """Query heads and tiles of rows of each CTA that shares a tile of keys."""
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
    free = [0.0] * num_sms  # when each CTA is
    turns: dict[tuple[int, int, int], float] = {}  # of a query head's tile of rows, when the next may be added
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
    """When a CTA that begins to compute then has its last part added."""
    computed = place_free = adder_free = begin
    for at in walk:
        computed = max(computed + 1, place_free)
        added = max(computed, adder_free, turns.get(at, 0.0))
        place_free = added + READ
        adder_free = added + PASSED_ON  # it passes the turn on before it takes the next part
        turns[at] = adder_free + SEEN
    return max(computed, adder_free)
