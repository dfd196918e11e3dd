"""Tests of nvcc's kernels with wgmma: loops with two groups in flight, and missing waits."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, Module
from emulator.nvcc_compile import compile_ptx, nvcc
from expected_errors import failing

pytestmark = pytest.mark.skipif(nvcc() is None, reason="needs nvcc")
SOURCE = Path(__file__).parent / "cuda" / "wgmma_kernels.cu"


@functools.cache
def ptx() -> str:
    return compile_ptx(SOURCE, "compute_90a")


def gemm(text: str, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the kernel's result and the right one, for integers whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (rows, 320), generator=generator).bfloat16() for rows in (128, 192))
    c = torch.full((128, 192), torch.nan)
    Module(text).launch("gemm", (2, 3), (128,), [a, b, c, 192, 320], shared_bytes=6 * 8192, seed=seed)
    return c, a.float() @ b.float().T


@pytest.mark.parametrize("seed", range(4))
def test_gemm(seed: int) -> None:
    out, expected = gemm(ptx(), seed)
    assert torch.equal(out, expected)


def attention(text: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = (torch.randn(128, 64, generator=generator) / 4).bfloat16()
    k, v = (torch.randn(320, 64, generator=generator).bfloat16() for _ in range(2))
    out = torch.full((128, 64), torch.nan)
    Module(text).launch("attention", (2,), (128,), [q, k, v, out, 5], shared_bytes=5 * 8192, seed=seed)
    scores = q.double() @ k.double().T * math.log(2)
    return out, (scores.softmax(1) @ v.double()).float()


@pytest.mark.parametrize("seed", range(4))
def test_attention(seed: int) -> None:
    out, expected = attention(ptx(), seed)
    torch.testing.assert_close(out, expected, rtol=0, atol=6e-3)  # P is rounded to bf16


def without(pattern: str, which: int) -> str:
    """Returns the PTX without the ``which``-th instruction that matches."""
    found = list(re.finditer(pattern, ptx()))[which]
    return ptx()[: found.start()] + ptx()[found.end() :]


KERNELS = {"gemm": gemm, "attention": attention}


def entry(name: str) -> tuple[int, int]:
    start = ptx().index(f".entry {name}(")
    return start, ptx().index("\n}", start)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("instruction", ["wgmma.wait_group.sync.aligned 0;", "wgmma.fence.sync.aligned;"])
def test_a_missing_instruction_is_found(name: str, instruction: str) -> None:
    """Checks one kernel without any of these instructions."""
    start, end = entry(name)
    text = ptx()[:start] + ptx()[start:end].replace(instruction, "") + ptx()[end:]
    with failing("wgmma") as caught:
        KERNELS[name](text, 0)
    assert caught.value.source is not None


def test_a_tile_overwritten_too_early_shows() -> None:
    """Checks that with two more groups in flight, three stages are too few for the gemm at some seed."""
    start, end = entry("gemm")
    body = ptx()[start:end].replace("wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 3;")
    text = ptx()[:start] + body + ptx()[end:]
    results = []
    for seed in range(6):
        try:
            results.append(torch.equal(*gemm(text, seed)))
        except EmulatorError as error:
            results.append(error.kind not in ("race", "proxy"))
    assert not all(results)
