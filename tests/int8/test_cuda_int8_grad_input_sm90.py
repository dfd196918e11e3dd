"""The Hopper kernel of the int8 matmul's input gradient under the package's own host code, against the oracle.

On a Hopper GPU where there is one, else as PTX on the emulator, with all of its checks and at several seeds. Which tile
computes is forced: the planner's own choices are in test_matmul_plan.py. Every check is of a bias's gradient too.
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

if EMULATED:  # a machine with a GPU needs no compiler to build the emulator with
    from emulator import EmulatorError, cuda_runtime

pytestmark = [*MARKS, NEEDS_HOPPER]

OP = "int8_matmul_grad_input"
TEAM_COLUMNS, STEP = 256, 64
BLOCKS = sorted({tokens for tokens, _ in instances.rows_of("int8_matmul/instances/grad_input_sm90.cu")})

running = functools.partial(int8_hopper.running, f"{OP}_sm90")


def grads(*arguments: Tensor, bias_grad: bool = True) -> tuple[Tensor, Tensor]:
    """Of the input and the bias."""
    return getattr(torch.ops.fastattn, OP)(*arguments, bias_grad)


def grad_input(*arguments: Tensor) -> Tensor:
    return grads(*arguments, bias_grad=False)[0]


def check(tokens: int, *arguments: Tensor, num_sms: int = 2, seed: int = SEED) -> Tensor:
    with running(tokens, num_sms, seed=seed):
        return int8_cases.check_grad_input(getattr(torch.ops.fastattn, OP), *arguments)


# --- Shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
def test_every_tile(block: int) -> None:
    """A few tokens, one and more of a tile; columns and a sum that are one and more of a tile and of a step."""
    sizes = [(3, 128, 16), (block, 64, 256), (block + 1, 192, 272), (2 * block - 1, 320, 544)]
    dtypes = (DTYPES[0], DTYPES[1], DTYPES[1], DTYPES[0])
    for (m, n, k), granularity, dtype in zip(sizes, ("channel", 64, "tensor", 32), dtypes, strict=True):
        weight, scale = quantised(n, k, granularity, seed=m)
        check(block, normal(m, n, seed=1, dtype=dtype), weight, scale, seed=n)


@each_dtype
@pytest.mark.parametrize("m", [1, 7, 65, 130])
def test_odd_sizes(m: int, dtype: torch.dtype) -> None:
    """Neither rows of the weight, of dY nor of the result are aligned, or only some of them are."""
    for n, k in [(1, 1), (3, 16), (8, 7), (65, 33), (130, 258), (131, 129), (259, 300)]:
        weight, scale = quantised(n, k, "channel", seed=m)
        check(64, normal(m, n, seed=1, dtype=dtype), weight, scale, seed=n)


@pytest.mark.parametrize("n, k", [(7, 129), (130, 100), (64, 24)])
def test_what_lies_between_rows_is_not_read(n: int, k: int) -> None:
    """NaN behind the rows of dY, 127 behind the weight's."""
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
    """A warp's columns share a group; a CTA has up to four, and the last one fewer."""
    for block, k, n in ((64, 128, 64), (128, 384, 200), (64, 640, 520)):
        weight, scale = quantised(n, k, granularity, seed=k)
        check(block, normal(70, n, seed=1, dtype=dtype), weight, scale, seed=n)


@pytest.mark.parametrize("group", [32, 64])
def test_groups_that_are_no_power_of_two_in_number(group: int) -> None:
    weight, scale = quantised(24, 5 * group, group)
    check(64, normal(5, 24, seed=2), weight, scale)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 9, 14, 26])
def test_every_number_of_steps(steps: int) -> None:
    """More than a ring has stages too, and where the last step is not whole."""
    turns = itertools.cycle(DTYPES[:: 1 if steps % 2 else -1])
    for granularity, dtype in zip(("channel", "tensor", 32), turns, strict=False):
        n = steps * STEP - 30
        weight, scale = quantised(n, 96, granularity, seed=steps)
        check(64, normal(9, n, seed=1, dtype=dtype), weight, scale, seed=steps)


def test_views() -> None:
    """Batch dims, rows that are parts of longer rows, transposed and misaligned inputs, and a row that is repeated as
    `out.sum(0)` does it: the bits of a copy."""
    weight, scale = quantised(128, 48, "channel")
    wide = normal(2, 5, 200, seed=1)
    wide[..., 136:] = torch.nan
    of_batch, repeated = normal(5, 128, 2, seed=2).permute(2, 0, 1), wide[0, :1, :128].expand(5, 128)
    for x in (wide[..., :128], wide[:, ::2, 8:136], wide[..., 1:129], of_batch, repeated):
        out = check(64, x, weight, scale)
        with running(64):
            assert torch.equal(out, grad_input(x.contiguous(), weight, scale))


# --- Sums that several teams share ------------------------------------------------------------------------------------


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("block", BLOCKS)
def test_shared_tiles(block: int) -> None:
    """By two teams and by many, in parts that end with a tile or go on into the next; whole tiles that follow."""
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
    """Eleven steps, and fewer or more columns of CTAs that share them out; the last step is not whole."""
    for k in (16, 272, 1552) if num_sms == 8 else (16, 272):
        weight, scale = quantised(680, k, "channel")
        check(64, normal(m, 680, seed=k, dtype=dtype), weight, scale, num_sms=num_sms, seed=k)


@each_dtype
@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("n", [1, 3, 5, 13, 100])
def test_gradient_of_a_bias_of_any_width(n: int, m: int, dtype: torch.dtype) -> None:
    """From one tile of tokens and from several; there is NaN behind the rows of dY."""
    weight, scale = quantised(n, 40, "channel")
    wide = torch.full((m, 104), torch.nan, dtype=dtype, device=DEVICE)
    grad_out = wide[:, :n].copy_(normal(m, n, seed=n, dtype=dtype))
    check(64, grad_out, weight, scale, seed=n)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("block, m", [(64, 5), (64, 300), (256, 300)])
def test_a_bias_takes_no_launch_of_its_own_and_has_the_same_bits_always(block: int, m: int) -> None:
    """And what it adds to the launch has no influence on the input's gradient."""
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
    """Of one tile of tokens the result is shared, of four the bias's gradient."""
    weight, scale = quantised(1024 if m == 20 else 128, 64, "channel")
    grad_out = normal(m, weight.shape[0], seed=1)
    with cuda_runtime.replaced("atom.acq_rel.gpu", "atom.relaxed.gpu"):
        with pytest.raises(EmulatorError) as caught:
            check(64, grad_out, weight, scale, num_sms=4)
        assert caught.value.kind == "race"


# --- Values -----------------------------------------------------------------------------------------------------------


def test_every_int8_number_is_exact() -> None:
    """Also -128, which the quantisation never makes: each is one product with a power of two."""
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
    """One product for each result, of a scale that is a power of two and its inverse: all are exact, whatever the range
    follows, so that no two may be exchanged. Groups beside each other differ by up to 2^60 with bf16."""
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
    """A scale just below a power of two rounds up to it; -128 times as much is still a number."""
    weight = torch.full((16, 16), -128, dtype=torch.int8, device=DEVICE)
    scale = torch.full((16, 1), float.fromhex("0x1.fffp-1"), device=DEVICE)
    with running(64):
        found = grad_input(torch.eye(16, dtype=dtype, device=DEVICE), weight, scale)
    assert torch.equal(found, torch.full_like(found, -128.0))


@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_a_channel_of_zeros(granularity: str | int, dtype: torch.dtype) -> None:
    """Its scale is 1, which is large beside the others: they must not lose precision by it."""
    dense = normal(40, 64, seed=1, dtype=torch.float32, std=0.02)
    dense[3] = 0.0
    weight, scale = reference.quantize_int8(dense, granularity)
    assert bool((scale[3] == 1).all())
    check(64, normal(6, 40, seed=3, dtype=dtype), weight, scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_small_gradients_and_small_scales_do_not_underflow(granularity: str | int) -> None:
    """Weights around 1e-4 are below fp16's normal range; the gradient must be as good as for larger ones."""
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
    """By eleven orders of magnitude: what came before a larger scale is in another unit than what comes after it."""
    weight, scale = quantised(640, 64, granularity, std=1.0)
    exponents = torch.linspace(-9, 2, 640, device=DEVICE)
    scale *= 10 ** (exponents.flip(0) if falling else exponents)[:, None]
    scale[:70] *= 0 if not falling else 1
    for num_sms in (2, 6):
        check(64, normal(6, 640, seed=3, dtype=dtype), weight, scale, num_sms=num_sms)
    # The small ones alone, seen through gradients that are zero elsewhere.
    grad_out = normal(6, 640, seed=4, dtype=dtype)
    grad_out[:, (exponents > -5) if not falling else (exponents < -5)] = 0
    check(64, grad_out, weight, scale)


@each_dtype
def test_scales_of_zeros_give_zeros(dtype: torch.dtype) -> None:
    weight, scale = quantised(16, 64, "channel")
    with running(64):
        assert bool((grad_input(normal(3, 16, seed=1, dtype=dtype), weight, torch.zeros_like(scale)) == 0).all())


def test_fp16_overflows_where_the_exact_result_does() -> None:
    """And nowhere before: sums of 127 * 60000 pass through."""
    weight = torch.full((16, 64), 127, dtype=torch.int8, device=DEVICE)
    weight[8:, 32:] = -127
    scale = torch.full((16, 1), 0.25, device=DEVICE)
    grad_out = torch.full((3, 16), 60000.0, dtype=torch.float16, device=DEVICE)
    grad_out[1, 8:] *= -1
    grad_out[2] = 8.0
    with running(64):
        found = grad_input(grad_out, weight, scale)
    assert torch.equal(found, (grad_out.double() @ (weight.double() * scale.double())).to(torch.float16))
