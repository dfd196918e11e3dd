"""Tests the splits of flash-decoding (csrc/scheduler/decode_splits.h), compiled for the host: what each CTA takes."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_build.tools import find_cxx

pytestmark = pytest.mark.xdist_group("decode_schedule")

SOURCE = Path(__file__).with_name("decode_schedule.cpp")
BLOCK_KEYS = 64
UNBOUNDED = 2**31 - 1  # ScoreParams::kUnbounded
H200_CTAS = 2 * 132


class Run(NamedTuple):
    """Consecutive splits of a tile that one CTA takes."""

    cta: int
    sequence: int
    tile: int
    first_key: int
    end_key: int
    num_splits: int
    partial: int  # index in the tile of the partial that it contributes to
    num_partials: int
    own_partials: int  # how many of the tile's partials are the CTA's


class Schedule(NamedTuple):
    num_ctas: int
    num_slots: int
    num_counters: int
    run: int
    runs: list[Run]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("schedule") / "schedule.so"
    command = [*find_cxx(os.environ), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{SOURCE.parents[2] / 'csrc'}"]
    subprocess.run([*command, str(SOURCE), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.decode_schedule.restype = ctypes.c_int64
    library.decode_combines.restype = ctypes.c_bool
    return library


class Call(NamedTuple):
    """The arguments of a schedule. ``resident`` is the number of CTAs that run at a time."""

    lengths: list[int]
    capacity: int = 1 << 17
    new: int = 0
    queries: int = 1
    left: int = UNBOUNDED
    heads: int = 8
    row_tiles: int = 1
    splits: int = 0
    invariant: bool = False
    resident: int = H200_CTAS

    def arguments(self) -> list[Any]:
        return [
            (ctypes.c_int32 * len(self.lengths))(*self.lengths),
            len(self.lengths),
            (ctypes.c_int32 * 4)(self.capacity, self.new, self.queries, self.left),
            self.heads,
            self.row_tiles,
            ctypes.c_int64(self.splits),
            int(self.invariant),
            self.resident,
        ]

    @property
    def tiles(self) -> int:
        return len(self.lengths) * self.heads * self.row_tiles


def schedule_of(library: ctypes.CDLL, lengths: list[int], **changes: Any) -> Schedule:
    call = Call(lengths, **changes)
    facts = (ctypes.c_int64 * 4)()
    most = 4 * (call.tiles * max(1, min(call.capacity, 1 << 17) // BLOCK_KEYS + 2))
    rows = torch.empty(max(most, 1), 9, dtype=torch.int64)  # gigabytes, reserved at most: the schedule writes few rows
    found = library.decode_schedule(*call.arguments(), facts, ctypes.c_void_p(rows.data_ptr()))
    return Schedule(*facts, [Run(*row) for row in rows[:found].tolist()])


def combines_of(library: ctypes.CDLL, lengths: list[int], *, seed: int = 0, **changes: Any) -> list[list[int]]:
    """Returns for each sequence and tile a hash of the order in which the tile's partials are combined."""
    call = Call(lengths, **changes)
    results = (ctypes.c_uint64 * max(call.tiles, 1))()
    assert library.decode_combines(*call.arguments(), seed, results)
    per_sequence = call.heads * call.row_tiles
    return [list(results[i * per_sequence : (i + 1) * per_sequence]) for i in range(len(lengths))]


RAGGED = [[0], [1], [64], [65], [1000], [5, 0, 131072], [100] * 7, [17, 4000, 17, 90000, 0, 3], [8192] * 33]
CHOICES = [{}, {"splits": 1}, {"splits": 5}, {"splits": 10**6}, {"invariant": True}]


@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_key_is_taken_once(library: ctypes.CDLL, lengths: list[int], choice: dict[str, int]) -> None:
    for left, new, tiles in ((UNBOUNDED, 0, 1), (300, 3, 1), (0, 40, 2)):
        schedule = schedule_of(library, lengths, left=left, new=new, queries=2, heads=2, row_tiles=tiles, **choice)
        taken: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for run in schedule.runs:
            taken[run.sequence, run.tile].append(run)
        assert set(taken) == set(itertools.product(range(len(lengths)), range(2 * tiles)))
        for (sequence, _), runs in taken.items():
            total = min(lengths[sequence] + new, 1 << 17)
            first = max(total - 2 - left, 0)
            first = min(first, min(lengths[sequence], 1 << 17)) if new else first
            edges = [first, *(key for run in runs for key in (run.first_key, run.end_key)), total]
            assert edges[::2] == edges[1::2]  # each run begins where the one before ends
            assert all(run.end_key % BLOCK_KEYS == 0 for run in runs[:-1])
            assert [(run.partial, run.num_partials) for run in runs] == [(i, len(runs)) for i in range(len(runs))]


@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_partials_are_combined_whichever_cta_comes_last(
    library: ctypes.CDLL, lengths: list[int], choice: dict[str, int]
) -> None:
    """Each CTA finds the right nodes in its slots, and a tile's partials are combined in one order."""
    for resident, tiles in ((1, 1), (7, 2), (64, 1), (264, 1), (264, 2)):
        call = {"heads": 2, "row_tiles": tiles, "resident": resident, **choice}
        orders = [combines_of(library, lengths, seed=seed, **call) for seed in range(5)]
        assert all(order == orders[0] for order in orders)


def test_ctas_differ_by_a_block_at_most(library: ctypes.CDLL) -> None:
    """Ragged lengths fill the GPU as well as equal ones: all CTAs but the last take the same number of blocks."""
    for lengths in ([131072], [50, 131072], [1000, 2000, 30000, 70000], [4096] * 32, list(range(1, 9000, 97))):
        schedule = schedule_of(library, lengths)
        blocks: dict[int, int] = defaultdict(int)
        for run in schedule.runs:
            blocks[run.cta] += run.num_splits
        total = sum(blocks.values())
        assert schedule.num_ctas == H200_CTAS and schedule.run == max(2, -(-total // H200_CTAS))
        assert all(count == schedule.run for cta, count in blocks.items() if cta < max(blocks))
        assert schedule.num_slots <= 2 * H200_CTAS


def test_shapes_alone_decide_the_launch(library: ctypes.CDLL) -> None:
    """A CUDA graph keeps its launch: other lengths need neither another grid nor more memory."""
    for choice in CHOICES:
        schedules = [
            schedule_of(library, lengths, capacity=4096, **choice) for lengths in ([0, 0], [4096, 1], [77, 4000])
        ]
        assert len({schedule[:3] for schedule in schedules}) == 1
        assert all(run.cta < schedule.num_ctas for schedule in schedules for run in schedule.runs)


def test_little_work_is_not_spread_thin(library: ctypes.CDLL) -> None:
    """A CTA takes one block if all partials of a tile are combined at once, else at least two."""
    for capacity in (4096, 1 << 17):
        for length, partials, ctas in (
            (1, 1, 8),
            (128, 1, 8),
            (129, 3, 24),
            (1024, 16, 128),
            (1025, 9, 68),
            (2048, 16, 128),
        ):
            runs = schedule_of(library, [length], capacity=capacity).runs
            assert {run.num_partials for run in runs} == {partials}
            assert max(run.cta for run in runs) + 1 == ctas
        assert all(run.num_partials == 1 for run in schedule_of(library, [100] * 4, capacity=capacity).runs)
    assert schedule_of(library, [1024], capacity=1024).num_ctas == 8 * 16
    assert schedule_of(library, [128], capacity=128).num_ctas == 8


def test_batch_invariant_sequences_are_alone(library: ctypes.CDLL) -> None:
    """Batch, GPU and capacity change neither the splits of a sequence nor the order of combining."""

    def cuts(lengths: list[int], sequence: int, **call: int) -> list[tuple[int, int, int]]:
        runs = schedule_of(library, lengths, invariant=True, **call).runs
        return [(run.tile, run.first_key, run.end_key) for run in runs if run.sequence == sequence]

    for length in (1, 1024, 5000, 20000, 70000, 131072):
        alone = cuts([length], 0, resident=16)
        assert len(alone) == 8 * -(-length // 1024)
        assert alone == cuts([3, length, 70000], 1) == cuts([length], 0, capacity=1 << 20)
        (order,) = combines_of(library, [length], invariant=True, resident=16)
        assert len(set(order)) == 1  # equal for all tiles
        for resident, seed in itertools.product((1, 2, 5, 37, 216, 264, 1000), range(2)):
            call = {"invariant": True, "resident": resident, "seed": seed}
            assert combines_of(library, [length], **call) == [order]
            assert combines_of(library, [3, length, 70000, 4100], **call)[1] == order
            assert combines_of(library, [9000, length], capacity=1 << 20, **call)[1] == order
        assert combines_of(library, [length] * 64, invariant=True) == [order] * 64


def test_batch_invariant_fits_the_machine(library: ctypes.CDLL) -> None:
    """There are as many CTAs as run at a time. Each has two more slots per doubling of the capacity."""
    for batch, capacity, heads in ((64, 1 << 17, 8), (1, 1 << 17, 8), (3000, 4096, 8), (64, 1 << 24, 64)):
        schedule = schedule_of(library, [0] * batch, capacity=capacity, heads=heads, invariant=True)
        levels = (capacity // 1024 - 1).bit_length()
        assert schedule.num_ctas == H200_CTAS
        assert schedule.num_slots == H200_CTAS * 2 * levels and schedule.num_counters == 6 * H200_CTAS
    slots = schedule_of(library, [0] * 64, capacity=1 << 17, invariant=True).num_slots
    # Partials have 16 rows of 128 values. A slot for each 1024 keys would take 537 MB.
    assert slots * 16 * (128 + 2) * 4 < 32 << 20
    few = schedule_of(library, [0], capacity=4096, heads=2, invariant=True)
    assert few.num_ctas == 8  # no more CTAs than splits


@pytest.mark.parametrize("splits", (1, 2, 7, 300))
def test_requested_splits_are_met(library: ctypes.CDLL, splits: int) -> None:
    """There are as many splits as asked for, within what whole blocks allow."""
    for length in (1, 1000, 20000):
        runs = schedule_of(library, [length], splits=splits, heads=1).runs
        blocks = -(-length // BLOCK_KEYS)
        assert len(runs) == -(-blocks // -(-blocks // splits)) <= splits


def test_lengths_out_of_range(library: ctypes.CDLL) -> None:
    for length in (-1, -(2**31), 2**31 - 1):
        (run,) = schedule_of(library, [length], capacity=64, heads=1, new=3, left=2**30, queries=2**30 - 1).runs
        assert 0 <= run.first_key <= run.end_key <= 64


# --- Any batch --------------------------------------------------------------------------------------------------------

MILLION = 1 << 20
# Short, medium and long sequences are equally likely.
ANY_LENGTH = st.one_of(st.integers(0, 64), st.integers(0, 4096), st.integers(0, MILLION))
ANY_LENGTHS = st.one_of(st.lists(ANY_LENGTH, min_size=1, max_size=24), st.lists(ANY_LENGTH, min_size=1, max_size=512))
ANY_GPU = st.sampled_from([1, 2 * 78, 2 * 108, H200_CTAS])
any_batch = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@any_batch
@given(lengths=ANY_LENGTHS, heads=st.sampled_from([1, 2, 8]), resident=ANY_GPU)
def test_any_batch_is_split_evenly(library: ctypes.CDLL, lengths: list[int], heads: int, resident: int) -> None:
    """The busiest CTA has at most 3 % or one block more than the mean. A CTA cuts no tile but its first and last."""
    schedule = schedule_of(library, lengths, capacity=MILLION, heads=heads, resident=resident)
    blocks: dict[int, int] = defaultdict(int)
    for run in schedule.runs:
        blocks[run.cta] += run.num_splits
    mean = sum(blocks.values()) / schedule.num_ctas
    assert max(blocks.values()) <= max(1.03 * mean, mean + 1, 2)
    assert len(schedule.runs) <= len(lengths) * heads + len(blocks) - 1
    assert sum(run.end_key - run.first_key for run in schedule.runs) == heads * sum(lengths)


@any_batch
@given(lengths=ANY_LENGTHS, data=st.data(), resident=ANY_GPU)
def test_any_batch_leaves_a_sequence_its_bits(
    library: ctypes.CDLL, lengths: list[int], data: st.DataObject, resident: int
) -> None:
    """With batch_invariant, a sequence's splits and the order in which they are combined are as if it were alone."""
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    call = {"capacity": MILLION, "heads": 1, "invariant": True, "resident": resident}
    of_all = [each for each in schedule_of(library, lengths, **call).runs if each.sequence == chosen]
    alone = schedule_of(library, [lengths[chosen]], **call).runs
    assert [(each.first_key, each.end_key) for each in of_all] == [(each.first_key, each.end_key) for each in alone]
    assert combines_of(library, lengths, **call)[chosen] == combines_of(library, [lengths[chosen]], **call)[0]
