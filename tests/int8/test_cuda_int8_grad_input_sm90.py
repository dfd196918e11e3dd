"""Tests the Hopper kernel of the int8 matmul's input gradient, and of the bias's gradient, against the oracle.

It runs on a Hopper GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds. Each
test forces a tile: test_matmul_schedule.py tests the choice of tiles.
"""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

import instances
import int8_cases
from cuda_kernels import DTYPES, EMULATED, MARKS, NEEDS_HOPPER, each_dtype, only_emulated
from fastattn import native
from int8_cases import GRANULARITIES, normal, quantised
from int8_kernels import GRADIENT as OP
from int8_kernels import running_sm90
from kernel_device import DEVICE

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime

pytestmark = [*MARKS, NEEDS_HOPPER]

STEP = 64
BLOCKS = sorted({tokens for tokens, _ in instances.rows_of("int8_matmul/instances/grad_input_sm90.cu")})

running = functools.partial(running_sm90, OP)


def grads(*arguments: Tensor, bias_grad: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input and of the bias."""
    return getattr(torch.ops.fastattn, OP)(*arguments, bias_grad)


def grad_input(*arguments: Tensor) -> Tensor:
    return grads(*arguments, bias_grad=False)[0]


def check(tokens: int, *arguments: Tensor, num_sms: int = 2, seed: int = 7) -> Tensor:
    with running(tokens, num_sms, seed=seed):
        return int8_cases.check_grad_input(getattr(torch.ops.fastattn, OP), *arguments)


# --- Shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
def test_every_tile(block: int) -> None:
    """Sizes are a few tokens, and a tile or a step and a little less or more of tokens, columns and sums."""
    sizes = [(3, 128, 16), (block, 64, 256), (block + 1, 192, 272), (2 * block - 1, 320, 544)]
    dtypes = (DTYPES[0], DTYPES[1], DTYPES[1], DTYPES[0])
    for (m, n, k), granularity, dtype in zip(sizes, ("channel", 64, "tensor", 32), dtypes, strict=True):
        weight, scale = quantised(n, k, granularity, seed=m)
        check(block, normal(m, n, seed=1, dtype=dtype), weight, scale, seed=n)


@each_dtype
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_granularities(granularity: str | int, dtype: torch.dtype) -> None:
    """A warp's columns are in one group; a CTA has up to four groups, the last CTA fewer."""
    for block, k, n in ((64, 128, 64), (128, 384, 200), (64, 640, 520)):
        weight, scale = quantised(n, k, granularity, seed=k)
        check(block, normal(70, n, seed=1, dtype=dtype), weight, scale, seed=n)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 14, 26])
def test_every_number_of_steps(steps: int) -> None:
    """Steps range from one to more than the ring's stages; the last is partial."""
    turns = itertools.cycle(DTYPES[:: 1 if steps % 2 else -1])
    for granularity, dtype in zip(("channel", "tensor", 32), turns, strict=False):
        n = steps * STEP - 30
        weight, scale = quantised(n, 96, granularity, seed=steps)
        check(64, normal(9, n, seed=1, dtype=dtype), weight, scale, seed=steps)


# --- Sums that are split among clusters -------------------------------------------------------------------------------


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("block", BLOCKS)
def test_shared_tiles(block: int) -> None:
    """Two clusters or more split tiles, with splits that end with a tile or cross into the next; whole tiles follow."""
    cases = [
        (4, block - 3, 640, 250),
        (8, 20, 2560, 250),
        (6, block + 9, 1536, 300),
        (4, 5, 1024, 1280),
    ]
    for i, (num_sms, m, n, k) in enumerate(cases):
        weight, scale = quantised(n, k, 32 if k % 32 == 0 else "channel", seed=i)
        arguments = (normal(m, n, seed=1, dtype=DTYPES[i % 2]), weight, scale)
        out = check(block, *arguments, num_sms=num_sms, seed=i)
        with running(block, num_sms, seed=8, workers=1 + i % 2) as found:
            assert torch.equal(out, grad_input(*arguments))
            dealt = native.int8_matmul_schedule(OP, 90, num_sms, k % 32 == 0, m, k, n)
        assert dealt.slots > 0 and [launched.grid[0] for launched in found] == [num_sms] == [dealt.ctas]


@only_emulated
@pytest.mark.parametrize("m", [20, 200])
def test_partials_and_sums_over_tokens_that_are_combined_too_early_are_found(m: int) -> None:
    """One tile of tokens splits the result's sums; four tiles split the bias's gradient."""
    weight, scale = quantised(1024 if m == 20 else 128, 64, "channel")
    grad_out = normal(m, weight.shape[0], seed=1)
    with cuda_runtime.replaced("atom.acq_rel.gpu", "atom.relaxed.gpu"):
        with pytest.raises(EmulatorError) as caught:
            check(64, grad_out, weight, scale, num_sms=4)
        assert caught.value.kind == "race"


# --- Values -----------------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("largest, smallest", [(0, 0), (14, -5), (-5, 14), (24, 8), (8, 24), (-14, -2)])
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_every_weight_is_at_its_position(
    granularity: str | int, largest: int, smallest: int, dtype: torch.dtype
) -> None:
    """Each result is one product of a power-of-two scale and its inverse, exact in any range, so a weight at a wrong
    position shows. Neighbouring groups differ by up to 2^60 in bf16."""
    n, k, groups = 330, 160, 5 if granularity == 32 else 1
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator).to(DEVICE)
    exponents = torch.linspace(smallest, largest, n).round()
    grad_out = torch.diag(2.0**-exponents).to(DEVICE, dtype)
    scale = (2.0**exponents)[:, None].repeat(1, groups).to(DEVICE)
    units = torch.tensor([0, -7, 3, 5, -9][:groups], dtype=torch.float32, device=DEVICE)
    scale *= 2.0 ** (units * (6 if dtype == torch.bfloat16 else 1))
    expected = weight.double() * (scale * 2.0 ** -exponents[:, None].to(DEVICE)).repeat_interleave(k // groups, 1)
    assert bool(expected.abs().max() < torch.finfo(dtype).max)
    for block, num_sms in ((64, 4), (256, 2)):
        with running(block, num_sms=num_sms):
            assert torch.equal(grad_input(grad_out, weight, scale), expected.to(dtype))


@pytest.mark.parametrize("exponent", [-120, -60, 60, 120, 125])
def test_scales_near_the_ends_of_what_bf16_holds(exponent: int) -> None:
    weight = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE).view(16, 16)
    grad_out = torch.diag(torch.full((16,), 2.0**-exponent)).to(DEVICE, torch.bfloat16)
    with running(64):
        found = grad_input(grad_out, weight, torch.full((16, 1), 2.0**exponent, device=DEVICE))
    assert torch.equal(found, weight.to(torch.bfloat16))
