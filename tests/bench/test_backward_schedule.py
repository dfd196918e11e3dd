"""Tests that Hopper's backward pass keeps the SMs of an H100 busy, by simulating which CTA claims which work tile.

The splits are the library's own. The simulation counts steps, and assumes the cost of a split on top of its steps.
"""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.machine_code import backward_schedule  # isort: skip  (before whatever imports fastattn)

from benchmarks.machine_code.backward_schedule import NUM_SMS, BackwardShape, Schedule, deal
from fastattn import native

pytestmark = pytest.mark.skipif(
    "90a" not in native.BUILD["archs"], reason="the native library was built without kernels for sm_90a"
)

FULL, CAUSAL, WINDOW = (-1, -1), (-1, 0), (1024, 0)
HEAD_DIMS = (64, 128)


def scheduled(shape: BackwardShape, head_dim: int) -> Schedule:
    return backward_schedule.schedule(shape, deal(shape, head_dim))


def dense(tokens: int, batch: int, heads: int, kv_heads: int, window: tuple[int, int], **how: bool) -> BackwardShape:
    return BackwardShape(((tokens, tokens),) * batch, heads, kv_heads, window, **how)


def is_cut(found: native.BackwardSchedule) -> bool:
    return found.over_heads * found.over_rows > 1


# --- Splits where SMs would be idle -----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("tokens", "batch", "heads", "kv_heads"),
    [(8192, 1, 32, 1), (8192, 1, 8, 1), (2048, 1, 32, 8), (4096, 1, 32, 8), (2048, 2, 28, 4), (8192, 1, 4, 4)],
    ids=str,
)
def test_few_key_heads(tokens: int, batch: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """With whole tiles, one KV head of 8192 tokens would keep a fourth of the SMs busy, and 8 heads of 2048 a half."""
    for window in (FULL, CAUSAL):
        shape = dense(tokens, batch, heads, kv_heads, window)
        assert scheduled(shape, head_dim).busy >= 0.9


def test_whole_tiles_would_not_do() -> None:
    shape = dense(8192, 1, 32, 1, CAUSAL)
    found = deal(shape, 128)
    assert is_cut(found)
    found.over_heads = found.over_rows = 1
    assert backward_schedule.schedule(shape, found).busy < 0.3


SPLITS = [
    (tokens, max(total // tokens, 1), heads, kv_heads)
    for total in (4096, 16384)
    for tokens in (512, 2048, 8192, 16384)
    for heads, kv_heads in ((1, 1), (8, 1), (32, 2), (32, 8), (16, 16), (28, 4))
]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_any_split_into_heads_and_sequences(window: tuple[int, int], head_dim: int) -> None:
    """An SM takes whole steps, so a few steps do not fill all SMs evenly: the bound rises with their number. Fewer than
    four steps are not split."""
    for split in SPLITS:
        found = scheduled(dense(*split, window), head_dim)
        least = 0.9 if found.steps >= 64 else 0.8 if found.steps >= 16 else 0.6 if found.steps >= 4 else 0.0
        assert found.busy >= least, (split, found)


@pytest.mark.parametrize("heads", [(8, 1), (32, 8), (16, 16)], ids=str)
def test_packed_sequences(heads: tuple[int, int]) -> None:
    """The host does not know the lengths."""
    generator = random.Random(sum(heads))
    for total, most in itertools.product((8192, 32768), (2048, 8192)):
        lengths: list[int] = []
        while sum(lengths) < total:
            lengths.append(min(generator.randint(1, most), total - sum(lengths)))
        shape = BackwardShape(tuple((length, length) for length in lengths), *heads, window=CAUSAL, packed=True)
        found = scheduled(shape, 128)
        assert found.busy >= (0.9 if found.steps >= 128 else 0.8), (lengths, found)


# --- No splits where they gain nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles_are_not_cut(head_dim: int) -> None:
    assert not is_cut(deal(dense(8192, 2, 32, 32, CAUSAL), head_dim))
    assert not is_cut(deal(dense(16384, 4, 32, 8, WINDOW), head_dim))
    lengths = ((4096, 4096),) * 8
    assert not is_cut(deal(BackwardShape(lengths, 32, 8, CAUSAL, packed=True), head_dim))


def test_unmasked_only_the_last_rounds_are_cut() -> None:
    found = deal(dense(8192, 1, 7, 7, FULL), 128)  # 448 tiles: 3.4 rounds
    assert is_cut(found)
    assert found.first_tile == 2 * NUM_SMS


# --- Deterministic gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 32])
@pytest.mark.parametrize("window", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_deterministic_cuts_do_not_depend_on_the_gpu(window: tuple[int, int], kv_heads: int) -> None:
    shape = dense(4096, 1, 32, kv_heads, window, deterministic=True)
    gpus = itertools.product((1, 16, 78, 132), (6 << 20, 50 << 20))
    found = [deal(shape, 128, *gpu) for gpu in gpus]
    assert len({(each.first_tile, each.over_heads, each.over_rows, each.heads_per_group) for each in found}) == 1


@pytest.mark.parametrize(("tokens", "heads"), [(1152, 32), (1024, 40), (2048, 128)], ids=str)
def test_deterministic_cuts_of_the_last_rounds_do_not_depend_on_the_gpu(tokens: int, heads: int) -> None:
    """Splits begin at a number in the order of claims, which follows the heads of a group."""
    shape = dense(tokens, 1, heads, heads, FULL, deterministic=True)
    found = [deal(shape, 128, *gpu) for gpu in ((132, 50 << 20), (114, 50 << 20), (78, 60 << 20), (16, 6 << 20))]
    assert len({(each.first_tile, each.over_heads, each.over_rows, each.heads_per_group) for each in found}) == 1
    assert found[0].first_tile > 0 and is_cut(found[0])


@pytest.mark.parametrize("tokens", [512, 2048, 16384])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 256])
def test_heads_in_order_stay_in_the_cache_or_serve_several_ctas(tokens: int, head_dim: int) -> None:
    """CTAs loop over Q and dO, of 2 bytes per element, and add to dQ, of 4 bytes."""
    group = deal(dense(tokens, 65536 // tokens, 16, 16, CAUSAL, deterministic=True), head_dim).heads_per_group
    fits = group * tokens * head_dim * (2 + 2 + 4) <= backward_schedule.L2_BYTES / 2
    assert fits or NUM_SMS // group >= 4
    assert group >= 16  # with fewer heads, CTAs wait for each other


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [FULL, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("heads", [(16, 16), (32, 8)], ids=str)
def test_adding_in_a_fixed_order_costs_little(
    heads: tuple[int, int], tokens: int, window: tuple[int, int], head_dim: int
) -> None:
    """With 16384 tokens in all, as in benchmarks, fixed order takes at most 15 % more time than any order."""
    shape = dense(tokens, 16384 // tokens, *heads, window)
    in_order = dense(tokens, 16384 // tokens, *heads, window, deterministic=True)
    assert scheduled(in_order, head_dim).useful >= scheduled(shape, head_dim).useful / 1.15


def test_the_command_compares_whole_tiles_with_splits(capsys: pytest.CaptureFixture[str]) -> None:
    backward_schedule.main(["--kv-heads", "1", "--heads", "8"])
    whole, split, *_ = (line for line in capsys.readouterr().out.splitlines() if line.startswith("any order"))
    busy = [int(part.rstrip("%")) for line in (whole, split) for part in line.split() if part.endswith("%")]
    assert "whole tiles" in whole and busy[0] < 50 < 90 <= busy[2]
