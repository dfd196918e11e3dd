"""Tests the quantisation of tokens inside the matmul's launch, on the emulator: every bit equals the reference's, and
the queue of tokens works over launches that follow each other in one memory. A GPU runs it within the int8 matmul."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator import EmulatorError, Module, Report
from emulator.nvcc_compile import compiled, nvcc
from fastattn import reference

pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc: see setup.py")

BLOCK_M, THREADS = 16, 64
TOKEN = 0x123456789A000000
NAMES = {torch.float16: "quantize_f16", torch.bfloat16: "quantize_bf16"}
each_dtype = pytest.mark.parametrize("dtype", NAMES, ids=["f16", "bf16"])


@functools.cache
def compiled_module() -> Module:
    folder = Path(__file__).resolve().parent
    flags = ["-ptx", "-arch=compute_80", "-O3", "--expt-relaxed-constexpr"]  # the flags of setup.py
    return Module(compiled(folder / "quantize_tokens.cu", "ptx", flags, [folder.parents[1] / "csrc"]).read_text())


class Queue:
    """The memory of launches over ``rows`` tokens. ``counters`` hold random old numbers."""

    def __init__(self, rows: int, columns: int, copies: int = 3) -> None:
        self.tiles = -(-rows // BLOCK_M)
        self.q = torch.zeros(rows, columns, dtype=torch.int8)
        self.scale = torch.zeros(rows)
        self.counters = torch.randint(-(2**62), 2**62, (1 + self.tiles,))
        self.seen = torch.zeros(copies, rows, columns, dtype=torch.int8)

    def run(self, x: Tensor, seed: int = 0, num_sms: int = 2, module: Module | None = None, **changes: Any) -> Report:
        rows, columns = x.shape
        assert x.is_contiguous()
        args = (x.view(torch.int16), rows, columns, self.q, self.scale, self.counters, TOKEN, self.seen)
        grid = (self.tiles * self.seen.shape[0],)
        checks = {"seed": seed, "num_sms": num_sms, "uninitialised": True, **changes}
        return (module or compiled_module()).launch(NAMES[x.dtype], grid, (THREADS,), args, **checks)

    def check(self, x: Tensor, seed: int = 0, num_sms: int = 2) -> None:
        """Checks every bit, that all CTAs have seen it, and that the counters are left at zero."""
        self.run(x, seed, num_sms)
        q, scale = reference.quantize_rows(x)
        finite = x.isfinite().all(-1)
        assert torch.equal(self.q[finite], q[finite]) and torch.equal(self.scale[finite], scale[finite])
        assert bool(self.scale[~finite].isnan().all())
        assert bool((self.seen == self.q).all())
        assert bool((self.counters == 0).all())


def check(x: Tensor, seed: int = 0) -> None:
    Queue(*x.shape).check(x, seed)


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@each_dtype
@pytest.mark.parametrize("rows, columns", [(1, 16), (5, 528), (16, 144), (17, 1040), (40, 64)])
def test_bits(rows: int, columns: int, dtype: torch.dtype) -> None:
    check(normal(rows, columns, seed=rows, dtype=dtype), seed=columns)


@each_dtype
@pytest.mark.parametrize("rows", [511, 512, 531])
def test_many_tokens_are_a_warps(rows: int, dtype: torch.dtype) -> None:
    """From 512 tokens on, each warp quantises tokens of its own, even where the last few are fewer than the warps."""
    check(normal(rows, 272, seed=rows, dtype=dtype), seed=rows)


@each_dtype
def test_sizes_of_numbers(dtype: torch.dtype) -> None:
    """Rows range from the smallest subnormal numbers to the largest; numbers within a row differ, too."""
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    exponents = torch.linspace(torch.tensor(tiny).log2().item() - 5, torch.tensor(largest).log2().item() - 2, 48)
    rows = torch.rand(48, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    x = rows * 2.0 ** exponents.double()[:, None]
    x[:, ::7] *= 0.005  # about half a unit
    check(x.to(dtype))


@each_dtype
def test_ties_go_to_even(dtype: torch.dtype) -> None:
    """The scale is a power of two, so halves are exact ties."""
    halves = torch.arange(-254, 255, dtype=torch.float64) / 2  # exact in both dtypes up to 127
    x = torch.zeros(6, 512, dtype=torch.float64)
    x[:, : len(halves)] = halves * 2.0 ** torch.tensor([-9, -3, 0, 1, 5, 8])[:, None]
    check(x.to(dtype))


@each_dtype
def test_zeros_and_what_is_not_finite(dtype: torch.dtype) -> None:
    x = normal(8, 64, seed=3, dtype=dtype)
    x[1] = 0.0
    x[2] = -0.0
    x[3, 5] = torch.inf
    x[4, 63] = -torch.inf
    x[5, 0] = torch.nan
    x[6, 0], x[6, 1] = torch.nan, torch.inf
    check(x)


def test_all_pairs_of_a_number_and_a_largest_one() -> None:
    """This tests the division for every fp16 number up to a row's largest, and largest numbers of all mantissas."""
    numbers = torch.arange(0x3C00, dtype=torch.int16).view(torch.float16)  # 0 to 1
    largest = torch.arange(0x3C00, 0x4000, 37, dtype=torch.int16).view(torch.float16)  # 1 to 2
    x = numbers.repeat(len(largest), 1)
    x[:, 0] = largest
    queue = Queue(*x.shape, copies=1)
    queue.check(x)


@pytest.mark.parametrize("seed", range(4))
def test_launches_that_follow_each_other_with_one_token(seed: int) -> None:
    """Replays of a CUDA graph do so. Nothing from earlier launches counts as a result, in any order of CTAs."""
    queue = Queue(37, 144)
    for launch in range(3):
        queue.check(normal(37, 144, seed=launch, dtype=torch.float16), seed=10 * seed + launch, num_sms=1 + seed)
    queue = Queue(513, 16, copies=1)
    for launch in range(2):
        queue.check(normal(513, 16, seed=launch, dtype=torch.float16), seed=10 * seed + launch, num_sms=1 + seed)


@pytest.mark.parametrize("left", [0, -1, 1, TOKEN - 1, TOKEN + 2**24 + 5])
def test_whatever_stood_in_the_counters(left: int) -> None:
    queue = Queue(20, 32)
    queue.counters.fill_((left + 2**63) % 2**64 - 2**63)
    queue.check(normal(20, 32, seed=1, dtype=torch.bfloat16), num_sms=4)


FAULTS = {
    "counting tells nothing of the rows": ("atom.acq_rel.gpu", "atom.relaxed.gpu"),
    "no barrier": ("bar.sync", "//"),
}


@pytest.mark.parametrize("rows, columns", [(20, 528), (520, 16)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_queue_is_found(fault: str, rows: int, columns: int) -> None:
    faulty = Module(compiled_module().ptx.replace(*FAULTS[fault]))
    x = normal(rows, columns, seed=1, dtype=torch.float16)
    for seed in range(4):
        with pytest.raises(EmulatorError) as caught:
            Queue(rows, columns).run(x, seed, num_sms=4, module=faulty, uninitialised=False)
        assert caught.value.kind == "race"
