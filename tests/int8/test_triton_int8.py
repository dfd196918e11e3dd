"""Tests the int8 matmul's Triton kernels against the reference in float64; without a GPU, on the emulator."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import int8_cases
from fastattn.triton_kernels import int8_matmul as kernels
from fastattn.triton_kernels import tiles
from int8_cases import ACTIVATION_NAMES, GRANULARITIES, epilogue, normal, quantised
from kernel_device import DEVICE
from turns import in_turn

pytestmark = pytest.mark.usefixtures("emulated_gpu")

OPS = torch.ops.fastattn_triton
check_forward = functools.partial(int8_cases.check_forward, OPS.int8_matmul)
check_grad_input = functools.partial(int8_cases.check_grad_input, OPS.int8_matmul_grad_input)


@pytest.mark.parametrize(("granularity", "m"), in_turn([(each,) for each in GRANULARITIES], [1, 65, 17, 130], each=2))
def test_forward_and_gradient(granularity: str | int, m: int) -> None:
    weight, scale = quantised(80, 256, granularity, seed=m)
    check_forward(normal(m, 256, seed=m + 1), weight, scale)
    check_grad_input(normal(m, 80, seed=m + 2), weight, scale)


def test_another_number_of_tokens_is_no_other_kernel() -> None:
    """Numbers of tokens with one tile share a kernel: 1 and 16 are not specialised."""
    weight, scale = quantised(64, 256, "channel")
    counts = []
    for m in (1, 7, 16):
        check_forward(normal(m, 256, seed=m), weight, scale)
        counts.append(sum(len(found) for found, *_ in kernels.forward_kernel.device_caches.values()))
    assert counts[-1] == counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 7, 5), (16, 65, 129), (33, 127, 63), (129, 131, 1)])
def test_odd_sizes(granularity: str, m: int, n: int, k: int) -> None:
    weight, scale = quantised(n, k, granularity, seed=n)
    check_forward(normal(m, k, seed=k), weight, scale, normal(n, seed=1), normal(m, n, seed=2), "silu")
    check_grad_input(normal(m, n, seed=3), weight, scale)
    wide = torch.full((n, k + 3), 127, dtype=torch.int8, device=DEVICE)[:, :k].copy_(weight)
    check_forward(normal(m, k, seed=k), wide, scale)
    check_grad_input(normal(m, n, seed=3), wide, scale)


@pytest.mark.slow
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_with_odd_outputs(group: int) -> None:
    weight, scale = quantised(67, 3 * group, group)
    check_forward(normal(5, 3 * group, seed=1), weight, scale, normal(67, seed=2))
    check_grad_input(normal(5, 67, seed=3), weight, scale)


# Every pair of an epilogue's options meets, each present or absent.
EPILOGUES = [
    *((activation, both, both) for activation in ACTIVATION_NAMES for both in (False, True)),
    (ACTIVATION_NAMES[1], True, False),
    (ACTIVATION_NAMES[2], False, True),
]


@pytest.mark.slow
@pytest.mark.parametrize("activation, with_bias, with_residual", EPILOGUES)
def test_epilogues(activation: str, with_bias: bool, with_residual: bool) -> None:
    """Sums reach from -10 to 10, into every activation's tails. For small m and deep k, the merge kernel applies it."""
    for m, n, k in ((4, 40, 640), (66, 40, 64)):
        weight, scale = quantised(n, k, "channel", std=0.1)
        x = normal(m, k, seed=1, std=(1000 / k) ** 0.5)
        bias, residual, _ = epilogue(activation, m, n)
        added = bias if with_bias else None, residual if with_residual else None
        check_forward(x, weight, scale, *added, activation)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("m, outputs", [(1, 7), (65, 33), (130, 65)])
def test_swiglu(m: int, outputs: int, granularity: str | int) -> None:
    """A tile pairs gates with ups, also if their number is odd."""
    weight, scale = quantised(2 * outputs, 256, granularity, seed=m)
    check_forward(normal(m, 256, seed=1), weight, scale, *epilogue("swiglu", m, 2 * outputs))


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_bfloat16(granularity: str | int) -> None:
    weight, scale = quantised(70, 96, granularity)
    check_forward(normal(9, 96, seed=1, dtype=torch.bfloat16), weight, scale, activation="gelu_tanh")
    check_grad_input(normal(9, 70, seed=2, dtype=torch.bfloat16), weight, scale)


@pytest.mark.slow
@pytest.mark.parametrize("split_k", [1, 2, 5])
@pytest.mark.parametrize("granularity", ["channel", 64])
def test_split_k(monkeypatch: pytest.MonkeyPatch, split_k: int, granularity: str | int) -> None:
    """Any number of splits meets the oracle and repeats its bits."""
    tile = tiles.Int8MatmulTile(16, 32, 64, num_warps=4, num_stages=2, split_k=split_k)
    monkeypatch.setattr(kernels, "int8_matmul_tile", lambda *sizes: tile)
    weight, scale = quantised(50, 320, granularity)
    x = normal(20, 320, seed=1)
    for extra in (epilogue("gelu", 20, 50), epilogue("swiglu", 20, 50)):
        out = check_forward(x, weight, scale, *extra)
        assert torch.equal(out, OPS.int8_matmul(x, weight, scale, *extra))
    check_grad_input(normal(20, 50, seed=4), weight, scale)


SIZES = [1, 2, 16, 17, 33, 64, 65, 128, 1000, 8192]


@pytest.mark.parametrize("arch, shared_kb", [(80, 163), (86, 99), (90, 227), (100, 227)])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_tiles(arch: int, shared_kb: int, group: int) -> None:
    for m, n, k in itertools.product(SIZES, SIZES, [64, 128, 4096]):
        tile = tiles.int8_matmul_tile(arch, m, n, k, group, shared_kb * 1024, 132)
        assert group == 0 or group % tile.block_k == 0  # a step is within one group
        assert 1 <= tile.split_k <= -(-k // tile.block_k)
        assert tile.block_m >= min(m, 128)
        assert tile.num_stages >= 2 or (arch >= 90 and not tiles._pipelines_are_sound())


def test_split_k_fills_the_gpu_and_no_more() -> None:
    def split(m: int, n: int, k: int) -> int:
        return tiles.int8_matmul_tile(90, m, n, k, 0, 227 * 1024, 132).split_k

    assert split(1, 1024, 8192) * 16 >= 132  # 16 tiles of 64 outputs
    assert split(8192, 8192, 8192) == 1
    assert split(1, 8192, 128) == 1  # nothing to split
