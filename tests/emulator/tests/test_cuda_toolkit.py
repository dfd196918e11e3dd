"""CUDA C++ kernels, compiled by nvcc, that use the toolkit's libraries: cooperative groups, libcu++, mma.h and CUB."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_sources import ARCHS, load, needs_nvcc
from emulator import EmulatorError

pytestmark = [needs_nvcc, pytest.mark.parametrize("arch", ARCHS)]


def integers(*shape: int, low: int = 0, high: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_tiled_partitions(arch: str) -> None:
    values, sums, scans, maxima = integers(128, low=-9), zeros(16), zeros(128), zeros(4)
    load("cooperative", arch).launch("tiles", (2,), (64,), [values, sums, scans, maxima])
    assert torch.equal(sums, values.view(16, 8).sum(1).int())
    assert torch.equal(scans, values.view(8, 16).cumsum(1).flatten().int())
    assert torch.equal(maxima, values.view(4, 32).amax(1))


@pytest.mark.parametrize("seed", range(3))
def test_coalesced_groups(arch: str, seed: int) -> None:
    values, out, count = integers(128, low=-5, high=20, seed=seed), zeros(128), zeros(1)
    load("cooperative", arch).launch("compact", (2,), (64,), [values, out, count], seed=seed)
    positive = values[values > 0]
    assert count.item() == len(positive)
    assert torch.equal(out[: len(positive)].sort().values, positive.sort().values)


def test_labeled_partitions(arch: str) -> None:
    labels, values, sizes, sums = integers(32, high=4), torch.arange(32.0), zeros(32), torch.zeros(32)
    load("cooperative", arch).launch("partitions", (1,), (32,), [labels, values, sizes, sums])
    same = (labels[:, None] == labels).float()
    assert torch.equal(sizes, same.sum(1).int()) and torch.equal(sums, same @ values)


@pytest.mark.parametrize("seed", range(3))
def test_grid_synchronisation(arch: str, seed: int) -> None:
    cells = integers(12, seed=seed)
    expected, following = cells.clone(), zeros(12)
    for _ in range(3):
        expected = expected + expected.roll(-1)
    load("cooperative", arch).launch("rounds", (12,), (64,), [cells, following, 3], cooperative=True, seed=seed)
    assert torch.equal(cells, expected)


def test_grid_synchronisation_needs_a_cooperative_launch(arch: str) -> None:
    module, arguments = load("cooperative", arch), [zeros(12), zeros(12), 3]
    with pytest.raises(EmulatorError, match="trap") as caught:
        module.launch("rounds", (12,), (64,), arguments)
    assert caught.value.source is not None and "cooperative_groups.h" in caught.value.source
    with pytest.raises(EmulatorError, match=r"a cooperative launch of 65 CTAs; 64 can run at a time"):
        module.launch("rounds", (65,), (64,), arguments, cooperative=True, num_sms=2)


@pytest.mark.parametrize("kernel", ["pipelined", "pipelined_by_thread"])
@pytest.mark.parametrize("seed", range(3))
def test_pipelines(arch: str, kernel: str, seed: int) -> None:
    tiles = integers(5, 64, seed=seed).float()
    out = torch.zeros(64)
    load("asynchronous", arch).launch(kernel, (1,), (64,), [tiles, out, 5], seed=seed)
    assert torch.equal(out, tiles.sum(0))


@pytest.mark.parametrize("seed", range(3))
def test_split_barrier(arch: str, seed: int) -> None:
    values = integers(64, seed=seed).float() * 16
    expected, out = values.clone(), torch.zeros(64)
    for _ in range(4):
        expected = expected * 0.5 + expected.roll(-1)
    load("asynchronous", arch).launch("split_barrier", (1,), (64,), [values, out, 4], seed=seed)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(3))
def test_copy_that_a_barrier_waits_for(arch: str, seed: int) -> None:
    source, out = integers(64, 4, high=1000, seed=seed), zeros(64, 4)
    load("asynchronous", arch).launch("copied", (1,), (64,), [source, out], seed=seed)
    assert torch.equal(out, source.flip(0))


@pytest.mark.parametrize("seed", range(3))
def test_atomics_with_orders(arch: str, seed: int) -> None:
    data, flags, total, most = zeros(6), zeros(6), zeros(1), zeros(1)
    sums = torch.zeros(1, dtype=torch.float64)
    load("asynchronous", arch).launch("messages", (6,), (64,), [data, flags, total, sums, most], seed=seed)
    assert data.tolist() == list(range(6)) and flags.tolist() == [1] * 6
    assert total.item() == 6 * 64 and sums.item() == 6 * 64 * 0.5
    assert most.item() == max((thread * 7 + block) % 61 for thread in range(64) for block in range(6))


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype", "sum_dtype", "by_rows"),
    [
        ("half_16_16", (16, 16, 16), torch.float16, torch.float32, "rcr"),
        ("half_32_8", (32, 8, 16), torch.float16, torch.float32, "crc"),
        ("half_8_32", (8, 32, 16), torch.float16, torch.float16, "rrr"),
        ("bfloat_16_16", (16, 16, 16), torch.bfloat16, torch.float32, "ccr"),
        ("signed_16_16", (16, 16, 16), torch.int8, torch.int32, "rcr"),
        ("unsigned_32_8", (32, 8, 16), torch.uint8, torch.int32, "crr"),
        ("tf32_16_16", (16, 16, 8), torch.float32, torch.float32, "rcc"),
        ("double_8_8", (8, 8, 4), torch.float64, torch.float64, "rcr"),
    ],
)
def test_wmma(
    arch: str,
    kernel: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    by_rows: str,
) -> None:
    """Small integers, so that sums are exact; the kernel doubles each element of the accumulator."""
    m, n, k = shape
    low = 0 if dtype == torch.uint8 else -4
    a, b = integers(m, k, low=low, high=5, seed=1).to(dtype), integers(k, n, low=low, high=5, seed=2).to(dtype)
    c = integers(m, n, low=-9, seed=3).to(sum_dtype)
    stored = [
        x.contiguous() if layout == "r" else x.t().contiguous() for x, layout in zip((a, b, c), by_rows, strict=True)
    ]
    out = torch.zeros_like(stored[2])
    report = load("wmma", arch).launch(kernel, (1,), (32,), [*stored, out])
    result = out if by_rows[2] == "r" else out.t()
    assert torch.equal(result.double(), 2 * (a.double() @ b.double() + c.double()))
    assert sum(operations.multiply_adds for operations in report.tensor_core.values()) == m * n * k


def test_wmma_matrix_product(arch: str) -> None:
    """A whole product of several tiles, with fp16 sums made from fp32 ones."""
    generator = torch.Generator().manual_seed(4)
    a, b = torch.randn(64, 80, generator=generator).half(), torch.randn(80, 48, generator=generator).half()
    out = torch.zeros(64, 48).half()
    load("wmma", arch).launch("product", (4, 3), (32,), [a, b, out, 48, 80])
    exact = a.double() @ b.double()
    bound = 2.0**-11 * exact.abs() + 80 * 2.0**-23 * (a.double().abs() @ b.double().abs())
    assert ((out.double() - exact).abs() <= bound).all()


def test_block_reduce_scan_and_sort(arch: str) -> None:
    values, sums, scans = integers(256, low=-99, high=100), zeros(2), zeros(256)
    load("blocks", arch).launch("reduce_and_scan", (2,), (128,), [values, sums, scans])
    rows = values.view(2, 128)
    assert torch.equal(sums, rows.sum(1).int())
    assert torch.equal(scans, (rows.cumsum(1) - rows).flatten().int())
    unsorted = integers(256, low=-(2**31), high=2**31 - 1, seed=5)
    expected = unsorted.sort().values
    load("blocks", arch).launch("sort", (1,), (128,), [unsorted])
    assert torch.equal(unsorted, expected)
