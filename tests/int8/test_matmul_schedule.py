"""Tests the schedule of the int8 matmul (csrc/scheduler/stream_k.h), compiled for the host: which steps of which tiles
a CTA takes, and how long a model of a GPU takes for them, for all numbers of tokens."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from instances import rows_of
from native_build.tools import find_cxx

pytestmark = pytest.mark.xdist_group("matmul_schedule")

SOURCE = Path(__file__).with_name("matmul_schedule.cpp")
CSRC = SOURCE.parents[2] / "csrc"
CTAS_PER_SM = 2
INT_MAX = 2**31 - 1


class Gpu(NamedTuple):
    """A GPU. ``multiply_adds`` of mma.sync and bytes are per SM and clock: csrc/host/sm_rates.h."""

    arch: int
    num_sms: int
    multiply_adds: float
    dram_bytes: float
    l2_bytes: float

    @property
    def resident_ctas(self) -> int:
        return CTAS_PER_SM * self.num_sms


CLUSTER_BLOCK_MS = sorted({tokens for tokens, _, _ in rows_of("int8_matmul/instances/gemm_sm90.cu")})
A100, H200 = Gpu(80, 108, 1024, 13, 47), Gpu(90, 132, 1365, 19.9, 50)
RTX4090 = Gpu(89, 128, 256, 3.1, 24)


class Tile(NamedTuple):
    tokens: int
    outputs: int
    depth: int


class Sizes(NamedTuple):
    tokens: int
    outputs: int
    depth: int


class Schedule(NamedTuple):
    m_tiles: int
    n_tiles: int
    steps: int
    split_tiles: int
    num_splits: int
    num_ctas: int
    num_slots: int


class WorkTile(NamedTuple):
    cta: int
    tile: int
    m_tile: int
    n_tile: int
    begin_step: int
    end_step: int
    num_partials: int
    partial: int
    slot: int


class HopperChoice(NamedTuple):
    tile: Tile
    uses_wgmma: bool
    clocks: float  # predicted


class Library:
    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))
        self.loaded.matmul_work_tiles.restype = ctypes.c_int64
        self.loaded.simulated_clocks.restype = ctypes.c_double
        self.loaded.cluster_work_tiles.restype = ctypes.c_int64
        self.loaded.fastest_on_hopper.restype = ctypes.c_double

    def fastest_tile(self, sizes: Sizes, gpu: Gpu, is_forward: bool = True) -> Tile:
        found = (ctypes.c_int32 * 3)()
        self.loaded.fastest_tile_of(_ints(sizes), int(is_forward), gpu.arch, gpu.num_sms, found)
        return Tile(*found)

    def schedule(self, sizes: Sizes, tile: Tile, resident_ctas: int, arch: int = 80) -> Schedule:
        """Returns the schedule on a GPU with the rates of ``arch``; `work_tiles` has those of an A100."""
        facts = (ctypes.c_int64 * 7)()
        self.loaded.matmul_schedule_facts(_ints(sizes), _ints(tile), _ints((arch, resident_ctas)), facts)
        return Schedule(*facts)

    def work_tiles(self, sizes: Sizes, tile: Tile, resident_ctas: int, first_cta: int, end_cta: int) -> list[WorkTile]:
        most = (end_cta - first_cta) * (4 + 2 * (resident_ctas + 1))
        rows = np.zeros((min(most, 200_000), 9), dtype=np.int64)
        found = self.loaded.matmul_work_tiles(
            _ints(sizes),
            _ints(tile),
            _ints((A100.arch, resident_ctas)),
            first_cta,
            end_cta,
            ctypes.c_void_p(rows.ctypes.data),
        )
        return [WorkTile(*row) for row in rows[:found].tolist()]

    def clocks(self, sizes: Sizes, tile: Tile, gpu: Gpu, clocks: tuple[float, ...]) -> float:
        c_gpu, c_clocks = _ints((gpu.arch, gpu.resident_ctas)), (ctypes.c_double * 6)(*clocks)
        found: float = self.loaded.simulated_clocks(_ints(sizes), _ints(tile), c_gpu, c_clocks)
        return found

    def cluster_work_tiles(
        self, sizes: Sizes, tile_tokens: int, resident_clusters: int
    ) -> tuple[Schedule, list[WorkTile]]:
        """Returns Hopper's schedule and work tiles, in which "CTAs" are clusters."""
        rows, facts = np.zeros((200_000, 9), dtype=np.int64), (ctypes.c_int64 * 7)()
        pointer = ctypes.c_void_p(rows.ctypes.data)
        found = self.loaded.cluster_work_tiles(_ints(sizes), tile_tokens, resident_clusters, facts, pointer)
        return Schedule(*facts), [WorkTile(*row) for row in rows[:found].tolist()]

    def fastest_on_hopper(self, sizes: Sizes, num_sms: int) -> HopperChoice:
        """Returns the fastest tile on Hopper among those of both architectures."""
        tile, uses_wgmma = (ctypes.c_int32 * 3)(), ctypes.c_int32()
        clocks = self.loaded.fastest_on_hopper(_ints(sizes), num_sms, tile, ctypes.byref(uses_wgmma))
        return HopperChoice(Tile(*tile), bool(uses_wgmma.value), clocks)


def _ints(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    target = tmp_path_factory.mktemp("schedule") / "schedule.so"
    block_ms = sorted({block_m for block_m, _ in rows_of("int8_matmul/instances/gemm_sm80.cu")})
    command = [
        *find_cxx(os.environ),
        f"-DBLOCK_MS={','.join(map(str, block_ms))}",
        f"-DCLUSTER_BLOCK_MS={','.join(map(str, CLUSTER_BLOCK_MS))}",
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{CSRC}",
    ]
    subprocess.run([*command, str(SOURCE), "-o", str(target)], check=True)
    return Library(target)


# --- What each CTA takes ----------------------------------------------------------------------------------------------

SMALL = Tile(16, 128, 128)
LARGE = Tile(128, 128, 64)
# The numbers of tiles are one, fewer than resident CTAs, equal, a few more, just less than two waves, and many.
COUNTS = [1, 2, 7, 8, 9, 15, 16, 17, 25, 100]
STEPS = [1, 2, 5, 8, 31, 64, 1000]


def check_that_every_step_is_taken_once(schedule: Schedule, work_tiles: list[WorkTile]) -> None:
    taken: dict[int, list[WorkTile]] = defaultdict(list)
    for work_tile in work_tiles:
        taken[work_tile.tile].append(work_tile)
    assert sorted(taken) == list(range(schedule.m_tiles * schedule.n_tiles))
    positions = {(work_tile.m_tile, work_tile.n_tile) for work_tile in work_tiles}
    assert positions == set(itertools.product(range(schedule.m_tiles), range(schedule.n_tiles)))
    for partials in taken.values():
        edges = [step for work_tile in partials for step in (work_tile.begin_step, work_tile.end_step)]
        edges = [0, *edges, schedule.steps]
        assert edges[::2] == edges[1::2]  # each begins where the one before ends, in the order of the CTAs
        assert [(work_tile.partial, work_tile.num_partials) for work_tile in partials] == [
            (i, len(partials)) for i in range(len(partials))
        ]
    slots = [work_tile.slot for work_tile in work_tiles if work_tile.num_partials > 1]
    assert len(set(slots)) == len(slots) and all(0 <= slot < schedule.num_slots for slot in slots)


@pytest.mark.parametrize("resident_ctas", [1, 2, 8, 264])
@pytest.mark.parametrize("tile", [SMALL, LARGE], ids=str)
def test_every_step_of_every_tile_is_taken_once(library: Library, tile: Tile, resident_ctas: int) -> None:
    for m_tiles, n_tiles, steps in itertools.product((1, 3, 12), COUNTS, STEPS):
        sizes = Sizes(m_tiles * tile.tokens - 3, n_tiles * tile.outputs - 8, steps * tile.depth - 16)
        schedule = library.schedule(sizes, tile, resident_ctas)
        assert (schedule.m_tiles, schedule.n_tiles, schedule.steps) == (m_tiles, n_tiles, steps)
        work_tiles = library.work_tiles(sizes, tile, resident_ctas, 0, schedule.num_ctas)
        check_that_every_step_is_taken_once(schedule, work_tiles)


@pytest.mark.parametrize("resident_ctas", [2, 8, 216, 264])
def test_ranges_are_equal_and_whole_tiles_fill_the_gpu(library: Library, resident_ctas: int) -> None:
    for tile, tiles, steps in itertools.product((SMALL, LARGE), (*COUNTS, 300, 1000), STEPS):
        sizes = Sizes(1, tiles * tile.outputs, steps * tile.depth)
        schedule = library.schedule(sizes, tile, resident_ctas)
        lengths: dict[int, int] = defaultdict(int)
        for work_tile in library.work_tiles(sizes, tile, resident_ctas, 0, schedule.num_ctas):
            lengths[work_tile.cta] += work_tile.end_step - work_tile.begin_step
        splits = [lengths[cta] for cta in range(schedule.num_splits)]
        assert all(lengths[cta] == steps for cta in range(schedule.num_splits, schedule.num_ctas))
        if splits:
            assert max(splits) - min(splits) <= 1 and min(splits) * tile.depth >= 256
            assert schedule.num_splits <= resident_ctas and schedule.num_slots <= 2 * resident_ctas
            assert (tiles - schedule.split_tiles) % resident_ctas == 0
            assert max(splits) <= 2 * steps  # the last wave's remainder, and one more tile


def test_large_matmuls_share_little(library: Library) -> None:
    """At most two waves of tiles are split, into two partials each where splits are longer than tiles."""
    for tokens in range(1024, 8193, 128):
        sizes = Sizes(tokens, 8192, 8192)
        schedule = library.schedule(sizes, LARGE, 264)
        assert schedule.split_tiles < 2 * 264
        if schedule.split_tiles > 264:
            work_tiles = library.work_tiles(sizes, LARGE, 264, 0, schedule.num_splits)
            assert max(work_tile.num_partials for work_tile in work_tiles) <= 2
            assert max(sum(work_tile.cta == cta for work_tile in work_tiles) for cta in (0, 100, 263)) <= 3


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(INT_MAX, 1024, 1024),
        Sizes(1, INT_MAX, 64),
        Sizes(1, 128, INT_MAX),
        Sizes(129, 1280, INT_MAX),
        Sizes(2**20, 2**22, 2**20),
        Sizes(5, 8, 0),
        Sizes(1, 1, 1),
    ],
    ids=str,
)
def test_hostile_sizes(library: Library, sizes: Sizes) -> None:
    for is_forward, num_sms in itertools.product((True, False), (1, A100.num_sms, 1000)):
        gpu = A100._replace(num_sms=num_sms)
        tile = library.fastest_tile(sizes, gpu, is_forward)
        resident_ctas = gpu.resident_ctas
        schedule = library.schedule(sizes, tile, resident_ctas)
        m_tiles, n_tiles = -(-sizes.tokens // tile.tokens), -(-sizes.outputs // tile.outputs)
        assert schedule.num_ctas == m_tiles * n_tiles - schedule.split_tiles + schedule.num_splits
        for first, end in ((0, min(schedule.num_ctas, 2000)), (schedule.num_ctas - 1, schedule.num_ctas)):
            if end > INT_MAX:
                continue  # no grid is so large: the launch is refused
            for work_tile in library.work_tiles(sizes, tile, resident_ctas, first, end):
                assert 0 <= work_tile.m_tile < m_tiles and 0 <= work_tile.n_tile < n_tiles
                assert 0 <= work_tile.begin_step <= work_tile.end_step <= schedule.steps
                assert work_tile.num_partials <= resident_ctas and work_tile.slot < schedule.num_slots


def test_tiles_of_a_wave_share_weights(library: Library) -> None:
    """All tokens pass over eight tiles of weights before the next eight are loaded."""
    sizes = Sizes(10 * 128, 20 * 128, 640)
    schedule = library.schedule(sizes, LARGE, 1)
    work_tiles = library.work_tiles(sizes, LARGE, 1, 0, schedule.num_ctas)
    assert [work_tile.n_tile // 8 for work_tile in work_tiles] == [0] * 80 + [1] * 80 + [2] * 40


# --- What each cluster takes, on Hopper -------------------------------------------------------------------------------


@pytest.mark.parametrize("resident_clusters", [1, 3, 8, 66])
@pytest.mark.parametrize("tokens", [64, 256])
def test_clusters_take_every_step_of_every_tile_once(library: Library, tokens: int, resident_clusters: int) -> None:
    """This holds for any number of clusters. Partials come first, as other clusters wait for them."""
    tile = Tile(tokens, 256, 64)
    for m_tiles, n_tiles, steps in itertools.product((1, 3, 12), COUNTS, STEPS):
        sizes = Sizes(m_tiles * tile.tokens - 3, n_tiles * tile.outputs - 8, steps * tile.depth - 16)
        schedule, work_tiles = library.cluster_work_tiles(sizes, tokens, resident_clusters)
        assert (schedule.m_tiles, schedule.n_tiles, schedule.steps) == (m_tiles, n_tiles, steps)
        assert schedule.num_ctas <= resident_clusters
        assert {work_tile.cta for work_tile in work_tiles} == set(range(schedule.num_ctas))  # every cluster has work
        check_that_every_step_is_taken_once(schedule, work_tiles)
        by_cluster: dict[int, list[WorkTile]] = defaultdict(list)
        for work_tile in work_tiles:
            by_cluster[work_tile.cta].append(work_tile)
        for own in by_cluster.values():
            tiles = [work_tile.tile for work_tile in own]
            assert tiles == sorted(tiles)  # split tiles come first


# --- A model of the time ----------------------------------------------------------------------------------------------

# N, K of linear layers.
LAYERS = [(4096, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (1280, 8192)]
TOKENS = range(1, 8193)
# This prediction tests the schedule, not speed. An A100 takes 512 clocks of HMMA for 128 tokens and 32 columns.
# Dequantising takes a clock for 64 weights; a work tile takes 3000 clocks on top of its steps; partials of a sum take
# three trips to L2, and each its bytes. choose_matmul_tile.h uses the same figures in a formula; here the schedule is
# simulated.
DEQUANTISED, WORK_TILE, SHARED, TRIP, BYTES_OF_A_TOKEN = 64, 3000, 600, 300, 12


def clocks_of_parts(tile: Tile, gpu: Gpu, tokens: int) -> tuple[float, float, float]:
    """Returns a step's clocks for a CTA alone on its SM, for one of two CTAs on an SM, and for its bytes at all of the
    GPU's bandwidth."""
    weights = tile.outputs * tile.depth
    computed = weights * tile.tokens / gpu.multiply_adds + weights / DEQUANTISED
    loaded = weights + 2 * min(tokens, tile.tokens) * tile.depth
    by_sm = loaded / max(32, gpu.l2_bytes)
    shared = max(weights / gpu.dram_bytes, loaded / gpu.l2_bytes)
    return max(1.5 * computed, by_sm), max(2 * computed, by_sm), shared / gpu.num_sms


def clocks_of_step(tile: Tile, gpu: Gpu, tokens: int, ctas: int) -> float:
    """Returns the clocks of a step while ``ctas`` CTAs run."""
    alone, together, from_memory = clocks_of_parts(tile, gpu, tokens)
    return max(together if ctas > gpu.num_sms else alone, from_memory * ctas)


def predicted_clocks(library: Library, sizes: Sizes, gpu: Gpu, is_forward: bool) -> float:
    tile = library.fastest_tile(sizes, gpu, is_forward)
    partial = BYTES_OF_A_TOKEN * min(sizes.tokens, tile.tokens)
    return library.clocks(
        sizes, tile, gpu, (*clocks_of_parts(tile, gpu, sizes.tokens), WORK_TILE, SHARED + TRIP, partial)
    )


@pytest.mark.parametrize("is_forward", [True, False], ids=["forward", "gradient"])
@pytest.mark.parametrize("gpu", [A100, RTX4090], ids=["A100", "RTX4090"])
@pytest.mark.parametrize("n, k", LAYERS)
def test_no_cliff(library: Library, n: int, k: int, gpu: Gpu, is_forward: bool) -> None:
    """More tokens take no less time, but for 3.5 % between schedules that lose differently.

    Throughput falls where tiles need 16 more tokens, or a new row of tiles dequantises its weights again: most from 128
    to 129 tokens, or with the short sums of a small layer; by a few percent among many tokens. On an RTX 4090 tensor
    cores bind at such few tokens that a tile of 64 takes a third more time than one of 48.
    """
    outputs, depth = (n, k) if is_forward else (k, n)
    few, some, many = 0.21 if gpu == A100 else 0.25, 0.10, 0.07
    # Only the number of tiles counts, and all tiles have a multiple of 16 tokens.
    of_tiles = {m: predicted_clocks(library, Sizes(m, outputs, depth), gpu, is_forward) for m in TOKENS[15::16]}
    clocks = [of_tiles[-(-m // 16) * 16] for m in TOKENS]
    for m, (before, after) in zip(TOKENS, itertools.pairwise(clocks), strict=False):
        assert after >= 0.965 * before, f"{m + 1} tokens take {after:.0f} clocks, {m} take {before:.0f}"
        allowed = few if m < 1024 else some if m < 2048 else many
        assert (m + 1) / after >= (1 - allowed) * m / before, f"throughput falls from {m} to {m + 1} tokens"


@pytest.mark.parametrize("gpu", [A100, RTX4090], ids=["A100", "RTX4090"])
@pytest.mark.parametrize("n, k", LAYERS)
def test_large_matmuls_keep_the_multiprocessors_busy(library: Library, n: int, k: int, gpu: Gpu) -> None:
    """From 1024 tokens on, the time is within 5 % of what all steps would take if spread evenly, plus each wave's
    overhead."""
    for m in range(1024, 8193, 16):
        sizes = Sizes(m, n, k)
        tile = library.fastest_tile(sizes, gpu)
        tiles = -(-m // tile.tokens) * -(-n // tile.outputs)
        steps = -(-k // tile.depth) * tiles / gpu.resident_ctas
        step = clocks_of_step(tile, gpu, m, gpu.resident_ctas)
        clocks = predicted_clocks(library, sizes, gpu, is_forward=True)
        assert clocks <= 1.05 * steps * step + 5 * WORK_TILE + tiles / gpu.resident_ctas * WORK_TILE


def test_few_tokens_take_the_smallest_tile(library: Library) -> None:
    for n, k in LAYERS:
        for m in range(1, 17):
            assert library.fastest_tile(Sizes(m, n, k), H200).tokens == 16
        assert library.fastest_tile(Sizes(8192, n, k), H200).tokens == 128


def test_the_splits_of_few_tokens_are_the_best_number(library: Library) -> None:
    """Compares all numbers of equal splits, whose partials are combined 16 at a time."""
    for gpu, (outputs, depth) in itertools.product(
        (A100, H200), ((1024, 8192), (512, 8192), (1024, 4096), (2048, 8192))
    ):
        schedule = library.schedule(Sizes(1, outputs, depth), SMALL, gpu.resident_ctas, gpu.arch)
        tiles = outputs // SMALL.outputs

        def clocks(partials: int, gpu: Gpu = gpu, tiles: int = tiles, steps: int = schedule.steps) -> float:
            step = clocks_of_step(SMALL, gpu, 1, tiles * partials)
            collecting = SHARED + -(-partials // 16) * TRIP + BYTES_OF_A_TOKEN * (partials - 1)
            return step * steps / partials + WORK_TILE + (partials > 1) * collecting

        longest = schedule.steps // 2  # partials of 256 of K hide all trips to memory but the first
        best = min(range(1, min(longest, gpu.resident_ctas // tiles) + 1), key=clocks)
        assert (schedule.split_tiles, schedule.num_splits) == (tiles, best * tiles)
    h200 = library.schedule(Sizes(1, 1024, 8192), SMALL, H200.resident_ctas, H200.arch)
    assert 8 <= h200.num_splits // h200.split_tiles <= 16  # more would load no faster, and take another trip


def test_larger_tiles_than_hold_all_tokens_need_no_look(library: Library) -> None:
    """The smallest tile that holds all tokens is predicted to be the fastest, within 5 %."""
    block_ms = sorted({block_m for block_m, _ in rows_of("int8_matmul/instances/gemm_sm80.cu")})
    found = (ctypes.c_double * len(block_ms))()
    layers = itertools.product((64, 128, 256, 1024, 4096), (256, 512, 1024, 4096, 8192))
    for gpu, (n, k), m in itertools.product((A100, H200), layers, (1, 8, 16, 17, 48, 64, 100)):
        library.loaded.clocks_of_tiles(_ints((m, n, k)), gpu.arch, gpu.num_sms, found)
        clocks = dict(zip(block_ms, found, strict=True))
        first = min(tokens for tokens in block_ms if tokens >= m)
        best = min(time for tokens, time in clocks.items() if tokens >= m)
        assert clocks[first] <= 1.05 * best, (gpu, m, n, k, clocks)


def test_the_gpu_decides_where_a_larger_tile_pays(library: Library) -> None:
    """An H200's mma.sync is faster than an A100's, but its dequantising is not: more tokens should share a weight."""
    sizes = [Sizes(m, 4096, 4096) for m in range(16, 2049, 16)]
    gpus = A100._replace(num_sms=132), H200
    a100, h200 = ([library.fastest_tile(each, gpu).tokens for each in sizes] for gpu in gpus)
    assert a100 != h200


def test_dequantised_blocks_fit_into_the_workspace(library: Library) -> None:
    """Rows are padded to 16 elements: rows of K where rows are dequantised, rows of a block where columns are."""
    most, seed = 2**25, 3
    generator = np.random.default_rng(seed)
    random = [tuple(int(2**power) for power in generator.uniform(0, 29, 2)) for _ in range(500)]
    for count, elements in [(2**25, 1), (1, 2**25), (1, 2**25 + 1), (2**25 - 1, 1), (2**29, 2**29), (8192, 0), *random]:
        block = library.loaded.dequantised_block_of(count, elements)
        assert block == count or (block < count and block % 256 == 0)
        assert block * _padded(elements) <= most and _padded(block) * elements <= most
        if block < count:
            assert (block + 256) * _padded(elements) > most - _padded(256) * elements  # not smaller than needed


def _padded(elements: int) -> int:
    return -(-elements // 16) * 16


# --- Hopper, with tiles of both architectures -------------------------------------------------------------------------


def test_few_tokens_stay_with_the_kernels_for_sm_80(library: Library) -> None:
    """Few tokens are bound by memory. Many run on wgmma, and the most on its largest tiles."""
    for n, k in LAYERS:
        for m in (1, 8, 16):
            few = library.fastest_on_hopper(Sizes(m, n, k), H200.num_sms)
            assert not few.uses_wgmma and few.tile.tokens == 16
        for m in range(512, 8193, 512):
            assert library.fastest_on_hopper(Sizes(m, n, k), H200.num_sms).uses_wgmma
        assert library.fastest_on_hopper(Sizes(8192, n, k), H200.num_sms).tile.tokens >= 192


@pytest.mark.parametrize("n, k", LAYERS)
def test_no_cliff_on_hopper(library: Library, n: int, k: int) -> None:
    """In the library's own prediction, more tokens never take less time.

    Throughput falls where a token more takes a larger tile (65 tokens one of 96 rows), and where a new row of tiles
    makes clusters split tiles: most where tiles have just filled the GPU once (1024 tokens of 4096 outputs are 64 tiles
    for 66 clusters); by a tenth at most among many tokens.
    """
    clocks = [library.fastest_on_hopper(Sizes(m, n, k), H200.num_sms).clocks for m in TOKENS]
    for m, (before, after) in zip(TOKENS, itertools.pairwise(clocks), strict=False):
        assert after >= before, f"{m + 1} tokens take {after:.0f} clocks, {m} take {before:.0f}"
        allowed = 0.22 if m <= 1024 else 0.12 if m < 2048 else 0.1
        assert (m + 1) / after >= (1 - allowed) * m / before, f"throughput falls from {m} to {m + 1} tokens"


@pytest.mark.parametrize("n, k", LAYERS)
def test_clusters_are_kept_busy(library: Library, n: int, k: int) -> None:
    """From 1024 tokens on, no cluster has more than 5 % and four steps more than the mean."""
    for m in range(1024, 8193, 256):
        sizes = Sizes(m, n, k)
        best = library.fastest_on_hopper(sizes, H200.num_sms)
        assert best.uses_wgmma
        schedule, work_tiles = library.cluster_work_tiles(sizes, best.tile.tokens, H200.num_sms // 2)
        steps: dict[int, int] = defaultdict(int)
        for work_tile in work_tiles:
            steps[work_tile.cta] += work_tile.end_step - work_tile.begin_step
        mean = sum(steps.values()) / (H200.num_sms // 2)
        assert max(steps.values()) <= 1.05 * mean + 4, (m, best.tile, schedule)
