"""Tests the order in which backward kernels sum gradients to which several CTAs add. Deterministic kernels have one
order, which the emulator checks (``ordered_sums``). A planted fault that allows other orders is found at every seed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import test_cuda_attention_backward as backward
from attention_cases import Case
from cuda_kernels import MARKS, only_emulated
from kernel_device import ON_EMULATOR
from turns import in_turn

if ON_EMULATOR:
    from emulator import EmulatorError, cuda_runtime, device

pytestmark = [*MARKS, only_emulated]

SEEDS = range(3)
CAUSAL = (-1, 0)
KERNELS = "attention_backward_key_value"  # all kernels for dK and dV, which also sum dQ
# All have more than one tile of keys.
HEAD_DIMS = {80: (32, 64, 128, 256), 90: (64, 128, 192, 256)}
EACH = [(arch, head_dim) for arch, head_dims in HEAD_DIMS.items() for head_dim in head_dims]
each_kernel = pytest.mark.parametrize(("arch", "head_dim"), EACH, ids=[f"sm{arch}-{dim}" for arch, dim in EACH])


SHAPES = [(1, (-1, -1)), (2, CAUSAL), (1, CAUSAL), (2, (-1, -1))]  # query heads of a KV head, window


# If the other CTAs begin late, one CTA may sum all of a head's few key tiles, in a fixed order: with 300 keys of 128
# dims it did so for 7 of 100 seeds, with 600 keys for none.
MANY_KEYS = 600


def case_of(head_dim: int, group: int = 1, window: tuple[int, int] = (-1, -1), keys: int = 300) -> Case:
    return Case(shape=(1, 2, group, 150, keys), head_dims=(head_dim, head_dim), window=window)


@contextlib.contextmanager
def any_order_is_found(seed: int) -> Iterator[None]:
    with pytest.raises(EmulatorError) as caught:
        yield
    error = caught.value
    assert error.kind == "race" and "the order of the sum is not fixed" in str(error), (seed, error)


@pytest.mark.parametrize(("arch", "head_dim", "shape"), in_turn(EACH, SHAPES, each=2), ids=str)
def test_deterministic_gradients_are_added_up_in_one_order(
    arch: int, head_dim: int, shape: tuple[int, tuple[int, int]]
) -> None:
    with device.emulated(arch):
        backward.check(case_of(head_dim, *shape), deterministic=True, ordered_sums=True, seed=head_dim)


@pytest.mark.slow
@each_kernel
def test_other_gradients_are_added_up_in_any_order(arch: int, head_dim: int) -> None:
    with device.emulated(arch):
        for seed in SEEDS:
            with any_order_is_found(seed):
                backward.run(case_of(head_dim, keys=MANY_KEYS), ordered_sums=True, seed=seed)


FAULTS = {
    "no release": ("red.release.gpu.global.add.s32", "red.relaxed.gpu.global.add.s32"),
    "no acquire": ("ld.acquire.gpu.global.s32", "ld.relaxed.gpu.global.s32"),
    "no wait until it is written": ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
    "no wait": ("cp.async.bulk.wait_group 0;", ""),
}
ON_HOPPER = [(arch, head_dim) for arch, head_dim in EACH if arch == 90]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim", "fault"),
    [*in_turn(EACH, list(FAULTS)[:2]), *in_turn(ON_HOPPER, list(FAULTS)[2:])],
)
def test_an_order_that_a_fault_opens_is_found(arch: int, head_dim: int, fault: str) -> None:
    with device.emulated(arch), cuda_runtime.replaced(*FAULTS[fault], KERNELS):
        for seed in SEEDS:
            with any_order_is_found(seed):
                backward.run(case_of(head_dim, keys=MANY_KEYS), deterministic=True, seed=seed)
