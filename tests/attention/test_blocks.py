"""Tests attention over a block of a larger call. The operators take the positions of the block's first row, key and
head, return the output in float32, and add gradients to given float32 sums. The kernels are CUDA C++ for sm_80 and for
Hopper, and Triton, on an emulated GPU or on the real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_cases import (
    RESULTS,
    SEED,
    Case,
    Problem,
    backward_arguments,
    compare,
    forward_arguments,
    make_problem,
    placed,
    run_ops,
    use_small_tiles,
)
from cuda_kernels import EMULATED, HAS_KERNELS, NO_KERNELS, checked
from fastattn import reference
from fastattn.distributed import merge_attention
from kernel_device import DEVICE

if EMULATED:
    from emulator import device

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("emulated_gpu", "tracked_tensors"),
    pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS),
]

ARCHITECTURES = (80, 90) if EMULATED else (None,)
KERNELS = [*((f"cuda {arch}" if arch else "cuda") for arch in ARCHITECTURES), "triton"]
each_kernel = pytest.mark.parametrize("kernel", KERNELS)
# Callers of Triton's operators check the arguments.
each_checking_kernel = pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "triton"])
CAUSAL = (-1, 0)

PLACES = [
    Case(window=CAUSAL, shape=(1, 2, 1, 100, 130), first_row=64, first_key=96),  # rows before the first key
    Case(window=CAUSAL, shape=(1, 2, 1, 100, 130), first_row=300, first_key=96),  # all rows after the last key
    Case(window=CAUSAL, shape=(1, 2, 1, 40, 130), first_row=0, first_key=40),  # no row sees a key
    Case(window=(90, 9), shape=(2, 4, 2, 90, 200), first_row=150, first_key=36),
    Case(window=(300, -1), shape=(1, 2, 1, 70, 90), first_row=340, first_key=0),  # wider than both lengths together
    Case(window=(-1, 500), shape=(1, 2, 1, 70, 90), first_row=0, first_key=540),
    Case(alibi="batch", shape=(2, 2, 1, 70, 90), first_row=200, first_key=31, grad_lse=True),
    Case(alibi="head", window=(60, 60), shape=(1, 2, 2, 70, 150), first_row=8, first_key=0, softcap=5.0),
    Case(dropout=0.3, shape=(2, 2, 1, 70, 90), first_row=1001, first_key=2004, first_head=5),
    Case(dropout=0.3, window=(80, 0), shape=(1, 2, 1, 100, 90), first_row=131, first_key=100, first_head=1),
    Case(window=(20, 3), lengths=((30, 70), (90, 40)), shape=(1, 2, 1, 0, 0), first_row=25, first_key=10),
]


@contextlib.contextmanager
def launching(kernel: str, monkeypatch: Any, num_sms: int = 3) -> Iterator[Any]:
    """Yields the operators of a kernel, on the GPU that the kernel is for."""
    if kernel == "triton":
        use_small_tiles(monkeypatch)
        yield torch.ops.fastattn_triton
    elif kernel == "cuda":
        yield torch.ops.fastattn
    else:
        with device.emulated(int(kernel.removeprefix("cuda ")), num_sms=num_sms), checked():
            yield torch.ops.fastattn


def add_arguments(case: Case, problem: Problem, sums: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> tuple[Any, ...]:
    """Returns the arguments of ``attention_backward_add``: those of ``attention_backward`` without bias and sinks."""
    given = backward_arguments(case, problem, out, lse)
    without_bias_and_sinks = (*given[:7], given[8], *given[10:-2])
    return (*sums, *without_bias_and_sinks, case.alibi != "")


@pytest.mark.parametrize("alibi", ["", "head"])
@pytest.mark.parametrize("namespace", ["fastattn", "fastattn_triton"])
def test_gradients_are_added_to_fake_tensors_too(namespace: str, alibi: str) -> None:
    case = Case(head_dims=(64, 64), shape=(1, 2, 2, 30, 40), alibi=alibi)
    problem = make_problem(case)
    sums = tuple(torch.zeros_like(t, dtype=torch.float32) for t in (problem.query, problem.key, problem.value))
    arguments = add_arguments(case, problem, sums, problem.grad_out, torch.zeros(1, 2, 30, device=DEVICE))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(given) if isinstance(given, Tensor) else given for given in arguments]
        grad_slopes = getattr(torch.ops, namespace).attention_backward_add(*fake)
    assert grad_slopes.shape == ((0,) if problem.alibi_slopes is None else problem.alibi_slopes.shape)


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize("case", PLACES, ids=str)
def test_results_and_gradients(kernel: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(case, head_dims=(64, 64) if kernel != "triton" else (16, 16), small_tile=False)
    problem = make_problem(case)
    with launching(kernel, monkeypatch) as ops:
        compare(case, problem, run_ops(ops, case, problem))


@each_kernel
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_key_that_only_rows_after_the_last_would_see_has_no_influence(
    kernel: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key 105 is NaN. Row 105, which would see it, does not exist, but lies in the last tile of rows."""
    dim = 16 if kernel == "triton" else head_dim
    case = Case(head_dims=(dim, dim), shape=(1, 2, 1, 100, 200), window=CAUSAL, first_row=0, small_tile=False)
    clean, spoiled = make_problem(case), make_problem(case)
    for tensor in (spoiled.key, spoiled.value):
        tensor[:, :, 105] = torch.nan
    with launching(kernel, monkeypatch) as ops:
        expected, found = (run_ops(ops, case, problem) for problem in (clean, spoiled))
    for name in RESULTS[:5]:
        assert torch.equal(found[name], expected[name]), name
    assert torch.count_nonzero(found["grad_key"][:, :, 105]) == torch.count_nonzero(found["grad_value"][:, :, 105]) == 0


EXACT = [
    Case(head_dims=(64, 64), shape=(1, 2, 2, 150, 200), window=CAUSAL),
    Case(head_dims=(128, 96), shape=(1, 2, 1, 70, 90), softcap=4.0, dropout=0.2, dtype=torch.bfloat16),
    Case(head_dims=(256, 256), shape=(1, 2, 1, 70, 90), layout="bshd"),
    Case(head_dims=(192, 192), shape=(1, 2, 1, 70, 90), softcap=4.0),
    Case(head_dims=(40, 24), shape=(1, 2, 1, 33, 900)),  # keys are split
    Case(head_dims=(64, 64), shape=(1, 2, 1, 700, 300), alibi="head"),  # rows are split too
    Case(head_dims=(128, 128), shape=(1, 4, 4, 700, 200)),
    Case(head_dims=(64, 64), lengths=((30, 0, 70), (90, 50, 40)), shape=(1, 4, 2, 0, 0)),
]
ONE_PATH = EXACT[:2] + EXACT[-1:]  # the other cases take other paths of CUDA C++ kernels only


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(kernel, case) for kernel in KERNELS for case in (ONE_PATH if kernel == "triton" else EXACT)],
    ids=str,
)
def test_rounded_once_they_are_what_the_rounding_operators_give(
    kernel: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding float32 results, or float32 sums that started at zero, gives the bits of the rounding operators."""
    problem = make_problem(case)
    generator = torch.Generator().manual_seed(case.shape[3])
    with launching(kernel, monkeypatch, num_sms=13) as ops:
        rounded = run_ops(ops, case, problem)
        out, lse, _ = ops.attention_forward(*forward_arguments(case, problem), None, True, False, True)
        batch_invariant, *_ = ops.attention_forward(*forward_arguments(case, problem), None, True)
        shared, *_ = ops.attention_forward(*forward_arguments(case, problem), None, False, False, True)
        sums = [torch.zeros_like(t, dtype=torch.float32) for t in (problem.query, problem.key, problem.value)]
        arguments = rounded["out"], rounded["lse"]
        grad_slopes = ops.attention_backward_add(*add_arguments(case, problem, tuple(sums), *arguments))
        before = [torch.randn(t.shape, generator=generator).to(DEVICE) for t in sums]
        added = [start.clone() for start in before]
        ops.attention_backward_add(*add_arguments(case, problem, tuple(added), *arguments))
    assert out.dtype == shared.dtype == torch.float32
    assert torch.equal(out.to(case.dtype), batch_invariant)
    assert torch.equal(shared.to(case.dtype), rounded["out"])
    assert not torch.equal(out, batch_invariant.float())
    assert torch.equal(lse, rounded["lse"]) or kernel != "triton"
    for name, total, start, start_and_total in zip(RESULTS[2:5], sums, before, added, strict=True):
        assert torch.equal(total.to(case.dtype), rounded[name]), name
        torch.testing.assert_close(start_and_total, start + total, rtol=1e-6, atol=1e-6)
    if case.alibi:
        assert torch.equal(grad_slopes, rounded["grad_slopes"])


def test_blocks_of_the_reference_are_the_whole() -> None:
    """Blocks that begin anywhere, merged, equal one call: windows, ALiBi and dropout depend on positions."""
    generator = torch.Generator().manual_seed(7)
    query, key, value = (torch.randn(2, 4, 37, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    slopes = torch.rand(4, dtype=torch.float64, generator=generator)
    options: dict[str, Any] = {"window": (9, 4), "alibi_slopes": slopes, "softcap": 3.0}
    whole, whole_lse = reference.attention(query, key, value, **options)
    for first_row, end_row in ((0, 11), (11, 30), (30, 37)):
        rows = query[:, :, first_row:end_row]
        out, lse = torch.zeros_like(rows), torch.full(rows.shape[:3], -torch.inf, dtype=torch.float64)
        for first_key, end_key in ((0, 5), (5, 29), (29, 37)):
            part = (key[:, :, first_key:end_key], value[:, :, first_key:end_key])
            found = reference.attention(rows, *part, **options, **placed((first_row, first_key, 0)))
            out, lse = merge_attention(out, lse, *found)
        torch.testing.assert_close(out, whole[:, :, first_row:end_row], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse, whole_lse[:, :, first_row:end_row], rtol=1e-12, atol=1e-12)


def test_dropout_of_a_block_is_a_block_of_dropout() -> None:
    sizes = (1, 6, 50, 61)
    whole = reference.dropout.dropout_keep(SEED, 0.4, *sizes, torch.device("cpu"))
    part = reference.dropout.dropout_keep(SEED, 0.4, 1, 2, 20, 30, torch.device("cpu"), origin=(17, 22, 3))
    assert torch.equal(part, whole[:, 3:5, 17:37, 22:52])


@each_checking_kernel
def test_refused_places(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with launching(kernel, monkeypatch) as ops:
        for wrong, message in (
            ({"first_key": 2, "dropout": 0.1}, "first_key must be a multiple of 4 with dropout, got 2"),
            ({"first_row": -1}, "first_row must be from 0 to 2147483647 - 33, got -1"),
            ({"first_head": 2**31}, "first_head must be from 0 to 2147483647 - 2, got 2147483648"),
        ):
            case = replace(Case(head_dims=(64, 64), first_row=0), **wrong)
            with pytest.raises(RuntimeError, match=message):
                ops.attention_forward(*forward_arguments(case, make_problem(case)))


@each_checking_kernel
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda sum: sum.half(), "grad_key must be float32, got float16"),
        (lambda sum: sum[:, :, 1:], r"grad_key must have shape \[1, 2, 47, 64\], got \[1, 2, 46, 64\]"),
        (lambda sum: torch.zeros(1, 2, 47, 65, device=DEVICE)[..., 1:], "grad_key is added to"),
    ],
)
def test_refused_sums(kernel: str, wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(head_dims=(64, 64))
    problem = make_problem(case)
    with launching(kernel, monkeypatch) as ops:
        out, lse, _ = ops.attention_forward(*forward_arguments(case, problem))
        sums = [torch.zeros_like(t, dtype=torch.float32) for t in (problem.query, problem.key, problem.value)]
        sums[1] = wrong(sums[1])
        with pytest.raises(RuntimeError, match=message):
            ops.attention_backward_add(*add_arguments(case, problem, tuple(sums), out, lse))
