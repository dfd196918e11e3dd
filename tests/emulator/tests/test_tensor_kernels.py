"""Tests of CUDA C++ kernels with tensor copies: pipelines with mbarriers, reductions, clusters, and planted faults."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator import EmulatorError, Module, TensorMap
from emulator.nvcc_compile import compile_ptx, nvcc

SOURCE = Path(__file__).parent / "cuda" / "tensor_copies.cu"
COLUMNS, ROWS, TILES = 100, 230, 8

pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc")


@functools.cache
def module() -> Module:
    return Module(compile_ptx(SOURCE, "compute_90a"))


def pipeline(name: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    storage = torch.randint(0, 1000, (ROWS, COLUMNS + 4), dtype=torch.int16)
    source, target = storage[:, :COLUMNS], torch.zeros_like(storage)[:, :COLUMNS]
    maps = [TensorMap(tensor, [32, 64], "128B") for tensor in (source, target)]
    module().launch(name, (2,), (160,), [*maps, TILES], shared_bytes=5 * 4096 + 1024, **options)
    return source, target


@pytest.mark.parametrize("seed", range(4))
def test_pipeline(seed: int) -> None:
    source, target = pipeline("pipelined", seed=seed)
    assert torch.equal(target, source + 1)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        # The producer overwrites what is read, or announces more bytes than the mbarrier can count.
        ("without_wait_for_empty", {"race", "mbarrier"}),
        ("without_proxy_fence", {"proxy"}),
        ("with_half_of_the_bytes", {"deadlock"}),
        ("without_wait_for_read", {"race"}),
    ],
)
def test_pipelines_with_something_left_out(name: str, kinds: set[str]) -> None:
    """Checks for an error at every seed, and for wrong results or errors at some seeds without the race detector."""
    for seed in range(4):
        with pytest.raises(EmulatorError) as caught:
            pipeline(name, seed=seed)
        assert caught.value.kind in kinds, caught.value
    if "race" not in kinds:
        return
    results = []
    for seed in range(8):
        try:
            source, target = pipeline(name, seed=seed, races=False)
            results.append(torch.equal(target, source + 1))
        except EmulatorError:
            results.append(False)
    assert not all(results)


@pytest.mark.parametrize("seed", range(2))
def test_reduction_with_libcudacxx_barriers(seed: int) -> None:
    source = torch.randint(0, 100, (70, 32)).float()
    target = torch.zeros(8, 32)
    maps = [TensorMap(source, [8, 32]), TensorMap(target, [8, 32])]
    module().launch("accumulated", (3,), (64,), [*maps, 9], seed=seed)
    padded = torch.nn.functional.pad(source, (0, 0, 0, 2))
    assert torch.equal(target, 2 * padded.view(9, 8, 32).sum(0))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_shared_by_a_cluster(size: int) -> None:
    source = torch.randn(32, 32)
    for seed in range(3):
        out = torch.zeros(2 * size, 32, 32)
        arguments = [TensorMap(source, [32 // size, 32]), out]
        module().launch("shared_by_cluster", (2 * size,), (96,), arguments, cluster=(size,), seed=seed)
        expected = 2 * source + torch.arange(size).view(size, 1, 1)
        assert torch.equal(out, expected.repeat(2, 1, 1))
