"""Tests of CUDA C++ kernels that use the toolkit's libraries: cooperative groups, libcu++, mma.h and CUB."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_sources import ARCHS, load, needs_nvcc
from emulator import EmulatorError

pytestmark = [pytest.mark.slow, needs_nvcc, pytest.mark.parametrize("arch", ARCHS)]


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
