"""Tests what all attention kernels with gradients do: CUDA C++ for sm_80, for Hopper, and Triton. Shapes, layouts and
values are at the edges, and some must have no influence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import test_cuda_attention_backward as backward
from attention_cases import Case, Problem, compare, laid_out, make_problem, run_ops
from cuda_kernels import DTYPES, each_dtype
from kernel_device import DEVICE

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

CAUSAL = (-1, 0)
TRITON = pytest.param("triton", marks=pytest.mark.slow)
# `kernels` is a fixture in conftest.py.
on_cuda = pytest.mark.parametrize("kernels", ["sm_80", "sm_90"], indirect=True)
on_all = pytest.mark.parametrize("kernels", ["sm_80", "sm_90", "triton"], indirect=True)
on_triton_slowly = pytest.mark.parametrize("kernels", ["sm_80", "sm_90", TRITON], indirect=True)


def run(kernels: str, case: Case, problem: Problem | None = None, deterministic: bool = True) -> dict[str, Tensor]:
    problem = problem or make_problem(case)
    if kernels == "triton":
        return run_ops(torch.ops.fastattn_triton, case, problem)
    return backward.run(case, problem, deterministic=deterministic)


def check(
    kernels: str, case: Case, problem: Problem | None = None, measure: Case | None = None, deterministic: bool = False
) -> dict[str, Tensor]:
    """Compares the results with the oracle, and returns them."""
    if kernels != "triton":
        return backward.check(case, problem, measure, deterministic=deterministic)
    problem = problem or make_problem(case)
    found = run(kernels, case, problem)
    compare(case, problem, found, measure)
    return found


# --- Shapes -----------------------------------------------------------------------------------------------------------


@on_all
@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 5), (2, 0, 1, 5, 5), (1, 2, 1, 0, 5), (1, 2, 1, 5, 0)], ids=str)
@pytest.mark.parametrize(
    ("deterministic", "sinks", "mask"),
    [(False, True, "float"), (True, True, "float"), (True, False, "float"), (False, True, "")],
)
def test_empty(
    shape: tuple[int, int, int, int, int], deterministic: bool, sinks: bool, mask: str, kernels: str
) -> None:
    """On the emulator, memory that no kernel writes is NaN."""
    mask_shape = (1, 1, 1, 1) if deterministic else (0, 0, 0, 0)
    case = Case(shape=shape, sinks=sinks, grad_lse=True, mask=mask, mask_shape=mask_shape)
    problem = make_problem(case)
    found = run(kernels, case, problem, deterministic)
    assert torch.count_nonzero(found["out"]) == 0
    for name in ("query", "key", "value", *(["bias"] if mask else [])):
        gradient = found[f"grad_{name}"]
        assert gradient.shape == getattr(problem, name).shape
        assert torch.count_nonzero(gradient) == 0
    if problem.sinks is None:
        assert bool((found["lse"] == -torch.inf).all())
        return
    # Without keys only the sink remains: its gradient is that of the lse.
    assert problem.grad_lse is not None
    lse = problem.sinks.view(1, -1, 1).expand_as(found["lse"])
    rtol = 0 if mask else 2**-22  # without a mask, kernels compute in base 2: a sink is multiplied by log2(e) and ln 2
    torch.testing.assert_close(found["lse"], lse, rtol=rtol, atol=0)
    expected = problem.grad_lse.sum((0, 2)) if shape[-1] == 0 else torch.zeros(shape[1], device=DEVICE)
    torch.testing.assert_close(found["grad_sinks"], expected)


@on_all
def test_no_query_heads_beside_key_heads(kernels: str) -> None:
    problem = make_problem(Case(shape=(2, 2, 1, 5, 7)))
    problem.query, problem.grad_out = problem.query[:, :0], problem.grad_out[:, :0]
    found = run(kernels, Case(), problem)
    for name in ("key", "value"):
        assert found[f"grad_{name}"].shape == getattr(problem, name).shape
        assert torch.count_nonzero(found[f"grad_{name}"]) == 0


@on_triton_slowly
def test_rows_of_no_sequence_get_no_gradient_and_have_no_influence(kernels: str) -> None:
    """Offsets do not cover the tensors, or are out of range."""
    case = Case(lengths=((20, 70), (90, 30)), sinks=True)
    problem, inner = make_problem(case), make_problem(case)
    problem.cu_seqlens_q = torch.tensor([3, 20, 2**30], dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor([-7, 11, 100], dtype=torch.int32, device=DEVICE)
    for name in ("query", "grad_out"):
        setattr(inner, name, getattr(problem, name)[3:])
        getattr(problem, name)[:3] = torch.nan
    for name in ("key", "value"):
        setattr(inner, name, getattr(problem, name)[:100])
        getattr(problem, name)[100:] = torch.nan
    inner.cu_seqlens_q = torch.tensor([0, 17, 87], dtype=torch.int32, device=DEVICE)
    inner.cu_seqlens_k = torch.tensor([0, 11, 100], dtype=torch.int32, device=DEVICE)
    inner.max_seqlens = problem.max_seqlens = (90, 90)
    found, expected = run(kernels, case, problem), check(kernels, case, inner, deterministic=True)
    assert torch.count_nonzero(found["out"][:3]) == torch.count_nonzero(found["grad_query"][:3]) == 0
    assert bool((found["lse"][:, :3] == -torch.inf).all())
    assert torch.equal(found["out"][3:], expected["out"]) and torch.equal(found["lse"][:, 3:], expected["lse"])
    assert torch.equal(found["grad_query"][3:], expected["grad_query"])
    torch.testing.assert_close(found["grad_sinks"], expected["grad_sinks"])
    for name in ("grad_key", "grad_value"):
        assert torch.count_nonzero(found[name][100:]) == 0
        assert torch.equal(found[name][:100], expected[name])


@on_cuda
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("broken", [(0, 300, 2, 40), (-7, 5, 2**31 - 1, 9), (9, 9, 9, 9), (0, 140, 1, 139)], ids=str)
def test_offsets_in_device_memory_are_not_trusted(broken: tuple[int, ...], deterministic: bool, kernels: str) -> None:
    """With any offsets, kernels end and touch nothing outside of the tensors. Sequences that overlap write the same
    rows."""
    check_overlapping(broken, broken[::-1], deterministic)


@on_cuda
def test_sequences_that_overlap_do_not_wait_for_each_other(kernels: str) -> None:
    """The last sequence begins where the first still has rows: both add to one tile of dQ, in counted order."""
    check_overlapping((0, 140, 2, 40), (0, 149, 0, 149), deterministic=True)


def check_overlapping(of_queries: tuple[int, ...], of_keys: tuple[int, ...], deterministic: bool) -> None:
    case = Case(lengths=((50, 83, 7), (11, 80, 58)))
    problem = make_problem(case)
    problem.cu_seqlens_q = torch.tensor(of_queries, dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor(of_keys, dtype=torch.int32, device=DEVICE)
    problem.max_seqlens = (140, 149)
    found = backward.run(case, problem, deterministic=deterministic, races=False)
    assert not any(found[name].isnan().any() for name in backward.GRADIENTS[:3])


@on_cuda
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_buffer_whose_sequences_are_all_empty(deterministic: bool, kernels: str) -> None:
    """No tile has rows, though the tensors do: the gradients are zero all the same."""
    case = Case(lengths=((64,), (300,)))
    problem = make_problem(case)
    problem.cu_seqlens_q = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    problem.max_seqlens = (0, 300)
    found = run(kernels, case, problem, deterministic)
    assert not any(found[name].any() for name in backward.GRADIENTS[:3])


@on_cuda
def test_bounds_larger_than_the_tensors(kernels: str) -> None:
    case = Case(lengths=((9, 70), (40, 7)), window=(2**31 - 2, 3))
    problem = make_problem(case)
    expected = run(kernels, case, problem)
    problem.max_seqlens = (2**31 - 1, 2**31 - 1)
    backward.assert_equal(run(kernels, case, problem), expected)


# --- Layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["sm_80", TRITON], indirect=True)
@pytest.mark.parametrize("layout", ["bshd", "sliced", "misaligned"])
def test_layouts(layout: str, kernels: str) -> None:
    found = check(kernels, Case(layout=layout, shape=(2, 4, 2, 19, 65), head_dims=(24, 16), window=CAUSAL))
    for name in ("out", *backward.GRADIENTS[:3]):
        assert (found[name].stride(1) < found[name].stride(2)) == (layout == "bshd")


@on_triton_slowly
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_mask_of_any_strides(mask: str, kernels: str) -> None:
    """Triton's bits may differ, as other strides compile to other code."""
    case = Case(mask=mask, mask_shape=(1, 1, 1, 1), shape=(2, 2, 1, 18, 70))
    problem, expected = make_problem(case), run(kernels, case)
    assert problem.bias is not None
    transposed = problem.bias.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    gaps = laid_out(transposed, "sliced") if mask == "float" else transposed.repeat(1, 1, 1, 2)[..., :70]
    for problem.bias in (transposed, gaps):
        if kernels == "triton":
            check(kernels, case, problem)
        else:
            backward.assert_equal(run(kernels, case, problem), expected)


@on_cuda
def test_expanded_gradients_of_the_output_and_lse(kernels: str) -> None:
    """`out.sum()` sends such gradients, with strides of 0."""
    case = Case(shape=(1, 2, 1, 70, 90), grad_lse=True)
    problem = make_problem(case)
    one = torch.ones((), dtype=case.dtype, device=DEVICE)
    problem.grad_out, problem.grad_lse = one.expand(problem.grad_out.shape), one.float().expand(1, 2, 70)
    check(kernels, case, problem)


# --- Values -----------------------------------------------------------------------------------------------------------

MAGNITUDES = ("large", "one dominant key", "strongly negative", "constant rows", "very large")


def check_magnitude(kernels: str, kind: str, case: Case) -> None:
    case = replace(case, magnitude={"large": 30.0, "very large": 300.0}.get(kind, 1.0))
    problem = make_problem(case)
    if kind == "one dominant key":
        problem.key[:, :, 40] *= 40
    elif kind == "strongly negative":  # all scores are near -1000: exp underflows unless the maximum is subtracted
        problem.query[..., 0], problem.key[..., 0] = 64.0, -64.0
    elif kind == "constant rows":
        problem.key[:] = problem.key[:, :, :1].clone()
    check(kernels, case, problem)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [*(("sm_80", dtype) for dtype in DTYPES), pytest.param("triton", DTYPES[0], marks=pytest.mark.slow)],
    indirect=["kernels"],
    ids=str,
)
@pytest.mark.parametrize("kind", MAGNITUDES)
def test_magnitudes(kind: str, kernels: str, dtype: torch.dtype) -> None:
    shape = (1, 2, 1, 70, 100)
    if kernels == "triton":  # on few rows with huge scores, the composite's worst error is down to luck
        shape = Case().shape if "large" in kind else (1, 2, 1, 40, 50)
    check_magnitude(kernels, kind, Case(window=CAUSAL, shape=shape, dtype=dtype))


@pytest.mark.parametrize("kernels", ["sm_80", TRITON], indirect=True)
@pytest.mark.parametrize("softcap", [1e3, 1e5, 1e12], ids=str)
def test_a_large_softcap_changes_next_to_nothing(softcap: float, kernels: str) -> None:
    """1e12 is infinite in 16 bits, so the composite leaves out the softcap, which hardly changes its result."""
    case = Case(softcap=softcap, shape=(1, 2, 1, 20, 70), magnitude=4.0)
    check(kernels, case, measure=replace(case, softcap=0.0))


@on_triton_slowly
@each_dtype
def test_every_key_at_finfo_min(dtype: torch.dtype, kernels: str) -> None:
    """finfo.min is a number, no mask: a row of only finfo.min attends uniformly, and has a uniform row's gradient."""
    case = Case(mask="all min", mask_shape=(0, 0, 1, 1), dtype=dtype, shape=(1, 2, 1, 70, 80))
    problem = make_problem(case)
    found = run(kernels, case, problem, deterministic=False)
    for name, mean, bound in (
        ("out", problem.value.double().mean(2, keepdim=True), 1e-3),
        ("grad_value", problem.grad_out.double().sum(2, keepdim=True) / problem.key.shape[2], 2e-3),
    ):
        torch.testing.assert_close(found[name].double(), mean.expand_as(found[name]), atol=bound, rtol=bound)
    assert all(found[name].isfinite().all() for name in backward.GRADIENTS[:4])


# --- What has no influence --------------------------------------------------------------------------------------------


def check_that_masked_keys_have_no_influence(kernels: str, case: Case, poison: float) -> None:
    """Rows that see no poisoned key get the same results as without poison, and so do keys that only such rows see;
    rows that see a NaN key are NaN."""
    clean, spoiled = make_problem(case), make_problem(case)
    first = clean.key.shape[2] - 9
    for tensor in (spoiled.key, spoiled.value):
        tensor[:, :, first:] = poison
    position = torch.arange(case.shape[3], device=DEVICE)
    position = position if case.first_row == 0 else position + case.shape[4] - case.shape[3]
    unaffected = position + case.window[1] < first
    for problem in (clean, spoiled):  # rows that see a poisoned key send no gradient
        problem.grad_out[:, :, ~unaffected] = 0
    expected, found = (run(kernels, case, problem) for problem in (clean, spoiled))
    for name in ("out", "lse", "grad_query"):
        assert torch.equal(found[name][:, :, unaffected], expected[name][:, :, unaffected]), name
    if unaffected.all():
        backward.assert_equal(found, expected)
        return
    if poison != poison:
        assert bool(found["out"][:, :, ~unaffected].isnan().all() & found["lse"][:, :, ~unaffected].isnan().all())
    seen_from = position[~unaffected].min() - case.window[0] if case.window[0] >= 0 else 0
    alone = torch.arange(first, device=DEVICE) < seen_from
    for name in ("grad_key", "grad_value"):
        assert torch.equal(found[name][:, :, :first][:, :, alone], expected[name][:, :, :first][:, :, alone]), name


CASES_OF_MASKED_KEYS: dict[str, list[Case]] = {
    "sm_80": [
        Case(window=CAUSAL, shape=(1, 2, 1, 100, 100)),
        Case(window=(6, 2), shape=(1, 2, 2, 90, 100), sinks=True),
        Case(window=CAUSAL, shape=(1, 2, 1, 20, 150), head_dims=(64, 64), softcap=4.0),
        Case(window=CAUSAL, first_row=0, shape=(1, 2, 1, 70, 150), dropout=0.1),  # no row sees the poisoned keys
        Case(window=CAUSAL, first_row=0, shape=(1, 2, 1, 400, 256), head_dims=(128, 128)),  # the last rows see all keys
    ],
    "triton": [
        Case(window=CAUSAL, shape=(1, 2, 1, 50, 50)),
        Case(window=(6, 2), shape=(1, 2, 2, 50, 60), sinks=True, dtype=torch.bfloat16),
    ],
    "triton, its own tiles": [Case(window=CAUSAL, shape=(1, 2, 1, 20, 80))],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        (kernels, replace(case, dtype=dtype))
        for kernels, cases in CASES_OF_MASKED_KEYS.items()
        for case in cases
        for dtype in (DTYPES if kernels == "sm_80" else [case.dtype])
    ],
    indirect=["kernels"],
    ids=str,
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_masked_keys_have_no_influence(kernels: str, case: Case, poison: float) -> None:
    check_that_masked_keys_have_no_influence(kernels, case, poison)


def check_keys_hidden_by_a_mask(kernels: str, case: Case, poison: float) -> None:
    """Hides key 13 from all rows by a bool mask or an infinite bias, and poisons it."""
    clean, spoiled = make_problem(case), make_problem(case)
    for problem in (clean, spoiled):
        assert problem.bias is not None
        problem.bias[..., 13] = False if case.mask == "bool" else -torch.inf
    for tensor in (spoiled.key, spoiled.value):
        tensor[:, :, 13] = poison
    expected, found = (run(kernels, case, problem) for problem in (clean, spoiled))
    backward.assert_equal(found, expected)
    assert torch.count_nonzero(found["grad_key"][:, :, 13]) == torch.count_nonzero(found["grad_value"][:, :, 13]) == 0


@pytest.mark.parametrize("kernels", ["sm_80", TRITON], indirect=True)
@pytest.mark.parametrize("mask", ["bool", "inf"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_keys_hidden_by_a_mask_have_no_influence(mask: str, poison: float, kernels: str) -> None:
    changes: dict[str, Any] = {} if kernels == "triton" else {"dropout": 0.1}
    case = Case(mask=mask, mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 70, 80), **changes)
    check_keys_hidden_by_a_mask(kernels, case, poison)
