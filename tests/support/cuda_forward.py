"""Runs the forward operator of the CUDA C++ attention kernels with the emulator's checks, and compares it with the
oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention_cases import Case, Problem, compare, forward_arguments, make_problem
from cuda_kernels import EMULATED, checked

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import launches

CAUSAL = (-1, 0)


def run(case: Case, problem: Problem | None = None, **launching: Any) -> dict[str, Tensor]:
    """Returns output and lse. ``launching``: other options of launches."""
    arguments = forward_arguments(case, problem or make_problem(case))
    with checked(**launching):
        out, lse, _ = torch.ops.fastattn.attention_forward(*arguments)
    return {"out": out, "lse": lse}


def check(case: Case, kernel: str = "", **launching: Any) -> None:
    """Compares output and lse with the oracle. On the emulator, ``kernel`` must have run if there are rows."""
    if EMULATED:
        with launches.recorded() as found:
            result = run(case, **launching)
        has_rows = case.shape[3] > 0 if case.lengths is None else sum(case.lengths[0]) > 0
        assert not kernel or [kernel in launched.report.kernel for launched in found] == [True] * has_rows
    else:
        result = run(case)
    compare(case, make_problem(case), result, names=("out", "lse"))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
