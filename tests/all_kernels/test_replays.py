"""Replays a launch with the same launch ID in the same memory, as a CUDA graph does: each replay does all work again.

Kernels whose CTAs pass results to each other count arrivals in memory that nobody zeroes (scheduler/arrivals.cuh). If a
launch left its counts behind, a replay would find them and not write its result. A replay also decides again whatever
depends on lengths in device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attention_cases as attention
from cuda_kernels import EMULATED, MARKS, checked, only_emulated
from decode_cases import Case, make_arguments, op_arguments
from int8_cases import normal, quantised
from kernel_device import DEVICE
from shared_keys import each_architecture, emulated, merges
from turns import in_turn

if EMULATED:
    from emulator import cuda_runtime, device, launches, options

pytestmark = MARKS

RUNS = 3
Results = Callable[[], tuple[Tensor, ...]]


def decode(**changes: Any) -> Results:
    case = Case("replay", (2100, 300), (2, 1), dims=(16, 16), capacity=2112, sinks=True, **changes)
    arguments = op_arguments(case, make_arguments(case))
    return lambda: torch.ops.fastattn.attention_decode(**arguments)


def matmul(int8_activations: bool) -> Results:
    """Returns a call whose CTAs split tiles along K (stream-K)."""
    x, (weight, scale) = normal(40, 1600, seed=1), quantised(72, 1600, "channel")
    return lambda: (torch.ops.fastattn.int8_matmul(x, weight, scale, None, None, "none", int8_activations),)


def grad_input() -> Results:
    """Returns a call that also computes the gradient of a bias, summed over tiles of tokens."""
    grad_out, (weight, scale) = normal(300, 680, seed=2), quantised(680, 272, "channel")
    return lambda: torch.ops.fastattn.int8_matmul_grad_input(grad_out, weight, scale, True)


# A function that makes the call, and the number of SMs.
CALLS: dict[str, tuple[Callable[[], Results], int]] = {
    "decode": (decode, 3),
    "decode, splits": (partial(decode, splits=20), 3),
    "decode, batch-invariant": (partial(decode, batch_invariant=True), 2),
    "int8 matmul": (partial(matmul, False), 3),
    "int8 matmul, int8 activations": (partial(matmul, True), 3),
    "gradient of the input and a bias": (grad_input, 8),
}


def stored(launched: Any) -> int:
    """Returns the bytes of results stored: 8 per store. Partials have 16 per store, and their number varies."""
    return sum(row.global_bytes for row in launched.report.rows if row.opcode == "st.global.v2.u32")


@only_emulated
@pytest.mark.parametrize("name", CALLS)
def test_a_replay_does_all_again(name: str) -> None:
    make, num_sms = CALLS[name]
    call = make()
    with device.emulated(90, num_sms=num_sms), checked():
        expected = call()
        with cuda_runtime.replaying(RUNS), launches.recorded() as found:
            results = call()
    assert len(found) == RUNS and stored(found[0]) > 0
    assert all(stored(launched) == stored(found[0]) for launched in found)
    assert any(row.opcode.startswith("atom") for row in found[0].report.rows)  # CTAs have combined partials
    for result, once in zip(results, expected, strict=True):
        assert torch.equal(result, once)


@only_emulated
@pytest.mark.parametrize("seed", [1, 3, 10])  # decides the order of the racing accesses
def test_a_launch_that_leaves_its_counts_is_found(seed: int) -> None:
    """Plants a fault: the last CTA leaves the count that it found instead of zero. In the replay the first CTA then
    takes itself for the last, and reads what others still write: a race."""
    make, num_sms = CALLS["decode, splits"]
    call = make()
    with (
        device.emulated(90, num_sms=num_sms),
        options.launching(seed=seed),
        cuda_runtime.replaying(RUNS),
        launches.recorded() as found,
    ):
        call()
        lines = found[0].ptx.splitlines()
        counting = next(i for i, line in enumerate(lines) if "atom.acq_rel.gpu.global.add" in line)
        count = lines[counting].split("add.u64")[1].split(",")[0].strip()
        zero = next(line for line in lines[counting:] if "st.global.u64" in line)
        with (
            cuda_runtime.replaced(zero, zero.replace(zero.rstrip(";").split(",")[1], f" {count}")),
            pytest.raises(RuntimeError, match=r"race: .* is not ordered with the (read|write)"),
        ):
            call()


# --- Lengths that change between replays ------------------------------------------------------------------------------

Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # lengths of queries, lengths of keys
# A sequence of 1900 keys or more is split among CTAs.
LONG = (40, 30, 20), (2000, 300, 100)
LATER_LONG = (7, 1, 82), (1, 399, 1900)
SHORT = (40, 30, 20), (250, 200, 190)
NO_KEYS = (50, 0, 40), (0, 300, 0)


def replayed(call: Results, load: Callable[[Lengths], None], replays: tuple[Lengths, ...]) -> tuple[Tensor, ...]:
    """Returns the results after a run with each of the lengths, of one launch or of a CUDA graph that contains it."""
    load(replays[0])
    if EMULATED:
        upcoming = iter(replays[1:])

        def load_next(launched: Any) -> None:
            if "outside_rows" not in launched.report.kernel:  # that kernel's own replays come first
                load(next(upcoming, replays[-1]))

        with (
            cuda_runtime.replaying(len(replays)),
            launches.recorded() as found,
            launches.told(load_next),
        ):
            results = call()
        assert [merges([launched]) > 0 for launched in found] == [each in (LONG, LATER_LONG) for each in replays]
        return results
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for lengths in replays:
        load(lengths)
        graph.replay()
    return results


REPLAYS = {
    "cut, then whole": (LONG, SHORT),
    "whole, then cut": (SHORT, LONG),
    "cut elsewhere": (LONG, LATER_LONG),
    "no keys between": (LATER_LONG, NO_KEYS, LONG),
}


@each_architecture
@pytest.mark.parametrize(("name", "softcap"), in_turn([(name,) for name in REPLAYS], [0.0, 3.0]))
def test_lengths_that_change_between_replays(name: str, softcap: float, architecture: int) -> None:
    """Replays split keys or not, in the same memory; the last result equals that of a launch of its own."""
    replays = REPLAYS[name]
    case = attention.Case(
        lengths=((90,), (2400,)), shape=(1, 2, 1, 0, 0), head_dims=(64, 64), window=(-1, 0), softcap=softcap, seed=21
    )
    problem = attention.make_problem(case)
    problem.cu_seqlens_q, problem.cu_seqlens_k = (torch.empty(4, dtype=torch.int32, device=DEVICE) for _ in range(2))
    problem.max_seqlens = (90, 2000)
    arguments = attention.forward_arguments(case, problem)

    def call() -> tuple[Tensor, ...]:
        return torch.ops.fastattn.attention_forward(*arguments)[:2]

    def load(lengths: Lengths) -> None:
        problem.cu_seqlens_q.copy_(attention.offsets(lengths[0]))
        problem.cu_seqlens_k.copy_(attention.offsets(lengths[1]))

    with emulated(architecture, num_sms=12), checked(seed=len(replays)):
        load(replays[-1])
        expected = call()
        results = replayed(call, load, replays)
    for result, once in zip(results, expected, strict=True):
        assert torch.equal(result, once)
    attention.compare(case, problem, dict(zip(("out", "lse"), results, strict=True)), names=("out", "lse"))
