"""Tests flash-decoding's Triton kernels against the reference in float64; without a GPU, on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import decode_cases
from decode_cases import CASES, SCENARIOS, Case, make_arguments
from fastattn.triton_kernels import tiles
from fastattn.triton_kernels.decode import split_kernel
from fastattn.triton_kernels.decode_append import append_kernel
from fastattn.triton_kernels.decode_combine import combine_kernel
from triton_compilations import num_compiled

pytestmark = pytest.mark.usefixtures("emulated_gpu")


run_kernel = decode_cases.operator_of(torch.ops.fastattn_triton)


def check(case: Case, arguments: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    return decode_cases.check(case, run_kernel, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(name: str) -> None:
    SCENARIOS[name](run_kernel)


@pytest.mark.slow
@pytest.mark.parametrize("window", [(-1, -1), (100, -1)], ids=["full", "window"])
def test_batch_invariant_bits(monkeypatch: pytest.MonkeyPatch, window: tuple[int, int]) -> None:
    monkeypatch.setattr(tiles, "DECODE_INVARIANT_SPLIT_KEYS", 128)
    tiles.decode_splits.cache_clear()
    try:
        case = Case(
            "invariant", lengths=(300, 5, 448, 129), capacity=448, window=window, queries=2, batch_invariant=True
        )
        decode_cases.same_bits_alone(case, run_kernel)
    finally:
        tiles.decode_splits.cache_clear()


def test_a_server_compiles_once() -> None:
    """Pages, tables, capacities and lengths change from step to step, and must not compile another kernel."""
    kernels = (split_kernel, append_kernel, combine_kernel)
    counts = []
    for num_pages, batch in ((9, 1), (16, 2), (17, 3), (33, 2)):
        lengths = tuple(9 + 31 * index for index in range(batch))
        check(
            Case(
                "server", lengths, capacity=16 * num_pages, page_size=16, new=1, splits=2, rotary_dim=16, dims=(64, 64)
            )
        )
        counts.append([num_compiled(kernel) for kernel in kernels])
    assert counts[-1] == counts[0] and min(counts[0]) >= 1


def test_a_capacity_past_32_bits_is_refused() -> None:
    case = Case("huge", page_size=16, capacity=32, lengths=(20,))
    arguments = make_arguments(case)
    arguments["block_table"] = arguments["block_table"][:, :1].expand(1, 2**26)
    with pytest.raises(ValueError, match="below 2\\^30"):
        run_kernel(case, arguments)


TILE = tiles.decode_tile(128, 128, 8, 2, 227 * 1024)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 17, 64, 500])
@pytest.mark.parametrize("key_blocks", [0, 1, 2, 9, 64, 513, 20000])
def test_splits_cover_every_block(batch: int, key_blocks: int) -> None:
    for requested in (0, 1, 5, 10**6):
        for invariant in (False, True):
            splits = tiles.decode_splits(batch, 8, 1, key_blocks, 132, TILE, requested, invariant)
            assert 1 <= splits.num_splits <= max(1, key_blocks)
            assert splits.blocks_per_split == 0 or splits.num_splits * splits.blocks_per_split >= key_blocks
            if requested:
                assert splits == tiles.DecodeSplits(max(1, min(requested, key_blocks)), 0)
            else:
                assert splits.num_splits <= tiles.DECODE_MAX_SPLITS


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert tiles.decode_num_splits(1, 8, 1, 2048, 132) * 8 >= 0.9 * 132  # one sequence of 128k keys
    assert tiles.decode_num_splits(1, 1, 1, 2048, 132) >= 64
    assert tiles.decode_num_splits(264, 8, 1, 64, 132) == 1  # many tiles: keys are not split
    assert tiles.decode_num_splits(1, 1, 1, 4, 132) == 1  # few blocks: combining costs more than splitting saves
    assert tiles.decode_num_splits(1, 0, 1, 64, 132) >= 1


def test_splits_have_no_cliff_between_neighbouring_batches() -> None:
    """A larger batch never has so few splits that a quarter of the GPU is idle while there is work."""
    for batch in range(1, 34):
        splits = tiles.decode_num_splits(batch, 4, 1, 512, 132)
        ctas = batch * 4 * splits
        waves = -(-ctas // 264)
        assert ctas >= 0.75 * 264 * waves or ctas >= 0.75 * 132, (batch, splits)


def test_batch_invariant_splits_ignore_the_batch() -> None:
    found = {tiles.decode_splits(b, 8, 1, 300, sms, TILE, 0, True) for b in (1, 5, 64) for sms in (16, 132)}
    assert len(found) == 1


def test_key_blocks_bound_what_a_window_can_touch() -> None:
    for left in (0, 1, 63, 64, 65, 200):
        for queries in (1, 2, 5, 65):
            bound = tiles.decode_key_blocks(1000, queries, left, 64)
            for total in range(queries, 400):
                first = max(total - queries - left, 0)
                assert -(-total // 64) - first // 64 <= bound
    assert tiles.decode_key_blocks(1000, 1, -1, 64) == 16
    assert tiles.decode_key_blocks(10, 1, 10**6, 64) == 1


@pytest.mark.parametrize("shared_kb", [99, 163, 227])
def test_tiles_fit_and_have_powers_of_two(shared_kb: int) -> None:
    for dim in range(8, 257, 8):
        for value_dim in (8, dim, 256):
            for rows in (1, 16, 17, 64, 1000):
                for itemsize in (1, 2):
                    for page_size in (0, 16, 64):
                        tile = tiles.decode_tile(dim, value_dim, rows, itemsize, shared_kb * 1024, page_size)
                        assert tile.block_m in (16, 32) and tile.block_n in (32, 64) and tile.num_stages >= 1
                        assert tile.block_m >= min(rows, 32)
