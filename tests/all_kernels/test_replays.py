"""A launch replayed with the same token in the same memory, as a CUDA graph does it: each replay does all again.

Kernels whose CTAs pass results to each other count arrivals in memory that nobody zeroes (csrc/device/arrivals.cuh). A
launch that left its counts behind would find them in the replay, and not write its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_kernels import EMULATED, MARKS, checked
from decode_cases import Case, make_arguments, op_arguments
from int8_cases import normal, quantised

if EMULATED:
    from emulator import cuda_runtime, device, launches

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="the emulator replays launches")]

RUNS = 3
Results = Callable[[], tuple[Tensor, ...]]


def decode(**changes: Any) -> Results:
    case = Case("replay", (2100, 300), (2, 1), dims=(16, 16), capacity=2112, sinks=True, **changes)
    arguments = op_arguments(case, make_arguments(case))
    return lambda: torch.ops.fastattn.attention_decode(**arguments)


def matmul(int8_activations: bool) -> Results:
    """Stream-K: CTAs share tiles."""
    x, (weight, scale) = normal(40, 1600, seed=1), quantised(72, 1600, "channel")
    return lambda: (torch.ops.fastattn.int8_matmul(x, weight, scale, None, None, "none", int8_activations),)


def grad_input() -> Results:
    """With the gradient of a bias, summed over tiles of tokens."""
    grad_out, (weight, scale) = normal(300, 680, seed=2), quantised(680, 272, "channel")
    return lambda: torch.ops.fastattn.int8_matmul_grad_input(grad_out, weight, scale, True)


# What makes the call, and how many multiprocessors share it.
CALLS: dict[str, tuple[Callable[[], Results], int]] = {
    "decode": (decode, 3),
    "decode, splits": (partial(decode, splits=20), 3),
    "decode, batch-invariant": (partial(decode, batch_invariant=True), 2),
    "int8 matmul": (partial(matmul, False), 3),
    "int8 matmul, int8 activations": (partial(matmul, True), 3),
    "gradient of the input and a bias": (grad_input, 8),
}


def stored(launched: Any) -> int:
    """Bytes that a run has stored of its results: 8 at a time. Parts are stored 16 at a time, some by chance."""
    return sum(row.global_bytes for row in launched.report.rows if row.opcode == "st.global.v2.u32")


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
    assert any(row.opcode.startswith("atom") for row in found[0].report.rows)  # CTAs have shared something
    for result, once in zip(results, expected, strict=True):
        assert torch.equal(result, once)


def test_a_launch_that_leaves_its_counts_is_found() -> None:
    """What the test above would see of a kernel whose last CTA leaves its count behind instead of zero."""
    make, num_sms = CALLS["decode, splits"]
    call = make()
    with device.emulated(90, num_sms=num_sms), cuda_runtime.replaying(RUNS), launches.recorded() as found:
        call()
        lines = found[0].ptx.splitlines()
        counting = next(i for i, line in enumerate(lines) if "atom.acq_rel.gpu.global.cas" in line)
        zero_or_count = next(line for line in reversed(lines[:counting]) if "selp.b64" in line and " 0, " in line)
        count = zero_or_count.split(",")[2].strip()
        found.clear()
        with cuda_runtime.replaced(zero_or_count, zero_or_count.replace(" 0, ", f" {count}, ")):
            call()
    assert stored(found[1]) != stored(found[0])
