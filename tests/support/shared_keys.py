"""Runs attention whose CTAs split the keys of a tile, and counts the merges of their partials."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Case, Problem, compare, forward_arguments, make_problem
from cuda_kernels import EMULATED, IS_HOPPER, checked

if EMULATED:
    from emulator import device, launches

MERGES = "atom.acq_rel.gpu.global.add.u64"

# On a GPU, tests of another architecture are skipped.
of_sm_80 = pytest.mark.skipif(IS_HOPPER and not EMULATED, reason="needs a GPU older than Hopper")
of_sm_90 = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
each_architecture = pytest.mark.parametrize(
    "architecture", [pytest.param(80, marks=of_sm_80), pytest.param(90, marks=of_sm_90)]
)


@contextlib.contextmanager
def emulated(architecture: int, num_sms: int) -> Iterator[list[Any]]:
    """Emulates a GPU with ``num_sms`` SMs and yields the launches. On a real GPU, it yields an empty list."""
    if not EMULATED:
        yield []
        return
    with device.emulated(architecture, num_sms=num_sms), launches.recorded() as found:
        yield found


def merges(found: list[Any]) -> int:
    """Returns how often a warp has counted partials that arrived."""
    return sum(launched.report.opcodes.get(MERGES, 0) for launched in found)


def run(
    case: Case, problem: Problem | None = None, batch_invariant: bool = False, **launching: Any
) -> dict[str, Tensor]:
    arguments = forward_arguments(case, problem or make_problem(case))
    with checked(**launching):
        out, lse, *_ = torch.ops.fastattn.attention_forward(*arguments, None, batch_invariant)
    return {"out": out, "lse": lse}


def check(case: Case, num_sms: int, is_cut: bool = True, architecture: int = 90, **launching: int) -> None:
    """Compares a run on ``num_sms`` SMs with the oracle; ``is_cut`` says whether keys must have been split."""
    with emulated(architecture, num_sms) as found:
        result = run(case, **launching)
    if EMULATED:
        (launched,) = found
        assert f"sm{architecture}" in launched.report.kernel
        assert (merges(found) > 0) == is_cut
    compare(case, make_problem(case), result, names=("out", "lse"))
