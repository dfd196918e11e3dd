"""Flash-decoding's Triton kernels against the float64 reference, on the emulator where there is no GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import decode_cases
from decode_cases import CASES, HUGE, Case, clone, make_arguments, op_arguments
from fastattn.triton_kernels import tiles
from fastattn.triton_kernels.decode import attention_decode
from kernel_device import DEVICE

pytestmark = pytest.mark.usefixtures("emulated_gpu")


def run_kernel(case: Case, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The launcher; caches among the arguments change in place."""
    return attention_decode(**op_arguments(case, arguments))


def check(case: Case, arguments: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    return decode_cases.check(case, run_kernel, arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 1000])
def test_any_number_of_splits_meets_the_oracle(splits: int) -> None:
    check(Case("splits", lengths=(0, 5, 190, 448), capacity=448, queries=2, sinks=True, splits=splits))


def test_strongly_negative_scores() -> None:
    case = Case("negative")
    arguments = make_arguments(case)
    arguments["query"] = torch.full_like(arguments["query"], -20.0)
    arguments["k_cache"] = arguments["k_cache"].abs()
    check(case, arguments)


def test_a_dominant_key_gives_its_value() -> None:
    case = Case("dominant")
    arguments = make_arguments(case)
    arguments["query"] = torch.ones_like(arguments["query"])
    arguments["k_cache"][:, :, 0] = 60.0
    out, _ = check(case, arguments)
    torch.testing.assert_close(out[:, 0, 0], arguments["v_cache"][:, 0, 0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("int8", [False, True])
def test_pages_out_of_range_are_absent(int8: bool) -> None:
    case = Case("absent-pages", page_size=16, capacity=160, lengths=(100, 150, 33), new=2, int8=int8, splits=2)
    arguments = make_arguments(case)
    table = arguments["block_table"]
    table[0, 1], table[0, 5], table[1, 9] = (
        HUGE,
        -1,
        arguments["k_cache"].shape[0],
    )  # new tokens of sequence 1 are there
    table[2] = -5
    out, lse = check(case, arguments)
    assert bool((out[2] == 0).all()) and bool((lse[2] == -math.inf).all())


def test_a_cache_without_pages() -> None:
    case = Case("no-pages", page_size=16, capacity=32, lengths=(20,))
    arguments = make_arguments(case)
    arguments["k_cache"] = arguments["k_cache"][:0]
    arguments["v_cache"] = arguments["v_cache"][:0]
    out, lse = run_kernel(case, arguments)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("spoil", ["k_cache", "v_cache", "k_scale", "v_scale"])
def test_nan_reaches_only_rows_that_see_it(spoil: str) -> None:
    """The last of four causal queries sees the spoiled key, which lies in the same tile as all others."""
    case = Case("nan", queries=4, int8=spoil.endswith("scale"), lengths=(70, 12))
    arguments = make_arguments(case)
    for sequence, length in enumerate(case.lengths):
        arguments[spoil][sequence, :, length - 1] = math.nan
    out, lse = check(case, arguments)
    assert not bool(out[:, :, :3].isnan().any()) and bool(out[:, :, 3].isnan().all())
    assert bool(lse[:, :, 3].isnan().all()) == spoil.startswith("k_")


def test_nan_in_one_split_reaches_the_result() -> None:
    case = Case("nan-split", splits=3, lengths=(150,))
    arguments = make_arguments(case)
    arguments["v_cache"][0, 0, 70] = math.nan
    out, _ = check(case, arguments)
    assert bool(out[0, :2].isnan().all()) and not bool(out[0, 2:].isnan().any())


def test_new_keys_that_are_not_finite_stay_visible_in_an_int8_cache() -> None:
    case = Case("nan-append", int8=True, new=2, lengths=(3, 20))
    arguments = make_arguments(case)
    arguments["v_new"][0, 0, 1, 5] = math.nan
    out, _ = run_kernel(case, arguments)
    assert bool(out[0, :2].isnan().all()) and not bool(out[0, 2:].isnan().any()) and not bool(out[1].isnan().any())


def test_views_are_read_and_written_in_place() -> None:
    """Caches, new keys and queries that are transposed or sliced views; the output follows the query's layout."""
    case = Case("views", new=2, queries=2, lengths=(20, 100), rotary_dim=32)
    plain = make_arguments(case)
    views = clone(plain)
    for name in ("query", "k_new", "v_new"):  # [B, S, H, D] in memory
        views[name] = plain[name].transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("k_cache", "v_cache"):  # a part of a larger cache, [B, rows, Hkv, D] in memory
        batch, kv_heads, rows, dim = plain[name].shape
        larger = plain[name].new_full((batch, rows + 3, kv_heads, dim + 8), math.nan)
        views[name] = larger.transpose(1, 2)[:, :, :rows, :dim]
        views[name].copy_(plain[name])
    out, lse = run_kernel(case, views)
    expected_out, expected_lse = run_kernel(case, plain)
    assert out.transpose(1, 2).is_contiguous() and expected_out.is_contiguous()
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(views[name], plain[name], rtol=0, atol=0, equal_nan=True)


def test_a_query_that_is_misaligned_is_copied() -> None:
    case = Case("misaligned")
    arguments = make_arguments(case)
    storage = torch.empty(arguments["query"].numel() + 1, dtype=case.dtype, device=DEVICE)
    arguments["query"] = storage[1:].view_as(arguments["query"]).copy_(arguments["query"])
    check(case, arguments)


@pytest.mark.parametrize("empty", ["batch", "queries", "capacity"])
def test_empty(empty: str) -> None:
    case = Case("empty", new=2, capacity=0 if empty == "capacity" else 8, lengths=() if empty == "batch" else (3, 1))
    case = replace(case, queries=0) if empty == "queries" else case
    check(case)  # with no queries too, the new tokens are appended


@pytest.mark.parametrize("window", [(-1, -1), (100, -1)], ids=["full", "window"])
def test_batch_invariant_bits(monkeypatch: pytest.MonkeyPatch, window: tuple[int, int]) -> None:
    """A sequence has the same bits alone, and in a batch that the split plan would otherwise cut differently."""
    monkeypatch.setattr(tiles, "DECODE_INVARIANT_SPLIT_KEYS", 128)
    tiles.decode_plan.cache_clear()
    try:
        case = Case(
            "invariant", lengths=(300, 5, 448, 129), capacity=448, window=window, queries=2, batch_invariant=True
        )
        arguments = make_arguments(case)
        together = run_kernel(case, clone(arguments))
        for sequence in range(len(case.lengths)):
            alone = clone(arguments)
            for name in ("query", "k_cache", "v_cache", "cache_seqlens"):
                alone[name] = arguments[name][sequence : sequence + 1].clone()
            for result, expected in zip(run_kernel(case, alone), together, strict=True):
                assert torch.equal(result[0], expected[sequence])
    finally:
        tiles.decode_plan.cache_clear()


def test_a_capacity_past_32_bits_is_refused() -> None:
    case = Case("huge", page_size=16, capacity=32, lengths=(20,))
    arguments = make_arguments(case)
    arguments["block_table"] = arguments["block_table"][:, :1].expand(1, 2**26)
    with pytest.raises(ValueError, match="below 2\\^30"):
        run_kernel(case, arguments)


TILE = tiles.decode_tile(90, 128, 128, 8, 2, 227 * 1024)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 17, 64, 500])
@pytest.mark.parametrize("key_blocks", [0, 1, 2, 9, 64, 513, 20000])
def test_split_plan_covers_every_block(batch: int, key_blocks: int) -> None:
    for requested in (0, 1, 5, 10**6):
        for invariant in (False, True):
            plan = tiles.decode_plan(batch, 8, 1, key_blocks, 132, TILE, requested, invariant)
            assert 1 <= plan.num_splits <= max(1, key_blocks)
            assert plan.blocks_per_split == 0 or plan.num_splits * plan.blocks_per_split >= key_blocks
            if requested:
                assert plan == tiles.DecodePlan(max(1, min(requested, key_blocks)), 0)
            else:
                assert plan.num_splits <= tiles.DECODE_MAX_SPLITS


def test_split_plan_fills_the_gpu_and_no_more() -> None:
    assert tiles.decode_num_splits(1, 8, 1, 2048, 132) * 8 >= 0.9 * 132  # one sequence of 128k keys
    assert tiles.decode_num_splits(1, 1, 1, 2048, 132) >= 64
    assert tiles.decode_num_splits(264, 8, 1, 64, 132) == 1  # many tiles: no merge
    assert tiles.decode_num_splits(1, 1, 1, 4, 132) == 1  # few blocks: the merge costs more than it saves
    assert tiles.decode_num_splits(1, 0, 1, 64, 132) >= 1


def test_split_plan_has_no_cliff_between_neighbouring_batches() -> None:
    """More sequences never get so many fewer splits that a quarter of the GPU falls idle where there is work for it."""
    for batch in range(1, 34):
        splits = tiles.decode_num_splits(batch, 4, 1, 512, 132)
        ctas = batch * 4 * splits
        waves = -(-ctas // 264)
        assert ctas >= 0.75 * 264 * waves or ctas >= 0.75 * 132, (batch, splits)


def test_batch_invariant_plan_ignores_the_batch() -> None:
    plans = {tiles.decode_plan(b, 8, 1, 300, sms, TILE, 0, True) for b in (1, 5, 64) for sms in (16, 132)}
    assert len(plans) == 1


def test_key_blocks_bound_what_a_window_can_touch() -> None:
    for left in (0, 1, 63, 64, 65, 200):
        for queries in (1, 2, 5, 65):
            bound = tiles.decode_key_blocks(1000, queries, left, 64)
            for total in range(queries, 400):
                first = max(total - queries - left, 0)
                assert -(-total // 64) - first // 64 <= bound
    assert tiles.decode_key_blocks(1000, 1, -1, 64) == 16
    assert tiles.decode_key_blocks(10, 1, 10**6, 64) == 1


@pytest.mark.parametrize("arch, shared_kb", [(80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)])
def test_tiles_fit_and_have_powers_of_two(arch: int, shared_kb: int) -> None:
    for dim in range(8, 257, 8):
        for value_dim in (8, dim, 256):
            for rows in (1, 16, 17, 64, 1000):
                for itemsize in (1, 2):
                    for page_size in (0, 16, 64):
                        tile = tiles.decode_tile(arch, dim, value_dim, rows, itemsize, shared_kb * 1024, page_size)
                        assert tile.block_m in (16, 32) and tile.block_n in (32, 64) and tile.num_stages >= 1
                        assert tile.block_m >= min(rows, 32)
