"""Tests the variants of csrc/device/variants.h: the numbers of exponentials on the FMA pipe, and each build's code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from emulator import Module, static_facts
from emulator.nvcc_compile import compiled, nvcc
from emulator.static_facts import KernelFacts, exponentials_beside_products

pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc: see setup.py")

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FLAGS = ["-O3", "--expt-relaxed-constexpr"]


def powers(x: torch.Tensor) -> torch.Tensor:
    """Returns ``exp2_on_fma(x)``."""
    ptx = compiled(Path(__file__).with_name("exp2_on_fma.cu"), "ptx", ["-ptx", "-arch=compute_80", *FLAGS], [CSRC])
    y = torch.empty_like(x)
    Module(ptx.read_text()).launch("powers", (math.ceil(len(x) / 128),), (128,), (x, y, len(x)))
    return y


def test_the_relative_error_is_below_two_to_the_minus_18() -> None:
    x = torch.empty(4096).uniform_(-126, 127, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.arange(-126, 128.0), torch.arange(-126, 127) + 0.5, torch.tensor([-0.0, 1e-30])])
    exact = x.double().exp2()
    assert float(((powers(x).double() - exact) / exact).abs().max()) < 2**-18


def test_powers_past_a_floats_are_nothing_or_its_largest_and_nan_stays() -> None:
    low = powers(torch.tensor([-math.inf, -3e38, -1e4, -127.0, -126.5]))
    assert low[:4].tolist() == [0, 0, 0, 0] and 0 <= float(low[4]) < 2**-126
    assert powers(torch.tensor([math.inf, 3e38, 127.5, 127.0])).tolist() == [2.0**127] * 4
    assert math.isnan(powers(torch.tensor([math.nan])))


def built(instance: str, *defines: str) -> Iterable[KernelFacts]:
    """Returns the machine code of an instance's kernels for sm_90a."""
    flags = ["-cubin", "-arch=sm_90a", "-std=c++20", *FLAGS, *(f"-D{each}" for each in defines)]
    cubin = compiled(CSRC / "attention" / "instances" / instance, "cubin", flags, [CSRC])
    return static_facts.of_cubin(cubin.read_bytes()).values()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, exponentials, is_late",
    [("FASTATTN_EXP2_ON_FMA=3", 64, True), ("FASTATTN_WAITS_EARLY=1", 96, False)],
    ids=["exponentials on FMA", "early wait"],
)
def test_a_build_for_measurements_has_the_variant(variant: str, exponentials: int, is_late: bool) -> None:
    """The usual build has 96 exponentials in two steps, beside a product: test_hopper_kernels.py."""
    for kernel in built("forward_sm90.cu", "FASTATTN_HEAD_DIM=64", "FASTATTN_VALUE_DIM=64", variant):
        full = kernel.shortest_round(max(kernel.main_loops, key=min))
        assert full.count("MUFU.EX2") == exponentials
        assert (exponentials_beside_products(full) >= 0.9 * exponentials) == is_late
        assert kernel.local_in_loops == 0


@pytest.mark.slow
def test_a_build_for_measurements_adds_dq_from_registers() -> None:
    """In the usual build no consumer adds anything: test_hopper_backward.py."""
    defines = ("FASTATTN_HEAD_DIM=128", "FASTATTN_OPTIONS=false", "FASTATTN_DQ_FROM_REGISTERS=1")
    for kernel in built("backward_key_value_sm90.cu", *defines):
        additions = [opcode for opcode in kernel.instructions if opcode.startswith("REDG.E.ADD.F32x4")]
        assert len(additions) == 2 * 64 // 8  # in the loop and after it, 64 columns of dQ in blocks of 8
        assert kernel.local_in_loops == 0
