"""Tests the Hopper kernels of the int8 matmul against the oracle.

They run on a Hopper GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds. Each
test forces a tile: test_matmul_schedule.py tests the choice of tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import instances
import int8_cases
from cuda_kernels import DTYPES, EMULATED, MARKS, NEEDS_HOPPER, each_dtype, only_emulated
from fastattn import native, reference
from int8_cases import GRANULARITIES, epilogue, normal, quantised
from int8_kernels import FORWARD, running_sm90
from kernel_device import DEVICE

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device

pytestmark = [*MARKS, NEEDS_HOPPER]

TILE_OUTPUTS, STEP = 256, 64
BLOCKS = sorted({tokens for tokens, _, _ in instances.rows_of("int8_matmul/instances/gemm_sm90.cu")})

running = functools.partial(running_sm90, FORWARD)


def int8_matmul(*arguments: Any) -> Tensor:
    return torch.ops.fastattn.int8_matmul(*arguments, False)


def check(tokens: int, *arguments: Any, num_sms: int = 2, seed: int = 7, **named: Any) -> Tensor:
    with running(tokens, num_sms, seed=seed):
        return int8_cases.check_forward(int8_matmul, *arguments, **named)


@only_emulated
def test_a_missing_fence_before_copies_over_weights_that_were_read_is_found() -> None:
    weight, scale = quantised(300, 1024, "channel")
    with cuda_runtime.replaced("fence.proxy.async.shared::cta;", ""), pytest.raises(EmulatorError) as caught:
        check(64, normal(70, 1024, seed=1), weight, scale)
    assert caught.value.kind == "proxy"


# --- Shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("granularity", ["channel", 64])
def test_every_tile(granularity: str | int, block: int) -> None:
    """Sizes are a few tokens, and a tile or a step and a little less or more of tokens, outputs and columns."""
    for i, (m, n, k) in enumerate([(3, 8, 128), (block, 256, 64), (block + 1, 264, 192), (2 * block - 1, 520, 128)]):
        dtype = DTYPES[i % 2]
        weight, scale = quantised(n, k, granularity, seed=m)
        check(block, normal(m, k, seed=1, dtype=dtype), weight, scale, *epilogue("none", m, n, dtype), seed=n)


@each_dtype
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_granularities_and_sums_of_any_length(granularity: str | int, dtype: torch.dtype) -> None:
    """Steps range from two to many more than the ring's stages."""
    for block, steps in ((64, 2), (128, 4), (64, 6), (128, 10), (64, 26), (128, 26)):
        k = steps * STEP
        weight, scale = quantised(130, k, granularity, seed=steps)
        check(block, normal(70, k, seed=1, dtype=dtype), weight, scale, seed=steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9])
def test_every_number_of_steps(steps: int) -> None:
    """The last step is partial."""
    for granularity in ("channel", "tensor", 32):
        k = steps * STEP - (32 if granularity == 32 else 30)
        weight, scale = quantised(100, k, granularity, seed=steps)
        check(64, normal(9, k, seed=1), weight, scale, seed=steps)


# --- Sums that are split among clusters -------------------------------------------------------------------------------


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("block", BLOCKS)
def test_shared_tiles(block: int) -> None:
    """Two clusters or more split tiles, with splits that end with a tile or cross into the next; whole tiles follow."""
    cases = [
        (4, block - 3, 250, 640),
        (8, 20, 250, 2560),
        (8, 20, 600, 6400),
        (6, block + 9, 300, 1536),
        (4, 5, 1280, 1024),
    ]
    for i, (num_sms, m, n, k) in enumerate(cases):
        dtype, granularity = DTYPES[i % 2], ("channel", 32, 128)[i % 3]
        weight, scale = quantised(n, k, granularity, seed=i)
        scale[:, scale.shape[1] // 2 :] *= 2.0**10 if scale.shape[1] > 1 else 1  # splits have scales of their own
        arguments = (normal(m, k, seed=1, dtype=dtype), weight, scale, *epilogue("gelu", m, n, dtype))
        out = check(block, *arguments, num_sms=num_sms, seed=i)
        with running(block, num_sms, seed=8, workers=1 + i % 2) as found:
            assert torch.equal(out, int8_matmul(*arguments))
            has_groups = granularity != "channel"
            assert native.int8_matmul_schedule("int8_matmul", 90, num_sms, has_groups, m, n, k).slots > 0
        assert [launched.grid[0] for launched in found] == [num_sms]


@only_emulated
@pytest.mark.parametrize("num_sms", [2, 8])
@pytest.mark.parametrize("m, n, k", [(1, 256, 1280), (3, 262, 1283), (130, 66, 517)])
def test_launches_are_dealt_as_the_library_tells(m: int, n: int, k: int, num_sms: int) -> None:
    weight, scale = quantised(n, k, "channel")
    with running(64, num_sms) as found:
        int8_matmul(normal(m, k, seed=1), weight, scale, None, None, "none")
        dealt = native.int8_matmul_schedule("int8_matmul", 90, num_sms, False, m, n, k)
    assert [launched.grid[0] for launched in found] == [dealt.ctas] and dealt.block_m == 64


@only_emulated
def test_clusters_stay_for_the_whole_launch() -> None:
    """Of nine tiles for two clusters, one is split, and each cluster computes four whole ones."""
    weight, scale = quantised(9 * TILE_OUTPUTS, 2048, "channel")
    with running(64, num_sms=4) as found:
        int8_cases.check_forward(int8_matmul, normal(3, 2048, seed=1), weight, scale)
    assert [launched.grid[0] for launched in found] == [4]


@only_emulated
@pytest.mark.parametrize("block", [64, 256])
def test_no_bank_conflicts(block: int) -> None:
    weight, scale = quantised(512, 256, "channel")
    with running(block, num_sms=4) as found:
        int8_matmul(normal(block, 256, seed=1), weight, scale, None, None, "none")
    (launched,) = found
    assert launched.report.bank_conflicts == 0


# --- Values -----------------------------------------------------------------------------------------------------------


@each_dtype
def test_every_weight_is_at_its_position(dtype: torch.dtype) -> None:
    """Each row of x is one element of K: products are exact, so a weight at a wrong position shows."""
    n, k = 300, 200
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator).to(DEVICE)
    x, scale = torch.eye(k, dtype=dtype, device=DEVICE), torch.ones(n, 1, device=DEVICE)
    for block in (64, 256):
        with running(block, num_sms=4):
            assert torch.equal(int8_matmul(x, weight, scale, None, None, "none"), weight.t().to(dtype))


def test_a_group_may_be_nan_or_infinite_alone() -> None:
    """The last group ends within a step. An infinite scale must not turn the zeros after it into NaN."""
    weight, scale = quantised(20, 96, 32)
    weight[4, 64:] = 1
    scale[3, 1], scale[4, 2] = torch.nan, torch.inf
    with running(64):
        out = int8_matmul(normal(5, 96, seed=1).abs(), weight, scale, None, None, "none")
    assert bool(out[:, 3].isnan().all()) and bool((out[:, 4] == torch.inf).all())
    assert bool(out[:, [i for i in range(20) if i not in (3, 4)]].isfinite().all())


@each_dtype
@pytest.mark.parametrize("group", [32, 64, 128])
def test_scales_of_groups_round_a_weight_once(group: int, dtype: torch.dtype) -> None:
    """Each row of x is one element of K, so a result is a weight times its scale. Rounding the scale, too, would add up
    to another half of a unit in the last place. Scales of a row differ by up to 2^13, some are negative."""
    n, k = 200, 512
    generator = torch.Generator().manual_seed(group)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator)
    exponent = torch.randint(0, 13, (n, k // group), generator=generator)
    exponent += torch.randint(-13, -4, (n, 1), generator=generator)
    scale = (torch.rand(exponent.shape, generator=generator) + 0.5) * 2.0**exponent
    scale[::3] *= -1
    exact = weight.double() * scale.double().repeat_interleave(group, 1)
    x = torch.eye(k, dtype=dtype, device=DEVICE)
    with running(256, num_sms=4):
        out = int8_matmul(x, weight.to(DEVICE), scale.to(DEVICE), None, None, "none").t().cpu().double()
    unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor()  # in the last place
    assert bool(((out - exact).abs() <= 0.51 * unit).all())


@each_dtype
def test_scales_of_any_size(dtype: torch.dtype) -> None:
    """Weights may be beyond float16's range; their sums are not. A row may have only zeros as scales."""
    weight, scale = quantised(40, 256, 64)
    scale *= 2.0**20
    scale[3] = 0
    x = normal(5, 256, seed=1, dtype=dtype, std=2.0**-13)
    exact = x.double() @ reference.dequantize_int8(weight, scale, torch.float64).t()
    assert bool(reference.dequantize_int8(weight, scale, torch.float16).isinf().any())
    with running(64):
        out = int8_matmul(x, weight, scale, None, None, "none")
    assert bool((out.double() - exact).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max())
    assert bool((out[:, 3] == 0).all())


@only_emulated
def test_a_gpu_with_one_multiprocessor_has_no_cluster() -> None:
    weight, scale = quantised(16, 32, "channel")
    with device.emulated(90, num_sms=1), native.forced_int8_tile(90), pytest.raises(RuntimeError, match="1 multiproc"):
        int8_matmul(normal(3, 32, seed=1), weight, scale, None, None, "none")


def test_the_state_of_a_layer_is_the_same_on_every_gpu() -> None:
    """Weights keep the plain layout: the kernels for sm_80 and for Hopper compute the same product from them."""
    weight, scale = quantised(200, 256, "channel")
    before = weight.clone()
    x = normal(70, 256, seed=1)
    with running(128):
        on_hopper = int8_matmul(x, weight, scale, None, None, "none")
    with native.forced_int8_tile(80):
        on_ampere = int8_matmul(x, weight, scale, None, None, "none")
    exact = x.double() @ reference.dequantize_int8(weight, scale, torch.float64).t()
    assert torch.equal(weight, before)
    for out in (on_hopper, on_ampere):
        assert (out.double() - exact).abs().max() <= 2e-3 * exact.abs().max()
