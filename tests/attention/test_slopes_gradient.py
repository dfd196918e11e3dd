"""Tests the gradient of ALiBi slopes in CUDA C++ and in Triton, with every other option of scores.

It runs on a GPU if there is one, else on the emulator, with all of its checks.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_cases
import fastattn
import proof
from attention_cases import (
    Case,
    Problem,
    backward_arguments,
    forward_arguments,
    make_problem,
    run_ops,
    run_public,
    run_reference,
    slopes_error,
)
from cuda_kernels import EMULATED, HAS_KERNELS, IS_HOPPER, NO_KERNELS, checked, only_emulated
from fastattn import native
from kernel_device import DEVICE

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import device, launches

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("emulated_gpu", "tracked_tensors"),
    pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS),
]

CAUSAL = (-1, 0)
each_backend = pytest.mark.parametrize("backend", ["cuda", "triton"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_cases.use_small_tiles(monkeypatch)


def run(backend: str, case: Case, problem: Problem | None = None, **launching: Any) -> dict[str, Tensor]:
    ops = torch.ops.fastattn if backend == "cuda" else torch.ops.fastattn_triton
    if backend == "triton":
        return run_ops(ops, case, problem or make_problem(case))
    with checked(**launching):
        return run_ops(ops, case, problem or make_problem(case))


def check(case: Case, problem: Problem, found: dict[str, Tensor]) -> None:
    assert problem.alibi_slopes is not None
    assert found["grad_slopes"].dtype == torch.float32 and found["grad_slopes"].shape == problem.alibi_slopes.shape
    oracle = run_reference(case, problem, torch.float64, torch.float64)["grad_slopes"]
    off = slopes_error(case, problem, found, oracle)
    assert off <= 5, f"{case}: {off:.1f} standard deviations"
    proof.compared()
    # The bound must be narrower than the gradients themselves: zeros must fail.
    assert slopes_error(case, problem, found | {"grad_slopes": torch.zeros_like(found["grad_slopes"])}, oracle) > 20


CASES = [
    Case(alibi="head", shape=(2, 2, 1, 141, 101)),
    Case(alibi="batch", shape=(2, 3, 3, 70, 133), window=CAUSAL, head_dims=(40, 24), dtype=torch.bfloat16),
    Case(alibi="batch", shape=(1, 2, 1, 133, 70), window=CAUSAL),  # the first rows see no key
    Case(alibi="head", shape=(1, 2, 2, 150, 140), window=(40, 9), softcap=2.0, sinks=True, dropout=0.3, grad_lse=True),
    Case(alibi="head", shape=(1, 2, 1, 65, 129), mask="inf", head_dims=(128, 72)),
    Case(alibi="head", shape=(2, 2, 1, 65, 65), mask="bool", mask_shape=(1, 0, 1, 1), window=(30, -1)),
    Case(alibi="head", lengths=((70, 0, 3, 129), (140, 5, 0, 70)), shape=(1, 2, 1, 1, 1)),
    Case(alibi="batch", lengths=((5, 130, 66), (64, 130, 90)), shape=(1, 4, 2, 1, 1), window=CAUSAL, dropout=0.2),
]


@pytest.mark.slow
@each_backend
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case, backend: str) -> None:
    problem = make_problem(case)
    check(case, problem, run(backend, case, problem))


@pytest.mark.skipif(not IS_HOPPER or "90a" not in native.BUILD["archs"], reason="needs kernels for sm_90a")
def test_on_hopper_too() -> None:
    case = replace(CASES[7], head_dims=(64, 64))
    problem = make_problem(case)
    with device.emulated(90, num_sms=3) if EMULATED else contextlib.nullcontext():
        check(case, problem, run("cuda", case, problem))


@each_backend
def test_slopes_of_zero_have_a_gradient_too(backend: str) -> None:
    case = Case(alibi="head", shape=(1, 2, 1, 40, 70), dtype=torch.bfloat16)
    problem = make_problem(case)
    problem.alibi_slopes = torch.zeros_like(problem.alibi_slopes)
    check(case, problem, run(backend, case, problem))


@each_backend
def test_what_no_row_sees_may_be_nan(backend: str) -> None:
    """The NaN keys are hidden by the window, in tiles that rows see."""
    case = Case(alibi="head", shape=(1, 2, 1, 70, 90), window=(-1, 0), first_row=0)
    problem = make_problem(case)
    problem.key[:, :, 70:] = problem.value[:, :, 70:] = 0.0
    expected = run(backend, case, problem)["grad_slopes"]
    problem.key[:, :, 70:] = problem.value[:, :, 70:] = torch.nan
    assert torch.equal(run(backend, case, problem)["grad_slopes"], expected)


@pytest.mark.slow
@each_backend
def test_no_keys_or_no_rows_leave_zeros(backend: str) -> None:
    for rows, keys in ((5, 0), (0, 5)):
        found = run(backend, Case(alibi="batch", shape=(2, 2, 1, rows, keys)))
        assert torch.equal(found["grad_slopes"].cpu(), torch.zeros(2, 2))


@only_emulated
def test_the_same_bits_in_every_launch() -> None:
    case = Case(alibi="head", shape=(2, 2, 1, 200, 140), window=CAUSAL)
    problem = make_problem(case)
    first, *others = (run("cuda", case, problem, seed=seed)["grad_slopes"] for seed in range(3))
    assert all(torch.equal(first, other) for other in others)


def launch_of(case: Case) -> Any:
    """Returns the emulator's report of the one launch of the CUDA C++ kernel."""
    with launches.recorded() as found:
        run("cuda", case)
    (report,) = (each.report for each in found if "attention_backward_slopes_sm80" in each.report.kernel)
    return report


@only_emulated
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_memory_without_conflicts(head_dim: int) -> None:
    report = launch_of(Case(alibi="head", shape=(1, 1, 1, 128, 128), head_dims=(head_dim, head_dim), window=CAUSAL))
    assert report.bank_conflicts == 0 and report.shared_bytes <= 99 * 1024 // 2


@only_emulated
def test_tiles_that_no_row_sees_are_not_visited() -> None:
    """With a window of 8 keys of 500, each row tile but the first sees two key tiles; each takes two products."""
    (work,) = launch_of(
        Case(alibi="head", window=(8, 0), shape=(1, 1, 1, 500, 500), head_dims=(64, 64))
    ).tensor_core.values()
    assert work.multiply_adds == 2 * 64**3 * (2 * 8 - 1)


@each_backend
def test_a_gradient_nobody_asked_for_is_not_computed(backend: str) -> None:
    query = make_problem(Case(alibi="head")).query
    slopes = torch.rand(2, device=DEVICE)
    for wanted in (False, True):
        leaf, given = query.clone().requires_grad_(), slopes.clone().requires_grad_(wanted)
        with fastattn.use_backend(backend), fastattn.record() as calls:
            fastattn.attention(leaf, leaf, leaf, alibi_slopes=given).sum().backward()
        kernels = next(call.kernel for call in calls if call.op == "attention backward")
        assert ("slopes" in kernels) is wanted and (given.grad is not None) is wanted


@pytest.mark.slow
@each_backend
def test_slopes_of_all_are_the_sum_of_those_of_each(backend: str) -> None:
    """The public function, slopes ``[Hq]`` and another dtype work, too."""
    case = Case(alibi="head", shape=(3, 2, 1, 30, 40), window=CAUSAL)
    problem = make_problem(case)
    of_all = run_public(case, problem, backend)["grad_slopes"]
    problem.alibi_slopes = problem.alibi_slopes.expand(3, -1).contiguous()
    of_each = run_public(replace(case, alibi="batch"), problem, backend)["grad_slopes"]
    torch.testing.assert_close(of_each.sum(0, keepdim=True), of_all, rtol=1e-5, atol=1e-4)
    half = problem.alibi_slopes[0].half().requires_grad_()
    with fastattn.use_backend(backend):
        out = fastattn.attention(problem.query, problem.key, problem.value, alibi_slopes=half)
    (found,) = torch.autograd.grad(out.float().sum(), half)
    assert found.dtype == torch.float16 and found.shape == (2,)


@pytest.mark.slow
@each_backend
def test_finite_differences(backend: str) -> None:
    """Compares with differences of a sum of 16-bit results, over a step that is large against their rounding."""
    case = Case(alibi="head", shape=(1, 2, 1, 60, 60), window=CAUSAL)
    problem = make_problem(case)
    slopes = torch.tensor([0.1, 0.3], device=DEVICE, requires_grad=True)

    def loss(given: Tensor) -> Tensor:
        out = fastattn.attention(
            problem.query, problem.key, problem.value, causal=True, alibi_slopes=given, softcap=5.0
        )
        return (out.double() * problem.grad_out.double()).sum((0, 2, 3))  # per head

    with fastattn.use_backend(backend):
        (found,) = torch.autograd.grad(loss(slopes).sum(), slopes)
        step = 0.01
        with torch.no_grad():
            differences = (loss(slopes + step) - loss(slopes - step)) / (2 * step)
    torch.testing.assert_close(found.double(), differences, rtol=0.05, atol=1.0)


@each_backend
def test_mapped_slopes(backend: str) -> None:
    case = Case(alibi="head", shape=(1, 2, 1, 20, 30))
    problem = make_problem(case)
    several = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def loss(slopes: Tensor) -> Tensor:
        return fastattn.attention(problem.query, problem.key, problem.value, alibi_slopes=slopes).float().sum()

    with fastattn.use_backend(backend):
        together = torch.vmap(torch.func.grad(loss))(several)
        alone = torch.stack([torch.func.grad(loss)(slopes) for slopes in several])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=str)
def test_opcheck(case: Case) -> None:
    problem = make_problem(case)
    out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    with checked():
        torch.library.opcheck(
            torch.ops.fastattn.attention_backward.default, backward_arguments(case, problem, out, lse)
        )
