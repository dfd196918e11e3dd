"""Tests attention over ranges of visible keys: all backends against the oracle, the visited tiles, bad input."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastattn
from attention_cases import (
    RESULTS,
    SEED,
    Case,
    Problem,
    backward_arguments,
    compare,
    forward_arguments,
    make_problem,
    run_ops,
    run_public,
    use_small_tiles,
)
from cuda_kernels import EMULATED, FAMILY, HAS_KERNELS, NO_KERNELS, checked, only_emulated
from fastattn import masks, reference
from fastattn.triton_kernels.attention_launch import Scores, attention_constexprs
from fastattn.triton_kernels.attention_ranges import list_tiles
from fastattn.triton_kernels.tiles import AttentionTile
from kernel_device import DEVICE, ON_EMULATOR
from oracle import check_against_oracle
from test_blocks import add_arguments

if ON_EMULATOR:
    from emulator.options import launching
if EMULATED:
    from emulator import device, launches

pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

CAUSAL = (-1, 0)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    Case(ranges=2, window=CAUSAL, shape=(2, 4, 2, 75, 91), ranges_shape=(1, 0), dtype=torch.bfloat16, grad_lse=True),
    Case(ranges=4, lengths=((33, 0, 50, 7), (47, 9, 64, 0)), window=(40, 9), sinks=True, alibi="batch", softcap=5.0),
    Case(ranges=3, shape=(2, 2, 1, 49, 70), mask="inf", dropout=0.2, head_dims=(40, 24)),
    Case(ranges=1, shape=(2, 2, 1, 70, 33), ranges_shape=(0, 1), mask="bool", sinks=True, dropout=0.3, grad_lse=True),
]


each_case = pytest.mark.parametrize("case", [CASES[0], *map(slow, CASES[1:])], ids=str)


def make(case: Case) -> tuple[Problem, Tensor]:
    """Returns the tensors of a case, and its ranges alone."""
    problem = make_problem(case)
    assert problem.key_ranges is not None
    return problem, problem.key_ranges


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@each_case
def test_attention_and_its_gradients(case: Case, kernels: str, monkeypatch: Any) -> None:
    use_small_tiles(monkeypatch)
    problem = make_problem(case)
    found = run_public(case, problem, kernels, deterministic=True)
    compare(case, problem, found, names=found)


def check_sums(ops: Any, case: Case, problem: Problem, found: dict[str, Tensor]) -> None:
    """Adds the gradients to sums that are zero: they must be the gradients ``found``."""
    sums = tuple(torch.zeros_like(t, dtype=torch.float32) for t in (problem.query, problem.key, problem.value))
    arguments = add_arguments(case, problem, sums, found["out"], found["lse"])
    with checked():
        ops.attention_backward_add(*arguments, key_ranges=problem.key_ranges)
    for name, total in zip(("query", "key", "value"), sums, strict=True):
        assert torch.equal(total.to(case.dtype), found[f"grad_{name}"]), name


@pytest.mark.slow
def test_a_block_of_a_larger_call(monkeypatch: Any) -> None:
    """Windows depend on positions in the whole call, ranges on the block's own keys. Gradients may be added to sums."""
    use_small_tiles(monkeypatch)
    case = Case(ranges=2, shape=(2, 4, 2, 90, 200), window=(90, 9), first_row=150, first_key=36)
    problem = make_problem(case)
    found = run_ops(torch.ops.fastattn_triton, case, problem)
    compare(case, problem, found)
    check_sums(torch.ops.fastattn_triton, case, problem, found)


@pytest.mark.slow
def test_dropout_has_the_bits_of_a_bool_mask(monkeypatch: Any) -> None:
    """With uniform probabilities and one-hot values, the output shows which weights are kept."""
    use_small_tiles(monkeypatch)
    keys = 72
    case = Case(ranges=2, shape=(1, 2, 1, 50, keys), head_dims=(16, keys), dropout=0.35)
    problem = make_problem(case)
    problem.query.zero_()
    problem.value[:] = torch.eye(keys, device=DEVICE)
    assert problem.key_ranges is not None
    by_ranges = run_public(case, problem, "triton")["out"] != 0
    seen = masks.to_bool(problem.key_ranges, keys)
    keep = reference.dropout_keep(SEED, 0.35, 1, 2, 50, keys, torch.device(DEVICE))
    assert torch.equal(by_ranges, keep & seen)


@pytest.mark.slow
def test_what_ranges_hide_has_no_influence(monkeypatch: Any) -> None:
    """NaN and infinity in keys and values that no query sees reach no result."""
    use_small_tiles(monkeypatch)
    case = Case(ranges=2, shape=(1, 2, 1, 40, 80))
    problem, ranges = make(case)
    ranges[..., 0, :].clamp_(max=20)
    ranges[..., 1, :].clamp_(min=53)
    expected = run_public(case, problem, "triton", deterministic=True)
    problem.key[..., 20:53, :], problem.value[..., 20:53, :] = torch.nan, torch.inf
    actual = run_public(case, problem, "triton", deterministic=True)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    assert not actual["grad_key"][..., 20:53, :].any()


def test_pages() -> None:
    """Pages of two sizes are read by Triton's kernels; one page is absent."""
    case = Case(ranges=3, lengths=((130, 70), (200, 290)), window=(120, 5), head_dims=(64, 64), dtype=torch.bfloat16)
    problem = make_problem(case)
    for page_size in (16, 5):
        num_pages = -(-290 // page_size)
        pages = torch.full((2 * num_pages, 2, page_size, 64), torch.nan, dtype=case.dtype, device=DEVICE)
        caches = [pages, pages.clone()]
        table = torch.randperm(2 * num_pages, generator=torch.Generator().manual_seed(3)).view(2, -1).to(torch.int32)
        begin = 0
        for sequence, length in enumerate(case.lengths[1]):
            for cache, packed in zip(caches, (problem.key, problem.value), strict=True):
                rows = packed[begin : begin + length]
                for i, page in enumerate(rows.split(page_size)):
                    cache[table[sequence, i], :, : len(page)] = page.transpose(0, 1)
            begin += length
        table[1, 3] = 2**30
        arguments = {
            "query": problem.query,
            "key": caches[0],
            "value": caches[1],
            "cu_seqlens_q": problem.cu_seqlens_q,
            "cu_seqlens_k": problem.cu_seqlens_k,
            "max_seqlen_q": 130,
            "max_seqlen_k": 290,
            "block_table": table.to(DEVICE),
            "key_ranges": problem.key_ranges,
            "window": case.window,
        }
        with fastattn.use_backend("triton"):
            found = fastattn.attention_varlen(**arguments, return_lse=True)
        exact = {
            name: value.double() if name in ("query", "key", "value") else value for name, value in arguments.items()
        }
        oracle = reference.attention_varlen(**exact)
        composite = reference.attention_varlen(**arguments, compute_dtype=case.dtype)
        for name, *values in zip(("out", "lse"), found, oracle, composite, strict=True):
            check_against_oracle(f"pages of {page_size}: {name}", *values)


# --- the CUDA C++ forward kernels -------------------------------------------------------------------------------------

# Two or more tiles of rows and several of keys; some are full and some are empty.
CUDA_CASES = [
    Case(ranges=2, shape=(2, 4, 2, 270, 401), ranges_shape=(1, 1), head_dims=(64, 64), sinks=True),
    Case(ranges=4, shape=(2, 2, 1, 200, 333), ranges_shape=(1, 0), head_dims=(128, 128), dtype=torch.bfloat16),
    Case(ranges=1, shape=(2, 2, 2, 150, 350), ranges_shape=(0, 1), head_dims=(96, 96), window=CAUSAL),
    Case(ranges=3, shape=(2, 2, 1, 140, 300), mask="inf", dropout=0.2, softcap=4.0, head_dims=(40, 24)),
    Case(ranges=2, shape=(1, 2, 1, 139, 290), mask="bool", window=(150, 40), head_dims=(192, 128)),
    Case(
        ranges=4, lengths=((133, 0, 250, 7), (147, 9, 264, 0)), ranges_shape=(0, 1), alibi="batch", head_dims=(32, 32)
    ),
    Case(ranges=3, lengths=((33, 300), (65, 310)), window=(100, 0), sinks=True, head_dims=(256, 256)),
    Case(ranges=2, shape=(1, 2, 1, 70, 140), mask="all min", head_dims=(64, 64)),
    Case(ranges=2, shape=(2, 4, 2, 90, 200), window=(90, 9), first_row=150, first_key=36, head_dims=(64, 64)),
]


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest) -> Iterator[int]:
    if not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    if not EMULATED:
        if request.param != FAMILY:
            pytest.skip("another GPU is here")
        yield request.param
        return
    with device.emulated(request.param, num_sms=3):
        yield request.param


def cuda_forward(case: Case, problem: Any, **launching: Any) -> dict[str, Tensor]:
    with checked(**launching):
        found = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem), key_ranges=problem.key_ranges)
    return dict(zip(("out", "lse"), found, strict=False))


@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_cuda_forward(case: Case, gpu: int) -> None:
    problem = make_problem(case)
    if not EMULATED:
        compare(case, problem, cuda_forward(case, problem), names=("out", "lse"))
        return
    with launches.recorded() as found:
        result = cuda_forward(case, problem, seed=case.shape[-1])
    names = [launched.report.kernel for launched in found]
    assert ["attention_key_ranges_sm80" in name for name in names] == [True, False]
    assert f"attention_forward_options_sm{gpu}" in names[1]
    compare(case, problem, result, names=("out", "lse"))


def test_cuda_takes_a_view_of_any_numbers(gpu: int) -> None:
    """Pairs of ranges need not be aligned to 8 bytes; the largest scores are right too."""
    case = Case(ranges=3, shape=(1, 2, 1, 70, 150), head_dims=(64, 64))
    problem, ranges = make(case)
    buffer = torch.zeros(ranges.numel() + 1, dtype=torch.int32, device=DEVICE)
    buffer[1:] = ranges.flatten()
    with checked(), fastattn.use_backend("cuda"):
        found, largest = fastattn.attention(
            problem.query,
            problem.key,
            problem.value,
            key_ranges=buffer[1:].view(ranges.shape),
            return_max_logit=True,
        )
    compare(case, problem, {"out": found}, names=("out",))
    assert torch.equal(found, cuda_forward(case, problem)["out"])
    problem.key_ranges = buffer[1:].view(ranges.shape)
    check_gradients(case, problem)
    *_, expected = reference.attention(
        problem.query.double(), problem.key.double(), problem.value.double(), key_ranges=ranges, return_max_logit=True
    )
    torch.testing.assert_close(largest.double(), expected, rtol=1e-3, atol=1e-3)


def test_cuda_forward_does_not_trust_ranges_and_offsets(gpu: int) -> None:
    case = Case(ranges=2, lengths=((100, 140, 20), (250, 140, 60)), head_dims=(64, 64))
    problem, ranges = make(case)
    ranges[:, ::3, 0] = torch.tensor([-(2**31), 2**31 - 1], device=DEVICE)
    ranges[:, 1::3, 1] = torch.tensor([2**31 - 1, -(2**31)], device=DEVICE)
    compare(case, problem, cuda_forward(case, problem), names=("out", "lse"))
    problem.cu_seqlens_q = torch.tensor([0, 180, 10, 190], dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor([3, 450, 140, 449], dtype=torch.int32, device=DEVICE)
    cuda_forward(case, problem, races=False, uninitialised=False)


@only_emulated
def test_cuda_forward_visits_listed_tiles_alone(gpu: int) -> None:
    """The emulator counts the products."""
    case = Case(ranges=2, shape=(1, 2, 1, 64, 1000), head_dims=(64, 64))
    problem, ranges = make(case)
    ranges[..., 0, :] = torch.tensor([10, 50], device=DEVICE)
    ranges[..., 1, :] = torch.tensor([900, 950], device=DEVICE)
    with launches.recorded() as all_launches:
        cuda_forward(case, problem)
    listed = all_launches[-1]
    ranges[..., 0, :] = torch.tensor([0, 900], device=DEVICE)
    with launches.recorded() as all_launches:
        cuda_forward(case, problem)
    products = "wgmma.mma_async" if gpu == 90 else "mma.sync"
    few, many = (
        sum(count for opcode, count in each.report.opcodes.items() if products in opcode)
        for each in (listed, all_launches[-1])
    )
    assert 0 < 3 * few < many


@only_emulated
@pytest.mark.parametrize(("num_ranges", "most"), [(1, {80: 1.35, 90: 1.5}), (2, {80: 1.42, 90: 1.57})])
def test_cuda_forward_masked_steps_cost_little(num_ranges: int, most: dict[int, float], gpu: int) -> None:
    """The emulator counts PTX instructions, of which a masked score takes three and one when compiled."""

    def instructions(keys: int, is_masked: bool) -> int:
        case = Case(ranges=num_ranges, shape=(1, 1, 1, 64, keys), head_dims=(64, 64))
        problem, ranges = make(case)
        ranges.zero_()
        ranges[..., 0, 1] = keys
        if is_masked:
            ranges[:, :, 5] = 0  # a row that sees nothing leaves no tile full
        with launches.recorded() as found:
            cuda_forward(case, problem)
        return sum(row.warps for row in found[-1].report.rows)

    full, masked = (instructions(3840, is_masked) - instructions(1920, is_masked) for is_masked in (False, True))
    assert full < masked < most[gpu] * full


# --- the CUDA C++ gradients -------------------------------------------------------------------------------------------


def check_gradients(case: Case, problem: Problem, deterministic: bool = True, **launching: Any) -> None:
    with checked(**launching):
        compare(case, problem, run_ops(torch.ops.fastattn, case, problem, deterministic))


@pytest.mark.parametrize(
    "case",
    [*CUDA_CASES[:2], *map(slow, CUDA_CASES[2:])],
    ids=str,
)
def test_cuda_gradients(case: Case, gpu: int) -> None:
    """The emulator checks that gradients are summed in one order."""
    problem = make_problem(case)
    with checked(seed=case.shape[-1]), launches.recorded() if EMULATED else contextlib.nullcontext([]) as found:
        result = run_ops(torch.ops.fastattn, case, problem)
    compare(case, problem, result)
    names = [launched.report.kernel for launched in found]
    assert sum("attention_backward_ranges_sm80" in name for name in names) == EMULATED


@pytest.mark.slow
@pytest.mark.parametrize("case", [CUDA_CASES[0], CUDA_CASES[5]], ids=str)
def test_cuda_gradients_in_any_order(case: Case, gpu: int) -> None:
    problem = make_problem(case)
    check_gradients(case, problem, False, seed=3)


@pytest.mark.parametrize("sizes", [(5, 0), (0, 7)], ids=["no keys", "no rows"])
def test_cuda_gradients_of_nothing(sizes: tuple[int, int], gpu: int) -> None:
    case = Case(ranges=2, shape=(1, 2, 1, *sizes), head_dims=(64, 64))
    problem = make_problem(case)
    with checked():
        found = run_ops(torch.ops.fastattn, case, problem)
    assert not any(found[name].any() for name in ("out", "grad_query", "grad_key", "grad_value"))


def test_cuda_gradients_added_to_sums(gpu: int) -> None:
    case = CUDA_CASES[-1]
    problem = make_problem(case)
    check_sums(torch.ops.fastattn, case, problem, run_ops(torch.ops.fastattn, case, problem))


@pytest.mark.parametrize("head_dim", [64, slow(96), slow(128), slow(256)])
def test_cuda_gradients_of_ranges_that_hide_nothing(head_dim: int, gpu: int) -> None:
    """Tiles that all rows see whole, by ranges and window, take a path of their own."""
    options = {"window": (300, 90), "softcap": 9.0, "alibi": "head", "dropout": 0.2}
    case = Case(ranges=2, shape=(1, 2, 1, 200, 700), head_dims=(head_dim, head_dim), **options)
    problem, ranges = make(case)
    ranges[:] = torch.tensor([[0, 700], [0, 0]], device=DEVICE)
    check_gradients(case, problem)


def test_cuda_gradients_of_what_a_bias_hides_behind_full_ranges(gpu: int) -> None:
    """The last row tile is partial: its rows beyond the tensor must not carry a masked NaN into a gradient."""
    case = Case(ranges=1, mask="float", shape=(1, 2, 1, 100, 300), head_dims=(64, 64))
    problem, ranges = make(case)
    assert problem.bias is not None
    ranges[:] = torch.tensor([[0, 300]], device=DEVICE)
    problem.bias[..., 140:150] = -torch.inf
    expected = run_ops(torch.ops.fastattn, case, problem)
    problem.key[..., 140:150, :] = torch.nan
    with checked():
        actual = run_ops(torch.ops.fastattn, case, problem)
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        assert torch.equal(actual[name], expected[name]), name
    assert not actual["grad_key"][..., 140:150, :].any()


@pytest.mark.parametrize("head_dim", [64, 128, slow(192)])
def test_cuda_gradients_of_heads_that_see_the_keys_by_other_rows(head_dim: int, gpu: int) -> None:
    """The query heads of a KV head follow each other: one may begin where the one before ended, or see nothing."""
    case = Case(ranges=1, shape=(1, 4, 1, 250, 270), ranges_shape=(0, 1), head_dims=(head_dim, head_dim))
    problem, ranges = make(case)
    row = torch.arange(250, device=DEVICE)
    seen_by = [row < 64, row < 0, (row >= 64) & (row < 128), (row < 10) | (row >= 192)]
    for head, rows in enumerate(seen_by):
        ranges[:, head, :, 0, 0], ranges[:, head, :, 0, 1] = 3, torch.where(rows, 270, 0)
    check_gradients(case, problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "keys", "a gap"])
def test_cuda_gradients_of_many_tiles(name: str, gpu: int) -> None:
    """More than 32 tiles of rows, or of keys, need several words of bits. The last case has a gap of more than 32 tiles
    within a head."""
    rows, keys = (20, 4400) if name == "keys" else (2240, 100)
    heads = (1, 1) if name == "keys" else (2, 1)
    case = Case(ranges=2, shape=(1, *heads, rows, keys), head_dims=(128, 128) if name == "keys" else (64, 64))
    problem, ranges = make(case)
    row = torch.arange(rows, device=DEVICE)
    begin = (row * keys // rows)[:, None] + torch.tensor([0, keys // 2], device=DEVICE)
    if name == "a gap":
        begin[64:-64] = keys
    ranges[..., 0], ranges[..., 1] = begin.clamp(max=keys), (begin + 20).clamp(max=keys)
    check_gradients(case, problem)


@pytest.mark.parametrize("head_dim", [64, slow(128), slow(192)])
def test_cuda_gradients_of_a_key_that_is_not_finite(head_dim: int, gpu: int) -> None:
    """NaN reaches the rows that see the key and the gradients of all keys that these rows see, but of no other key."""
    case = Case(ranges=1, shape=(1, 2, 1, 64, 600), head_dims=(head_dim, head_dim))
    problem, ranges = make(case)
    sees_it = torch.arange(64, device=DEVICE)[:, None] < 10
    ranges[:] = torch.where(sees_it, torch.tensor([0, 20]).to(DEVICE), torch.tensor([20, 600]).to(DEVICE))[:, None]
    problem.key[..., 10, :] = torch.nan
    with checked():
        found = run_ops(torch.ops.fastattn, case, problem)
    for name in ("grad_key", "grad_value"):
        assert found[name][..., :20, :].isnan().all() and found[name][..., 20:, :].isfinite().all(), name
    assert found["grad_query"][..., :10, :].isnan().all() and found["grad_query"][..., 10:, :].isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {}), (128, {}), slow(256, {}), *((dim, {"mask": "float", "alibi": "head"}) for dim in (64, 192))],
    ids=str,
)
def test_cuda_gradients_of_what_ranges_hide(head_dim: int, options: dict[str, Any], gpu: int) -> None:
    """NaN in keys and infinity in values that no query sees reach no gradient."""
    case = Case(ranges=2, shape=(1, 2, 1, 100, 300), head_dims=(head_dim, head_dim), **options)
    problem, ranges = make(case)
    ranges[..., 0, :].clamp_(max=130)
    ranges[..., 1, :].clamp_(min=163)
    expected = run_ops(torch.ops.fastattn, case, problem)
    problem.key[..., 130:163, :], problem.value[..., 130:163, :] = torch.nan, torch.inf
    with checked():
        actual = run_ops(torch.ops.fastattn, case, problem)
    for name in RESULTS:
        assert torch.equal(actual[name], expected[name]), name
    assert not actual["grad_key"][..., 130:163, :].any()
    if options:
        assert actual["grad_bias"].any() and not actual["grad_bias"][..., 130:163].any() and actual["grad_slopes"].all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_gradients_do_not_trust_ranges_and_offsets(deterministic: bool, gpu: int) -> None:
    """Overlapping sequences write the same words of tile bits, and no CTA waits for one that never comes."""
    case = Case(ranges=2, lengths=((100, 140, 20), (650, 140, 60)), head_dims=(64, 64))
    problem, ranges = make(case)
    ranges[:, ::3, 0] = torch.tensor([-(2**31), 2**31 - 1], device=DEVICE)
    ranges[:, 1::3, 1] = torch.tensor([2**31 - 1, -(2**31)], device=DEVICE)
    check_gradients(case, problem, deterministic)
    problem.cu_seqlens_q = torch.tensor([0, 180, 10, 190], dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor([3, 750, 240, 590], dtype=torch.int32, device=DEVICE)
    with checked(races=False, uninitialised=False):
        out, lse, _ = torch.ops.fastattn.attention_forward(
            *forward_arguments(case, problem), key_ranges=problem.key_ranges
        )
        torch.ops.fastattn.attention_backward(
            *backward_arguments(case, problem, out, lse, deterministic), key_ranges=problem.key_ranges
        )


@only_emulated
def test_cuda_gradients_look_once_where_heads_share_ranges(gpu: int) -> None:
    """The emulator counts the loads of words that say which tiles are seen. Only the last rows see the first keys."""

    def loads(heads: int, rows: int) -> int:
        case = Case(ranges=1, shape=(1, heads, heads, rows, rows), head_dims=(64, 64))
        problem = make_problem(case)
        assert problem.key_ranges is not None
        problem.key_ranges = torch.zeros_like(problem.key_ranges[:, :1])
        problem.key_ranges[..., -64:, 0, 1] = 64
        with launches.recorded() as found:
            run_ops(torch.ops.fastattn, case, problem)
        counts = [each.report.opcodes for each in found if "backward_key_value" in each.report.kernel]
        return sum(count for each in counts for opcode, count in each.items() if re.match(r"ld\..*v2\.u32", opcode))

    one, four = (loads(heads, 4096) - loads(heads, 2048) for heads in (1, 4))  # what more rows cost
    assert four == one > 0


@only_emulated
@pytest.mark.parametrize("head_dim", [64, slow(128), slow(256)])
def test_cuda_gradients_visit_seen_tiles_alone(head_dim: int, gpu: int) -> None:
    """The emulator counts the products of one tile, of a row of tiles, of a column, and of all tiles."""
    case = Case(ranges=1, shape=(1, 2, 1, 260, 600), head_dims=(head_dim, head_dim))
    problem, ranges = make(case)

    def products(begin: Any, end: Any) -> int:
        ranges[..., 0, 0], ranges[..., 0, 1] = begin, end
        with launches.recorded() as found:
            run_ops(torch.ops.fastattn, case, problem)
        name = "wgmma.mma_async" if gpu == 90 else "mma.sync"
        counts = [
            sum(count for opcode, count in each.report.opcodes.items() if name in opcode)
            for each in found
            if "backward_key_value" in each.report.kernel
        ]
        return sum(counts)

    rows = torch.arange(260, device=DEVICE)
    one_tile, all_tiles = products(300, torch.where(rows == 100, 301, 300)), products(0, 600)
    assert 0 < one_tile <= all_tiles / 15
    line, column = products(0, torch.where(rows == 100, 600, 0)), products(300, 301)
    assert one_tile < min(line, column) and line * column == one_tile * all_tiles


# --- which tiles Triton's kernels visit -------------------------------------------------------------------------------

TILE = AttentionTile(16, 32, num_warps=4, num_stages=1)


def tiles_of(case: Case, ranges: Tensor, of_keys: bool, offsets: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Returns the lists of tiles that the kernels get."""
    batch, heads, _, rows, keys = case.shape
    packed = offsets is not None
    sizes = {"query": (rows, heads, 16), "key": (keys, heads, 16)} if packed else {}
    sizes = sizes or {"query": (batch, heads, rows, 16), "key": (batch, heads, keys, 16)}
    tensors = {name: torch.zeros(size, dtype=torch.float16, device=DEVICE) for name, size in sizes.items()}
    left, right = case.window
    given = SimpleNamespace(
        **tensors,
        value=tensors["key"],
        key_ranges=ranges.to(DEVICE),
        cu_seqlens_q=offsets[0] if offsets else None,
        cu_seqlens_k=offsets[1] if offsets else None,
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 2**30),
        **dict.fromkeys(("alibi_slopes", "dropout_seed", "first_row"), None),
        **dict.fromkeys(("scale", "softcap", "dropout_p", "first_key", "first_head"), 0),
        window_left=left,
        window_right=right,
    )
    scores = Scores(given)
    arguments = {**scores.arguments(), **attention_constexprs(TILE, 16, 16, **scores.options())}
    return list_tiles(arguments, of_keys)["tiles"].cpu()


def expected_tiles(seen: Tensor, of_keys: bool) -> list[list[int]]:
    """Returns the list of each row of tiles of a mask ``[Sq, Sk]``, or of each column if ``of_keys``."""
    lines = [part.split(TILE.block_n, dim=1) for part in seen.split(TILE.block_m)]
    lines = list(zip(*lines, strict=True)) if of_keys else lines
    lists = []
    for line in lines:
        full = [i for i, tile in enumerate(line) if tile.all() and tile.shape == (TILE.block_m, TILE.block_n)]
        some = [i for i, tile in enumerate(line) if tile.any() and i not in full]
        lists.append([len(full), len(full) + len(some), *full, *some])
    return lists


@settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 70),
    keys=st.integers(1, 200),
    num_ranges=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
    is_causal=st.booleans(),
)
def test_lists_have_the_tiles_that_some_row_sees(
    rows: int, keys: int, num_ranges: int, seed: int, is_causal: bool
) -> None:
    case = Case(shape=(2, 2, 1, rows, keys), ranges=num_ranges, seed=seed, window=CAUSAL if is_causal else (-1, -1))
    _, ranges = make(case)
    seen = masks.to_bool(ranges, keys).cpu()
    if is_causal:
        seen = seen & (torch.arange(keys) <= torch.arange(rows)[:, None] + keys - rows)
    for of_keys in (False, True):
        found = tiles_of(case, ranges, of_keys)
        for batch, head in itertools.product(range(2), range(2)):
            for line, tiles in enumerate(expected_tiles(seen[batch, head], of_keys)):
                assert found[batch, head, line, : len(tiles)].tolist() == tiles


def test_lists_of_packed_sequences() -> None:
    lengths = ((16, 0, 37, 5, 16), (64, 9, 100, 0, 31))
    case = Case(ranges=2, lengths=lengths, shape=(1, 2, 1, sum(lengths[0]), sum(lengths[1])))
    problem = make_problem(case)
    assert problem.key_ranges is not None and problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None
    offsets = problem.cu_seqlens_q, problem.cu_seqlens_k
    for of_keys, block in ((False, TILE.block_m), (True, TILE.block_n)):
        found = tiles_of(case, problem.key_ranges, of_keys, offsets)
        for sequence, (num_rows, num_keys) in enumerate(zip(*lengths, strict=True)):
            first_row = sum(lengths[0][:sequence])
            first = sum(lengths[of_keys][:sequence]) // block + sequence
            for head in range(2):
                seen = masks.to_bool(problem.key_ranges[head, first_row : first_row + num_rows], num_keys).cpu()
                for line, tiles in enumerate(expected_tiles(seen, of_keys)):
                    assert found[0, head, first + line, : len(tiles)].tolist() == tiles


def test_ranges_beyond_the_keys_are_absent(monkeypatch: Any) -> None:
    """On a GPU nobody reads ranges and offsets back: numbers out of range count as absent and read no memory."""
    use_small_tiles(monkeypatch)
    case = Case(ranges=2, shape=(1, 2, 1, 20, 70))
    problem, ranges = make(case)
    ranges[..., 1, :] = torch.tensor([60, 2**31 - 1], device=DEVICE)
    ranges[..., 0, :] = torch.tensor([-(2**31), 10], device=DEVICE)
    ranges[..., :5, 0, :] = torch.tensor([2**31 - 1, -(2**31)], device=DEVICE)
    found = run_public(case, problem, "triton", deterministic=True)
    ranges.clamp_(0, 70)
    expected = run_public(case, problem, "triton", deterministic=True)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_wrong_offsets_lead_nowhere(monkeypatch: Any) -> None:
    """Sequences that overlap write the same rows and the same lists of tiles, but nothing outside of the tensors."""
    use_small_tiles(monkeypatch)
    case = Case(ranges=2, lengths=((30, 40, 20), (50, 40, 60)))
    problem = make_problem(case)
    problem.cu_seqlens_q = torch.tensor([0, 80, 10, 90], dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor([3, 150, 140, 149], dtype=torch.int32, device=DEVICE)
    problem.max_seqlens = (90, 150)
    with launching(races=False) if ON_EMULATOR else contextlib.nullcontext():
        found = run_public(case, problem, "triton", deterministic=True)
    assert not found["grad_key"][:3].any()


# --- around the kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        (torch.zeros(1, 1, 5, 1, 2), "torch.int32"),
        (torch.zeros(1, 1, 4, 1, 2, dtype=torch.int32), r"\[B or 1, Hq or 1, Sq, R, 2\] for a query \[2, 4, 5, 16\]"),
        (torch.zeros(1, 2, 5, 1, 2, dtype=torch.int32), r"for a query \[2, 4, 5, 16\], got \[1, 2, 5, 1, 2\]"),
        (torch.zeros(1, 1, 5, 5, 2, dtype=torch.int32), "1 to 4 ranges for each query, got 5"),
        (torch.zeros(1, 5, 1, 2, dtype=torch.int32), "5 dimensions"),
        ("documents", "expected a torch.Tensor or None, got str"),
    ],
)
def test_shapes_and_dtypes_are_checked(ranges: Any, message: str) -> None:
    query, key = torch.zeros(2, 4, 5, 16, dtype=torch.float16, device=DEVICE), torch.zeros(2, 2, 7, 16).to(DEVICE)
    ranges = ranges.to(DEVICE) if isinstance(ranges, Tensor) else ranges
    with pytest.raises((fastattn.InputError, TypeError), match=f"key_ranges: .*{message}"):
        fastattn.attention(query, key.half(), key.half(), key_ranges=ranges)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[0, 3], [2, 5]], r"ranges that do not overlap, got \[\[0, 3\], \[2, 5\]\] at key_ranges\[0, 0, 1\]"),
        ([[4, 6], [0, 5]], "ranges that do not overlap.*; join such ranges to one, or end the first where the second"),
        ([[3, 2], [0, 0]], r"0 <= begin <= end <= 7.*got \[3, 2\] at key_ranges\[0, 0, 1\]"),
        ([[-1, 2], [0, 0]], "0 <= begin"),
        ([[0, 0], [5, 8]], "0 <= begin <= end <= 7"),
    ],
)
def test_ranges_are_checked_where_the_host_may_read(row: Any, message: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("FASTATTN_CHECK", "1")
    query, key = (torch.zeros(1, 1, n, 16, dtype=torch.float16, device=DEVICE) for n in (3, 7))
    ranges = torch.tensor([[[[0, 2], [5, 7]], row, [[2, 2], [2, 2]]]], dtype=torch.int32, device=DEVICE)[None]
    with pytest.raises(fastattn.InputError, match=f"key_ranges: expected {message}"):
        fastattn.attention(query, key, key, key_ranges=ranges)
    packed, offsets = (t[0].transpose(0, 1) for t in (query, key)), [torch.tensor([0, n]).int() for n in (3, 7)]
    query, key = packed
    with pytest.raises(fastattn.InputError, match="key_ranges: expected"):
        fastattn.attention_varlen(query, key, key, *(o.to(DEVICE) for o in offsets), 3, 7, key_ranges=ranges[0])


@pytest.mark.parametrize("check", ["0", "1"])
def test_vmap_over_ranges_and_over_queries(check: str, monkeypatch: Any) -> None:
    use_small_tiles(monkeypatch)
    monkeypatch.setenv("FASTATTN_CHECK", check)
    case = Case(ranges=2, shape=(3, 2, 1, 20, 40))
    problem = make_problem(case)
    query, key, value, ranges = (getattr(problem, name) for name in ("query", "key", "value", "key_ranges"))
    with fastattn.use_backend("triton"):
        expected = fastattn.attention(query, key, value, key_ranges=ranges)

        def one(query: Tensor, key: Tensor, value: Tensor, ranges: Tensor) -> Tensor:
            return fastattn.attention(query[None], key[None], value[None], key_ranges=ranges[None])[0]

        assert torch.equal(torch.vmap(one)(query, key, value, ranges), expected)
        shared = ranges[:1, :1].contiguous()
        expected = fastattn.attention(query, key, value, key_ranges=shared)
        assert torch.equal(torch.vmap(one, in_dims=(0, 0, 0, None))(query, key, value, shared[0]), expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool, monkeypatch: Any) -> None:
    use_small_tiles(monkeypatch)
    compiled = torch.compile(fastattn.attention, fullgraph=True, backend="eager", dynamic=dynamic)
    for rows in (20, 23):
        problem = make_problem(Case(ranges=2, shape=(1, 2, 1, rows, 40)))
        options = {"key_ranges": problem.key_ranges, "causal": True}
        with fastattn.use_backend("triton"):
            expected = fastattn.attention(problem.query, problem.key, problem.value, **options)
            assert torch.equal(compiled(problem.query, problem.key, problem.value, **options), expected)


def test_gradients_by_finite_differences() -> None:
    case = Case(ranges=3, shape=(1, 2, 2, 5, 9), head_dims=(3, 3))
    problem = make_problem(case)
    tensors = [t.double().requires_grad_() for t in (problem.query, problem.key, problem.value)]

    def attend(*tensors: Tensor) -> Tensor:
        with fastattn.use_backend("torch"):
            return fastattn.attention(*tensors, key_ranges=problem.key_ranges, softcap=3.0)

    assert torch.autograd.gradcheck(attend, tensors)


def test_explain_says_how_much_is_computed() -> None:
    """`explain` counts the tiles of a dense call, and of two packed sequences of which one sees no key."""
    rows, keys = 300, 520
    query, key = (torch.zeros(1, 1, size, 16, dtype=torch.float16, device=DEVICE) for size in (rows, keys))
    ranges = masks.window_and_global(keys, (40, 0), 10, device=DEVICE)[:, :, -rows:]
    found = fastattn.explain(fastattn.attention, query, key, key, key_ranges=ranges)
    assert found.backend == ("cuda" if HAS_KERNELS else "triton")
    leaf = query.clone().requires_grad_()
    with_gradients = fastattn.explain(fastattn.attention, leaf, key, key, key_ranges=ranges)
    assert with_gradients.backend == found.backend
    size = (found.tile["block_m"], found.tile["block_n"]) if HAS_KERNELS else (found.tile.block_m, found.tile.block_n)
    mask = torch.nn.functional.pad(masks.to_bool(ranges, keys)[0, 0].cpu(), (0, -keys % size[1], 0, -rows % size[0]))
    is_seen = mask.unflatten(0, (-1, size[0])).unflatten(-1, (-1, size[1])).any(1).any(-1)
    assert found.computed == is_seen.double().mean().item() < 1
    assert f"computes {found.computed:.1%} of the tiles" in str(found)

    query, key, packed = query[0].transpose(0, 1), key[0].transpose(0, 1), torch.zeros_like(ranges[0])
    packed[:, 100:] = ranges[0, :, 100:]
    offsets = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 0, 100, rows], [0, 0, 0, keys])]
    found = fastattn.explain(fastattn.attention_varlen, query, key, key, *offsets, 200, keys, key_ranges=packed)
    dense = (tensor.transpose(0, 1)[None] for tensor in (query[100:], key, key))
    expected = fastattn.explain(fastattn.attention, *dense, key_ranges=packed[None, :, 100:])
    assert found.computed == expected.computed
