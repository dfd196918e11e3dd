"""Tests that the choice between our kernels for an int8 matmul and cuBLAS has no cliffs in the library's own model."""

from __future__ import annotations

import itertools

import pytest
import torch

from cuda_kernels import HAS_KERNELS, NO_KERNELS
from fastattn import native

pytestmark = pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)

H200, A100 = (90, 132), (80, 108)
# Tiles begin and end around multiples of 64.
TOKENS = sorted({*range(1, 129), *range(128, 1025, 8), *(m + by for m in range(64, 8192, 64) for by in (-1, 0, 1))})

each_layer = pytest.mark.parametrize("outputs, depth", [(4096, 4096), (14336, 4096), (1024, 8192), (8192, 8192)])


def fastest(gpu: tuple[int, int], op: str, has_groups: bool, *sizes: int) -> float:
    product = native.Int8Product(op, torch.bfloat16, has_groups, False, *sizes)
    return min(native.int8_ways(product, *gpu).values())


@each_layer
@pytest.mark.parametrize(
    ("gpu", "has_groups", "least"), [(H200, False, 0.9), (H200, True, 0.84), (A100, False, 1.0), (A100, True, 0.83)]
)
def test_how_much_slower_than_cublas_a_call_may_be(
    gpu: tuple[int, int], has_groups: bool, least: float, outputs: int, depth: int
) -> None:
    """An A100 scales the sums of groups as they grow. This costs most between few tokens, where memory binds, and many
    tokens, where dequantising pays."""
    for tokens in TOKENS:
        dense = native.cublas_microseconds(*gpu, tokens, outputs, depth)
        assert dense / fastest(gpu, "int8_matmul", has_groups, tokens, outputs, depth) >= least, tokens


@each_layer
def test_few_tokens_take_little_more_than_half_the_time(outputs: int, depth: int) -> None:
    """An int8 weight has half the bytes."""
    for tokens in range(1, 17):
        dense = native.cublas_microseconds(*H200, tokens, outputs, depth)
        speedup = dense / fastest(H200, "int8_matmul", False, tokens, outputs, depth)
        assert speedup >= (1.75 if outputs > 1024 else 1.5)


@each_layer
@pytest.mark.parametrize("op", ["int8_matmul", "int8_matmul_s8"])
@pytest.mark.parametrize("gpu", [H200, A100])
def test_no_cliff(gpu: tuple[int, int], op: str, outputs: int, depth: int) -> None:
    """One more token may begin a tile, or a wave of tiles. For int8 activations an A100 has only three tiles. On an
    H200 L2 binds, and a second tile loads all weights once more."""
    most = 1.4 if op == "int8_matmul" else 1.8 if gpu == H200 else 2.8
    times = [fastest(gpu, op, False, m, outputs, depth) for m in TOKENS]
    for (m, time), (more, longer) in itertools.pairwise(zip(TOKENS, times, strict=True)):
        assert longer >= 0.9 * time, f"{more} tokens take {longer:.1f} us, {m} take {time:.1f}"
        assert longer <= most * time * more / m, f"{more} tokens take {longer:.1f} us, {m} take {time:.1f}"
