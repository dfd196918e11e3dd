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
import int8_hopper
from cuda_kernels import DTYPES, EMULATED, MARKS, NEEDS_HOPPER, each_dtype, only_emulated
from fastattn import native, reference
from int8_cases import GRANULARITIES, normal, quantised
from int8_hopper import SEED
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime

pytestmark = [*MARKS, NEEDS_HOPPER]

OP = "int8_matmul_grad_input"
TEAM_COLUMNS, STEP = 256, 64
BLOCKS = sorted({tokens for tokens, _ in instances.rows_of("int8_matmul/instances/grad_input_sm90.cu")})

running = functools.partial(int8_hopper.running, f"{OP}_sm90")


def grads(*arguments: Tensor, bias_grad: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the input and of the bias."""
    return getattr(torch.ops.fastattn, OP)(*arguments, bias_grad)


def grad_input(*arguments: Tensor) -> Tensor:
    return grads(*arguments, bias_grad=False)[0]


def check(tokens: int, *arguments: Tensor, num_sms: int = 2, seed: int = SEED) -> Tensor:
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
@pytest.mark.parametrize("m", [1, 7, 65, 130])
def test_odd_sizes(m: int, dtype: torch.dtype) -> None:
    """Not all rows of weight, dY and result are aligned."""
    for n, k in [(1, 1), (3, 16), (8, 7), (65, 33), (130, 258), (131, 129), (259, 300)]:
        weight, scale = quantised(n, k, "channel", seed=m)
        check(64, normal(m, n, seed=1, dtype=dtype), weight, scale, seed=n)


@pytest.mark.parametrize("n, k", [(7, 129), (130, 100), (64, 24)])
def test_what_lies_between_rows_is_not_read(n: int, k: int) -> None:
    """Memory after the rows of dY holds NaN, and after the weight's rows 127."""
    m, room = 5, 160
    weight, scale = quantised(n, k, "channel")
    wide = torch.full((n, room), 127, dtype=torch.int8, device=DEVICE)
    wide[:, :k] = weight
    grad_out = normal(m, n, seed=2)
    longer = torch.full((m, room), torch.nan, dtype=grad_out.dtype, device=DEVICE)
    longer[:, :n] = grad_out
    out = check(64, longer[:, :n], wide[:, :k], scale)
    with running(64):
        assert torch.equal(out, grad_input(grad_out, weight, scale))


@each_dtype
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_granularities(granularity: str | int, dtype: torch.dtype) -> None:
    """A warp's columns are in one group; a CTA has up to four groups, the last CTA fewer."""
    for block, k, n in ((64, 128, 64), (128, 384, 200), (64, 640, 520)):
        weight, scale = quantised(n, k, granularity, seed=k)
        check(block, normal(70, n, seed=1, dtype=dtype), weight, scale, seed=n)


@pytest.mark.parametrize("group", [32, 64])
def test_groups_that_are_no_power_of_two_in_number(group: int) -> None:
    weight, scale = quantised(24, 5 * group, group)
    check(64, normal(5, 24, seed=2), weight, scale)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 14, 26])
def test_every_number_of_steps(steps: int) -> None:
    """Steps range from one to more than the ring's stages; the last is partial."""
    turns = itertools.cycle(DTYPES[:: 1 if steps % 2 else -1])
    for granularity, dtype in zip(("channel", "tensor", 32), turns, strict=False):
        n = steps * STEP - 30
        weight, scale = quantised(n, 96, granularity, seed=steps)
        check(64, normal(9, n, seed=1, dtype=dtype), weight, scale, seed=steps)


def test_views() -> None:
    """Batch dims, rows of longer rows, transposed and misaligned inputs, and a repeated row as from `out.sum(0)` give
    the bits of a copy."""
    weight, scale = quantised(128, 48, "channel")
    wide = normal(2, 5, 200, seed=1)
    wide[..., 136:] = torch.nan
    of_batch, repeated = normal(5, 128, 2, seed=2).permute(2, 0, 1), wide[0, :1, :128].expand(5, 128)
    for x in (wide[..., :128], wide[:, ::2, 8:136], wide[..., 1:129], of_batch, repeated):
        out = check(64, x, weight, scale)
        with running(64):
            assert torch.equal(out, grad_input(x.contiguous(), weight, scale))


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
        with running(block, num_sms, seed=SEED + 1, workers=1 + i % 2) as found:
            assert torch.equal(out, grad_input(*arguments))
            dealt = native.int8_matmul_schedule(OP, 90, num_sms, k % 32 == 0, m, k, n)
        assert dealt.slots > 0 and [launched.grid[0] for launched in found] == [num_sms] == [dealt.ctas]


@pytest.mark.parametrize(
    ("m", "num_sms", "dtype"), in_turn(itertools.product((1, 64, 130, 300), (2, 8)), DTYPES), ids=str
)
def test_gradient_of_a_bias(m: int, num_sms: int, dtype: torch.dtype) -> None:
    """There are eleven steps, the last of them partial, and fewer or more columns of CTAs, which divide the steps."""
    for k in (16, 272, 1552) if num_sms == 8 else (16, 272):
        weight, scale = quantised(680, k, "channel")
        check(64, normal(m, 680, seed=k, dtype=dtype), weight, scale, num_sms=num_sms, seed=k)


@each_dtype
@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("n", [1, 3, 5, 13, 100])
def test_gradient_of_a_bias_of_any_width(n: int, m: int, dtype: torch.dtype) -> None:
    """There are one or several tiles of tokens; memory after the rows of dY holds NaN."""
    weight, scale = quantised(n, 40, "channel")
    wide = torch.full((m, 104), torch.nan, dtype=dtype, device=DEVICE)
    grad_out = wide[:, :n].copy_(normal(m, n, seed=n, dtype=dtype))
    check(64, grad_out, weight, scale, seed=n)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("block, m", [(64, 5), (64, 300), (256, 300)])
def test_a_bias_takes_no_launch_of_its_own_and_has_the_same_bits_always(block: int, m: int) -> None:
    """Computing it does not change the input's gradient."""
    weight, scale = quantised(680, 272, "channel")
    grad_out, results = normal(m, 680, seed=1), []
    for launching in ({"seed": 1}, {"seed": 2, "workers": 1}, {"seed": 3, "num_sms": 8}, {"seed": 4, "num_sms": 8}):
        with running(block, **launching) as found:
            results.append(grads(grad_out, weight, scale))
        assert len(found) == 1 and found[0].report.bank_conflicts == 0
        with running(block, **launching):
            assert torch.equal(grad_input(grad_out, weight, scale), results[-1][0])
    assert all(torch.equal(grad_bias, results[0][1]) for _, grad_bias in results)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[2][0], results[3][0])


@only_emulated
@pytest.mark.parametrize("m", [20, 200])
def test_parts_and_sums_over_tokens_that_are_merged_too_early_are_found(m: int) -> None:
    """One tile of tokens splits the result's sums; four tiles split the bias's gradient."""
    weight, scale = quantised(1024 if m == 20 else 128, 64, "channel")
    grad_out = normal(m, weight.shape[0], seed=1)
    with cuda_runtime.replaced("atom.acq_rel.gpu", "atom.relaxed.gpu"):
        with pytest.raises(EmulatorError) as caught:
            check(64, grad_out, weight, scale, num_sms=4)
        assert caught.value.kind == "race"


# --- Values -----------------------------------------------------------------------------------------------------------


def test_every_int8_number_is_exact() -> None:
    """This includes -128, which quantisation never makes. Each result is one product with a power of two."""
    numbers = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE).view(16, 16)
    scale = torch.full((16, 1), 0.5, device=DEVICE)
    for dtype in DTYPES:
        x = 2 * torch.eye(16, dtype=dtype, device=DEVICE)
        with running(64):
            assert torch.equal(grad_input(x, numbers, scale), numbers.to(dtype))


@each_dtype
@pytest.mark.parametrize("largest, smallest", [(0, 0), (14, -5), (-5, 14), (24, 8), (8, 24), (-14, -2)])
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_every_weight_has_its_place(granularity: str | int, largest: int, smallest: int, dtype: torch.dtype) -> None:
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


@each_dtype
def test_the_largest_factor_takes_every_weight(dtype: torch.dtype) -> None:
    """A scale just below a power of two rounds up to it; -128 times this factor is still finite."""
    weight = torch.full((16, 16), -128, dtype=torch.int8, device=DEVICE)
    scale = torch.full((16, 1), float.fromhex("0x1.fffp-1"), device=DEVICE)
    with running(64):
        found = grad_input(torch.eye(16, dtype=dtype, device=DEVICE), weight, scale)
    assert torch.equal(found, torch.full_like(found, -128.0))


@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_a_channel_of_zeros(granularity: str | int, dtype: torch.dtype) -> None:
    """Its scale is 1, which is large among the others: these must not lose precision."""
    dense = normal(40, 64, seed=1, dtype=torch.float32, std=0.02)
    dense[3] = 0.0
    weight, scale = reference.quantize_int8(dense, granularity)
    assert bool((scale[3] == 1).all())
    check(64, normal(6, 40, seed=3, dtype=dtype), weight, scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_small_gradients_and_small_scales_do_not_underflow(granularity: str | int) -> None:
    """Weights around 1e-4 are below fp16's normal range. The gradient must be as good as for larger weights."""
    weight, scale = quantised(256, 128, granularity, std=1e-4)
    grad_out = normal(4, 256, seed=1, std=100.0)
    found = check(64, grad_out, weight, scale)
    exact = grad_out.double() @ reference.dequantize_int8(weight, scale, torch.float64)
    assert (found.double() - exact).abs().max() <= 2e-3 * exact.abs().max()


@each_dtype
def test_scales_of_any_sign_and_size(dtype: torch.dtype) -> None:
    weight, scale = quantised(48, 64, "channel")
    scale[::3] *= -1
    scale[1::3] *= 1e-3
    scale[5] *= -1e3
    check(64, normal(6, 48, seed=3, dtype=dtype), weight, scale)


@each_dtype
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_scales_that_rise_and_fall_along_the_sum(granularity: str | int, falling: bool, dtype: torch.dtype) -> None:
    """Scales span eleven orders of magnitude: a larger scale changes the unit in which the sum is kept."""
    weight, scale = quantised(640, 64, granularity, std=1.0)
    exponents = torch.linspace(-9, 2, 640, device=DEVICE)
    scale *= 10 ** (exponents.flip(0) if falling else exponents)[:, None]
    scale[:70] *= 0 if not falling else 1
    for num_sms in (2, 6):
        check(64, normal(6, 640, seed=3, dtype=dtype), weight, scale, num_sms=num_sms)
    # Gradients that are zero elsewhere show the small scales alone.
    grad_out = normal(6, 640, seed=4, dtype=dtype)
    grad_out[:, (exponents > -5) if not falling else (exponents < -5)] = 0
    check(64, grad_out, weight, scale)


@each_dtype
def test_scales_of_zeros_give_zeros(dtype: torch.dtype) -> None:
    weight, scale = quantised(16, 64, "channel")
    with running(64):
        assert bool((grad_input(normal(3, 16, seed=1, dtype=dtype), weight, torch.zeros_like(scale)) == 0).all())


def test_fp16_overflows_where_the_exact_result_does() -> None:
    """It does not overflow before: sums of 127 * 60000 pass through."""
    weight = torch.full((16, 64), 127, dtype=torch.int8, device=DEVICE)
    weight[8:, 32:] = -127
    scale = torch.full((16, 1), 0.25, device=DEVICE)
    grad_out = torch.full((3, 16), 60000.0, dtype=torch.float16, device=DEVICE)
    grad_out[1, 8:] *= -1
    grad_out[2] = 8.0
    with running(64):
        found = grad_input(grad_out, weight, scale)
    assert torch.equal(found, (grad_out.double() @ (weight.double() * scale.double())).to(torch.float16))
