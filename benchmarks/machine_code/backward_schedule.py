"""Simulates how busy Hopper's backward pass keeps the SMs of an H200. Its unit of time is a main-loop step.

``python -m benchmarks.machine_code.backward_schedule --tokens 8192 --heads 8 --kv-heads 1`` compares whole tiles of
keys with the splits that the library chooses, each with dQ summed in any order and in deterministic order. It prints
the fraction of the SMs' time with work (busy), the fraction with main-loop steps (useful), and the mean number of steps
of an SM.

A step of the kernel for dK and dV processes one tile of query rows. CTAs claim tiles of keys, or splits of key tiles,
in order; a CTA that has finished a tile or split claims the next (csrc/attention/backward_work_sm90.cuh). Loading K and
V and writing dK and dV costs as much time as some steps. In deterministic order, CTAs add to a dQ tile one after the
other: one addition must be complete before the next CTA may add. While its partial waits, a CTA computes its next
partial.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import benchmarks.machine_code  # noqa: F401  isort: skip  (before whatever imports fastattn)

from benchmarks.measure.tables import aligned
from emulator.device import USUAL
from fastattn import native

NUM_SMS, SHARED_BYTES = USUAL[90]
L2_BYTES = 50 << 20
# The same values as in csrc/scheduler/choose_row_splits.h and row_splits.h.
STEPS_PER_TILE, STEPS_PER_SPLIT, LEAST_STEPS_OF_SPLIT = 0.75, 1.5, 4
# Assumed times, in steps: from the beginning of an addition until it has read its shared memory (READ), and until it is
# complete (PASSED_ON); from its completion until another CTA sees that it is complete (SEEN).
PASSED_ON, SEEN, READ = 0.4, 0.15, 0.15


@dataclass(frozen=True)
class BackwardShape:
    """Describes a backward pass. ``lengths`` has the query rows and the keys of each sequence.

    ``window`` is how many keys a row sees before and after its own key; -1 means all. The own key of the last row is
    the last key.
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
    """Says how well a schedule keeps the SMs at work.

    ``busy`` is the fraction of the SMs' time with work: steps, or the fixed cost of a tile or split. ``useful`` is the
    fraction with steps, and ``steps`` the mean number of steps of an SM.
    """

    busy: float
    useful: float
    steps: float


def row_tiles(rows: int, keys: int, window: tuple[int, int], first_key: int, dealt: native.BackwardSchedule) -> range:
    """Returns the tiles of query rows that see some key of the key tile that begins at ``first_key``."""
    left, right = window
    last_key, offset = min(first_key + dealt.block_n, keys) - 1, keys - rows
    begin = 0 if right < 0 else min(max(first_key - offset - right, 0), rows)
    end = rows if left < 0 else max(min(last_key - offset + left + 1, rows), 0)
    return range(begin // dealt.block_m, max(-(-end // dealt.block_m), begin // dealt.block_m))


def _tiles(shape: BackwardShape, dealt: native.BackwardSchedule) -> Iterator[tuple[int, int, int]]:
    """Yields sequence, KV head and first key of each key tile, in the order in which CTAs claim them (work_tile.h)."""
    heads = [(index, head) for index in range(len(shape.lengths)) for head in range(shape.kv_heads)]
    # Packed sequences may differ in length, so CTAs claim the tiles of one sequence after the other.
    of_sequences = [heads] if not shape.packed else [list(own) for _, own in itertools.groupby(heads, lambda at: at[0])]
    for own in of_sequences:
        for first in range(0, len(own), dealt.heads_per_group):
            for first_key in range(0, shape.lengths[own[0][0]][1], dealt.block_n):
                yield from ((*at, first_key) for at in own[first : first + dealt.heads_per_group])


def _splits(heads: range, rows: range, dealt: native.BackwardSchedule, is_cut: bool) -> Iterator[tuple[range, range]]:
    """Yields the query heads and the row tiles of each CTA that computes a split of a key tile."""
    steps_of_heads = len(heads) // dealt.over_heads * len(rows)
    if not is_cut or steps_of_heads < LEAST_STEPS_OF_SPLIT:
        yield heads, rows
        return
    over_rows = min(steps_of_heads // LEAST_STEPS_OF_SPLIT, len(rows), dealt.over_rows)
    per_split = len(heads) // dealt.over_heads
    for first in range(0, len(heads), per_split):
        left = rows
        for more in range(over_rows, 0, -1):  # the last rows first
            count = -(-len(left) // more)
            yield heads[first : first + per_split], left[len(left) - count :]
            left = left[: len(left) - count]


def deal(
    shape: BackwardShape, head_dim: int, num_sms: int = NUM_SMS, l2_bytes: int = L2_BYTES
) -> native.BackwardSchedule:
    """Returns the splits that the library chooses."""
    return native.backward_schedule(
        native.NativeDeviceFacts(90, num_sms, l2_bytes, SHARED_BYTES),
        head_dim,
        batch=len(shape.lengths),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        rows=max(rows for rows, _ in shape.lengths),
        keys=max(keys for _, keys in shape.lengths),
        total_keys=sum(keys for _, keys in shape.lengths) if shape.packed else None,
        window=shape.window,
        deterministic=shape.deterministic,
    )


def schedule(shape: BackwardShape, dealt: native.BackwardSchedule, num_sms: int = NUM_SMS) -> Schedule:
    """Simulates the CTAs, one for each SM."""
    free = [0.0] * num_sms  # the times at which the CTAs become free
    may_add: dict[tuple[int, int, int], float] = {}  # (sequence, head, row tile) → when the next CTA may add
    steps, busy = 0, 0.0
    for number, (index, kv_head, first_key) in enumerate(_tiles(shape, dealt)):
        seen = row_tiles(*shape.lengths[index], shape.window, first_key, dealt)
        group = range(kv_head * shape.group, (kv_head + 1) * shape.group)
        splits = list(_splits(group, seen, dealt, number >= dealt.first_tile))
        cost = STEPS_PER_TILE if len(splits) == 1 else STEPS_PER_SPLIT
        for heads, rows in splits:
            begin = heapq.heappop(free) + cost
            end = begin + len(heads) * len(rows)
            if shape.deterministic:
                end = _end_in_order([(index, head, row) for row in reversed(rows) for head in heads], begin, may_add)
            heapq.heappush(free, end)
            steps += len(heads) * len(rows)
            busy += cost + len(heads) * len(rows)
    last = max(free)
    return Schedule(busy / (num_sms * last), steps / (num_sms * last), steps / num_sms)


def _end_in_order(walk: list[tuple[int, int, int]], begin: float, may_add: dict[tuple[int, int, int], float]) -> float:
    """Returns when a CTA that begins to compute at ``begin`` has added its last partial, and updates ``may_add``."""
    computed = buffer_free = adder_free = begin
    for at in walk:
        computed = max(computed + 1, buffer_free)
        added = max(computed, adder_free, may_add.get(at, 0.0))
        buffer_free = added + READ
        adder_free = added + PASSED_ON  # the next CTA may add before this CTA adds its next partial
        may_add[at] = adder_free + SEEN
    return max(computed, adder_free)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("tokens", 8192), ("batch", 1), ("heads", 8), ("kv-heads", 1), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=usual, help=f"default {usual}")
    parser.add_argument("--window", type=int, default=-1, help="how many keys before its own key a row sees; -1: all")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    chosen = parser.parse_args(arguments)
    window = (chosen.window, -1 if chosen.full else 0)
    shape = BackwardShape(((chosen.tokens, chosen.tokens),) * chosen.batch, chosen.heads, chosen.kv_heads, window)
    rows = []
    for order in (shape, replace(shape, deterministic=True)):
        whole, split = deal(order, chosen.head_dim), deal(order, chosen.head_dim)
        whole.over_heads = whole.over_rows = 1
        chosen_by_library = f"{split.over_heads} x {split.over_rows} from tile {split.first_tile}"
        for name, dealt in (("whole tiles", whole), (chosen_by_library, split)):
            found = schedule(order, dealt)
            numbers = f"{found.busy:.0%}", f"{found.useful:.0%}", f"{found.steps:.1f}"
            rows.append(("deterministic" if order.deterministic else "any order", name, *numbers))
    print(aligned(("call", "splits of heads x rows", "busy", "useful", "steps of an SM"), rows))


if __name__ == "__main__":
    main()
