"""The native split plan of flash-decoding, csrc/decode/split_plan.h, compiled for the host: what each CTA takes."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from emulator.toolkit import setup

pytestmark = pytest.mark.quick

SOURCE = Path(__file__).with_name("decode_plan.cpp")
BLOCK_KEYS = 64
H200_SLOTS = 2 * 132


class Part(NamedTuple):
    """What a CTA takes of a tile."""

    cta: int
    sequence: int
    tile: int
    first_key: int
    end_key: int
    slot: int
    is_whole: bool
    units: int
    index: int
    count: int


class Plan(NamedTuple):
    num_ctas: int
    num_slots: int
    share: int
    parts: list[Part]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("plan") / "plan.so"
    command = [*setup.find_cxx(os.environ), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{SOURCE.parents[2] / 'csrc'}"]
    subprocess.run([*command, str(SOURCE), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.decode_plan.restype = ctypes.c_int64
    return library


def plan_of(
    library: ctypes.CDLL,
    lengths: list[int],
    *,
    capacity: int = 1 << 17,
    new: int = 0,
    queries: int = 1,
    left: int = -1,
    heads: int = 8,
    row_tiles: int = 1,
    splits: int = 0,
    invariant: bool = False,
    slots: int = H200_SLOTS,
) -> Plan:
    facts = (ctypes.c_int64 * 3)()
    most = 4 * (len(lengths) * heads * row_tiles * max(1, min(capacity, 1 << 17) // BLOCK_KEYS + 2))
    rows = torch.zeros(max(most, 1), 10, dtype=torch.int64)
    found = library.decode_plan(
        (ctypes.c_int32 * len(lengths))(*lengths),
        len(lengths),
        (ctypes.c_int32 * 4)(capacity, new, queries, left),
        heads,
        row_tiles,
        ctypes.c_int64(splits),
        int(invariant),
        slots,
        facts,
        ctypes.c_void_p(rows.data_ptr()),
    )
    parts = [Part(*row[:6], bool(row[6]), *row[7:]) for row in rows[:found].tolist()]
    return Plan(*facts, parts)


RAGGED = [[0], [1], [64], [65], [1000], [5, 0, 131072], [100] * 7, [17, 4000, 17, 90000, 0, 3], [8192] * 33]
CHOICES = [{}, {"splits": 1}, {"splits": 5}, {"splits": 10**6}, {"invariant": True}]


@pytest.mark.parametrize("lengths", RAGGED, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_key_is_taken_once(library: ctypes.CDLL, lengths: list[int], choice: dict[str, int]) -> None:
    for left, new, tiles in ((-1, 0, 1), (300, 3, 1), (0, 40, 2)):
        plan = plan_of(library, lengths, left=left, new=new, queries=2, heads=2, row_tiles=tiles, **choice)
        taken: dict[tuple[int, int], list[Part]] = defaultdict(list)
        for part in plan.parts:
            taken[part.sequence, part.tile].append(part)
        assert set(taken) == set(itertools.product(range(len(lengths)), range(2 * tiles)))
        for (sequence, _), parts in taken.items():
            total = min(lengths[sequence] + new, 1 << 17)
            first = max(total - 2 - left, 0) if left >= 0 else 0
            first = min(first, min(lengths[sequence], 1 << 17)) if new else first
            edges = [first, *(key for part in parts for key in (part.first_key, part.end_key)), total]
            assert edges[::2] == edges[1::2]  # each begins where the one before ends
            assert all(part.is_whole == (len(parts) == 1) for part in parts)
            assert all(part.end_key % BLOCK_KEYS == 0 for part in parts[:-1])
            assert [(part.index, part.count) for part in parts] == [(i, len(parts)) for i in range(len(parts))]
        shared = [part.slot for part in plan.parts if not part.is_whole]
        assert len(set(shared)) == len(shared) and all(0 <= slot < plan.num_slots for slot in shared)


def test_shares_differ_by_a_block_at_most(library: ctypes.CDLL) -> None:
    """Ragged lengths fill the GPU as equal ones do: each CTA but the last ones takes as many blocks."""
    for lengths in ([131072], [50, 131072], [1000, 2000, 30000, 70000], [4096] * 32, list(range(1, 9000, 97))):
        plan = plan_of(library, lengths)
        blocks: dict[int, int] = defaultdict(int)
        for part in plan.parts:
            blocks[part.cta] += part.units
        total = sum(blocks.values())
        assert plan.num_ctas == H200_SLOTS and plan.share == max(2, -(-total // H200_SLOTS))
        assert all(count == plan.share for cta, count in blocks.items() if cta < max(blocks))
        assert plan.num_slots <= 2 * H200_SLOTS


def test_shapes_alone_decide_the_launch(library: ctypes.CDLL) -> None:
    """Of a CUDA graph: other lengths need neither another grid nor more memory."""
    for choice in CHOICES:
        plans = [plan_of(library, lengths, capacity=4096, **choice) for lengths in ([0, 0], [4096, 1], [77, 4000])]
        assert len({(plan.num_ctas, plan.num_slots) for plan in plans}) == 1
        assert all(part.cta < plan.num_ctas for plan in plans for part in plan.parts)


def test_little_work_is_not_spread_thin(library: ctypes.CDLL) -> None:
    assert max(part.cta for part in plan_of(library, [1024]).parts) + 1 == 8 * 8  # 128 keys each
    assert all(part.is_whole for part in plan_of(library, [100] * 4).parts)


def test_batch_invariant_cuts_ignore_the_batch_and_the_gpu(library: ctypes.CDLL) -> None:
    def cuts(lengths: list[int], sequence: int, slots: int) -> list[tuple[int, int, int]]:
        parts = plan_of(library, lengths, invariant=True, slots=slots).parts
        return [(part.tile, part.first_key, part.end_key) for part in parts if part.sequence == sequence]

    alone = cuts([5000], 0, 16)
    assert alone == cuts([3, 5000, 70000], 1, 264) and len(alone) == 8 * 5


@pytest.mark.parametrize("splits", (1, 2, 7, 300))
def test_requested_splits_are_met(library: ctypes.CDLL, splits: int) -> None:
    """As far as there are blocks, and blocks divide."""
    for length in (1, 1000, 20000):
        parts = plan_of(library, [length], splits=splits, heads=1).parts
        blocks = -(-length // BLOCK_KEYS)
        assert len(parts) == -(-blocks // -(-blocks // splits)) <= splits


def test_lengths_out_of_range(library: ctypes.CDLL) -> None:
    for length in (-1, -(2**31), 2**31 - 1):
        (part,) = plan_of(library, [length], capacity=64, heads=1, new=3, left=2**30, queries=2**30 - 1).parts
        assert 0 <= part.first_key <= part.end_key <= 64
