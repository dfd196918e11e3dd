"""Starves each warp of a CTA in turn: it runs only while nothing else can. Results must have the same bits, and no
access of another warp, copy or product may overtake it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import append_cases
import decode_cases
import fastattn
import int8_cases
from attention_cases import Case, make_problem, run_ops
from cuda_kernels import MARKS, NEEDS_HOPPER, checked, only_emulated
from fastattn.functional.int8_weight import Int8Weight
from kernel_device import ON_EMULATOR

if ON_EMULATOR:
    from emulator import device, launches

pytestmark = [*MARKS, only_emulated, NEEDS_HOPPER, pytest.mark.slow]

CAUSAL = (-1, 0)
MOST_WARPS = 16  # in a CTA


def attention(case: Case, *, nan_at: int | None = None) -> Callable[[], tuple[Tensor, ...]]:
    """Returns a call of forward and backward. ``nan_at`` is a key whose value is NaN; then the call is forward only."""

    def run() -> tuple[Tensor, ...]:
        problem = make_problem(case)
        if nan_at is not None:
            problem.value[..., nan_at, :] = torch.nan
            with fastattn.use_backend("cuda"), torch.no_grad():
                return (fastattn.attention(problem.query, problem.key, problem.value, window=case.window),)
        return tuple(run_ops(torch.ops.fastattn, case, problem).values())

    return run


def decoding(case: decode_cases.Case) -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        arguments = decode_cases.op_arguments(case, decode_cases.make_arguments(case))
        return tuple(torch.ops.fastattn.attention_decode(**arguments))

    return run


def int8(m: int, granularity: str | int, precision: str = "16bit") -> Callable[[], tuple[Tensor, ...]]:
    def run() -> tuple[Tensor, ...]:
        weight, scale = int8_cases.quantised(264, 400 if granularity == "channel" else 384, granularity)
        x = int8_cases.normal(m, weight.shape[1], seed=1).requires_grad_()
        with fastattn.use_backend("cuda"):
            out = fastattn.int8_linear(x, Int8Weight(weight, scale, granularity), input_precision=precision)
        if precision == "int8":
            return (out.detach(),)
        return out.detach(), *torch.autograd.grad(out, x, int8_cases.normal(*out.shape, seed=2))

    return run


def appending() -> tuple[Tensor, ...]:
    arguments = append_cases.make_arguments(append_cases.Case("append", dims=(64, 72), int8=True, absent=(-1, 80)))
    with fastattn.use_backend("cuda"):
        fastattn.append_to_cache(**arguments)
    return tuple(arguments[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale"))


LONG = (1, 2, 2, 400, 500)
CALLS = {
    **{
        f"attention {dims}": attention(Case(window=CAUSAL, shape=(1, 2, 2, 200, 300), head_dims=dims, sinks=True))
        for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    },
    **{
        f"attention {dims} with a bias": attention(
            Case(mask="float", shape=(1, 2, 2, 200, 300), head_dims=(dims, dims))
        )
        for dims in (64, 128, 256)
    },
    **{
        f"ranges of keys {dims}": attention(Case(ranges=2, shape=(1, 2, 2, 200, 300), head_dims=(dims, dims)))
        for dims in (64, 128)
    },
    "packed": attention(Case(lengths=((70, 130), (150, 200)), window=(60, 5), head_dims=(128, 128))),
    **{
        f"NaN {dim}": attention(Case(window=CAUSAL, shape=LONG, head_dims=(dim, dim)), nan_at=350)
        for dim in (64, 128, 256)
    },
    "decode": decoding(decode_cases.Case("16 bits", dims=(128, 128), lengths=(300, 5, 448), capacity=448, splits=3)),
    "decode int8": decoding(
        decode_cases.Case("int8", dims=(64, 64), int8=True, new=2, queries=2, page_size=16, capacity=208)
    ),
    "append": appending,
    "int8 few tokens": int8(5, "channel"),
    "int8": int8(150, "channel"),
    "int8 groups": int8(150, 64),
    "int8 activations": int8(150, "channel", "int8"),
}


@functools.cache
def punctual(call: str, arch: int) -> tuple[tuple[Tensor, ...], int]:
    """Returns the results of a call without a late warp, and the number of warps in its largest CTA."""
    with device.emulated(arch, num_sms=2), checked(), launches.recorded() as found:
        results = CALLS[call]()
    return results, max(math.prod(launched.block) for launched in found) // 32


# Each call is a group of its own, so that processes and parts of `--rest` divide the many cases.
@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("warp", range(MOST_WARPS))
@pytest.mark.parametrize("call", [pytest.param(call, marks=pytest.mark.xdist_group(call)) for call in CALLS])
def test_a_late_warp_changes_nothing(call: str, warp: int, arch: int) -> None:
    expected, num_warps = punctual(call, arch)
    if warp >= num_warps:
        pytest.skip(f"CTAs have at most {num_warps} warps")
    with device.emulated(arch, num_sms=2), checked(starved_warp=warp, seed=warp):
        found = CALLS[call]()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
