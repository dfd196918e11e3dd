"""Tests the Hopper kernels of the int8 matmul with int8 activations, and the kernel that quantises tokens before them,
against the oracle over the same int8 tokens.

They run on a Hopper GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds. Each
test forces a tile.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import instances
import proof
from cuda_kernels import DTYPES, EMULATED, MARKS, NEEDS_HOPPER, each_dtype, only_emulated
from fastattn import native, reference
from int8_cases import GRANULARITIES, assert_near_int8_oracle, normal, quantised
from int8_kernels import INT8_ACTIVATIONS, running_sm90
from kernel_device import DEVICE
from test_cuda_int8_activations import matmul

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device

pytestmark = [*MARKS, NEEDS_HOPPER]

SEED = 11
STEP = 128
ROWS = instances.rows_of("int8_matmul/instances/gemm_s8_sm90.cu")
PLAIN_BLOCKS = sorted({tokens for tokens, has_groups, _ in ROWS if not has_groups})
GROUPED_BLOCKS = sorted({tokens for tokens, has_groups, _ in ROWS if has_groups})
GROUPS = [each for each in GRANULARITIES if isinstance(each, int)]

# Another kernel must quantise the tokens before the matmul.
running = functools.partial(running_sm90, INT8_ACTIVATIONS, seed=SEED)


def check(tokens: int, *arguments: Any, num_sms: int = 2, seed: int = SEED) -> Tensor:
    with running(tokens, num_sms, seed=seed):
        out = matmul(*arguments)
    assert_near_int8_oracle(out, *arguments)
    return out


def integers(n: int, k: int, seed: int = 0) -> Tensor:
    """Draws all int8 numbers, -128 included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator).to(DEVICE)


def rounded_products(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns the exact int64 sums, rounded to fp32, times the weight's and the token's scale, rounded to the dtype."""
    proof.compared()
    q, token_scale = (each.to(DEVICE) for each in reference.quantize_rows(x))
    sums = q.cpu().long() @ weight.cpu().long().t()
    return (sums.to(DEVICE).float() * scale[:, 0] * token_scale[:, None]).to(x.dtype)


# --- Exact results ----------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("block", PLAIN_BLOCKS)
def test_every_tile_is_exact(block: int, dtype: torch.dtype) -> None:
    """Sizes are a few tokens, and a tile or a step and a little less or more of tokens, outputs and columns."""
    for m, n, k in [(3, 8, 16), (block, 256, 128), (block + 1, 264, 400), (2 * block - 1, 520, 272)]:
        weight, scale, x = integers(n, k, seed=m), quantised(n, 32, "channel")[1], normal(m, k, seed=1, dtype=dtype)
        with running(block, seed=n):
            assert torch.equal(matmul(x, weight, scale), rounded_products(x, weight, scale))


@each_dtype
@pytest.mark.parametrize("block", GROUPED_BLOCKS)
def test_every_tile_of_groups(block: int, dtype: torch.dtype) -> None:
    check(block, normal(block + 1, 384, seed=1, dtype=dtype), *quantised(264, 384, 64))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8, 9, 10, 17])
def test_every_number_of_steps_is_exact(steps: int) -> None:
    """Steps range from one to more than the ring's stages; the last may be partial."""
    for k in (steps * STEP, steps * STEP - 16, steps * STEP - 112):
        weight, scale, x = integers(72, k, seed=steps), quantised(72, 32, "channel")[1], normal(9, k, seed=1)
        with running(64, seed=steps):
            assert torch.equal(matmul(x, weight, scale), rounded_products(x, weight, scale))


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("block", PLAIN_BLOCKS)
def test_shared_tiles_are_exact(block: int) -> None:
    """Two clusters or more split tiles, and whole tiles follow. Large tiles also have splits that cross tiles; small
    ones are bound by L2, where this gains nothing. Sums are integers, so splits change no bit."""
    cases = [(4, block - 3, 256, 3840), (12, 20, 600, 6400), (6, block + 9, 304, 3072), (4, 5, 1280, 2048)]
    if block == 64:  # L2 binds the smallest tile, which is split at other sizes
        cases = [(8, 61, 1280, 2048), (10, 20, 1536, 6400), (6, 73, 304, 3072), (8, 5, 1280, 2048)]
    if block >= 192:
        cases.append((10, 20, 600, 6400))
    for i, (num_sms, m, n, k) in enumerate(cases):
        weight, scale = integers(n, k, seed=i), quantised(n, 32, "channel")[1]
        x = normal(m, k, seed=1, dtype=DTYPES[i % 2])
        expected = rounded_products(x, weight, scale)
        for launching in ({"seed": SEED + i}, {"seed": SEED + i + 1, "workers": 1}):
            with running(block, num_sms, **launching) as found:
                assert torch.equal(matmul(x, weight, scale), expected)
                assert native.int8_matmul_schedule("int8_matmul_s8", 90, num_sms, False, m, n, k).slots > 0
            assert found[-1].grid[0] == num_sms


@each_dtype
def test_every_weight_is_at_its_position(dtype: torch.dtype) -> None:
    """Each row of x is one element of K: products are exact, so a weight at a wrong position shows."""
    n, k = 304, 208
    weight, x = integers(n, k, seed=1), torch.eye(k, dtype=dtype, device=DEVICE)
    for block, group in ((64, 1), (256, 1), (128, 2)):
        columns = k if group == 1 else 192
        scale = torch.full((n, 1 if group == 1 else columns // 32), 127.0, device=DEVICE)
        expected = weight[:, :columns].t().to(dtype)
        with running(block, num_sms=4):
            found = matmul(x[:columns, :columns], weight[:, :columns].contiguous(), scale / 127)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("k", [1024, pytest.param(2**17, marks=pytest.mark.slow)])
def test_the_longest_sums(k: int) -> None:
    """Numbers are -128 and 127: the largest sums that int32 must hold."""
    weight = torch.full((8, k), -128, dtype=torch.int8, device=DEVICE)
    weight[1::3] = 127
    x = torch.ones(2, k, dtype=torch.bfloat16, device=DEVICE)
    x[1] = -1.0
    scale = torch.full((8, 1), 2.0**-24, device=DEVICE)
    with running(64, num_sms=8, uninitialised=False, tracked=False):
        assert torch.equal(matmul(x, weight, scale), rounded_products(x, weight, scale))


# --- Scales, epilogues, values ----------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_granularities(granularity: str | int, dtype: torch.dtype) -> None:
    """The last step may be partial, and the number of groups no power of two."""
    blocks = PLAIN_BLOCKS[:2] if isinstance(granularity, str) else GROUPED_BLOCKS
    for block, k in [(blocks[0], 384), (blocks[1], 640), (blocks[0], granularity if granularity in GROUPS else 32)]:
        k = 5 * k if k in GROUPS else k
        m, n = block + 5, 136
        weight, scale = quantised(n, k, granularity, seed=k)
        extra = normal(n, seed=2, dtype=dtype), normal(m, n, seed=3, dtype=dtype), "gelu"
        check(block, normal(m, k, seed=1, dtype=dtype), weight, scale, *extra, seed=k)


@only_emulated
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("num_sms, m, n, k", [(4, 61, 256, 1280), (8, 20, 600, 2560), (6, 137, 304, 1536)])
def test_shared_tiles_of_groups(num_sms: int, m: int, n: int, k: int, group: int) -> None:
    """The bits do not depend on which cluster comes last."""
    weight, scale = quantised(n, k, group)
    x = normal(m, k, seed=1)
    block = GROUPED_BLOCKS[m > 64]
    out = check(block, x, weight, scale, num_sms=num_sms)
    for launching in ({"seed": SEED + 1}, {"seed": SEED + 2, "workers": 1}):
        with running(block, num_sms, **launching):
            assert torch.equal(out, matmul(x, weight, scale))


def test_a_group_may_be_nan_or_infinite_alone() -> None:
    """Scales after the last group are not read: they may belong to another row."""
    weight, scale = quantised(24, 96, 32)
    scale[3, 1], scale[4, 2] = torch.nan, torch.inf
    with running(64):
        out = matmul(normal(5, 96, seed=1), weight, scale)
    assert bool(out[:, 3].isnan().all()) and bool(out[:, 4].isinf().all())
    assert bool(out[:, [i for i in range(24) if i not in (3, 4)]].isfinite().all())


# --- The kernel that quantises, and what is launched ------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("m", [1, 5, 517])
def test_both_ways_quantise_alike(m: int, dtype: torch.dtype) -> None:
    """A matmul with the identity shows every quantised number. From 512 tokens on, each warp quantises one."""
    k = 144
    weight, scale = 127 * torch.eye(k, dtype=torch.int8, device=DEVICE), torch.full((k, 1), 1 / 127, device=DEVICE)
    x = normal(m, k, seed=m, dtype=dtype) * torch.logspace(-3, 3, m, device=DEVICE)[:, None].to(dtype)
    x[m // 2] = 0.0
    with running(64):
        here = matmul(x, weight, scale)
    with native.forced_int8_tile(80):
        there = matmul(x, weight, scale)
    assert torch.equal(here, there) and torch.equal(here, rounded_products(x, weight, scale))


@only_emulated
@pytest.mark.parametrize("block", PLAIN_BLOCKS)
def test_no_bank_conflicts(block: int) -> None:
    weight, scale = quantised(512, 256, "channel")
    with running(block, num_sms=4) as found:
        matmul(normal(block, 256, seed=1), weight, scale)
    assert [launched.report.bank_conflicts for launched in found] == [0, 0]


@only_emulated
@pytest.mark.parametrize("m, n, k", [(1, 256, 1280), (130, 72, 528)])
def test_explain_names_the_tile_that_is_launched(m: int, n: int, k: int) -> None:
    weight, x = fastattn.Int8Weight(*quantised(n, k, "channel")), normal(m, k, seed=1)
    with running(64, num_sms=4) as found:
        explained = fastattn.explain(fastattn.int8_linear, x, weight, input_precision="int8")
        fastattn.int8_linear(x, weight, input_precision="int8")
        dealt = native.int8_matmul_schedule("int8_matmul_s8", 90, 4, False, m, n, k)
    assert (explained.backend, explained.kernel) == ("cuda", f"int8_matmul_s8_sm90<64, {str(x.dtype)[6:]}>")
    assert (found[-1].grid[0], dealt.block_m) == (dealt.ctas, 64)


@only_emulated
def test_as_many_tokens_as_32_bits_count() -> None:
    """No 24-bit counter counts tokens that an earlier kernel has quantised. The test only explains the calls."""
    weight = fastattn.Int8Weight(*quantised(1024, 1024, "channel"))
    with device.emulated(90, num_sms=132):
        for tokens, backend in ((2**24, "cuda"), (2**31 - 1, "cuda"), (2**31, "torch")):
            x = torch.zeros(1, 1024, dtype=torch.bfloat16, device=DEVICE).expand(tokens, 1024)
            explained = fastattn.explain(fastattn.int8_linear, x, weight, input_precision="int8")
            assert explained.backend == backend
    assert "x has 2147483648 rows" in explained.rejected["cuda"]


@only_emulated
@pytest.mark.parametrize("granularity", ["channel", 64])
def test_a_product_that_does_not_wait_for_the_tokens_is_found(granularity: str | int) -> None:
    """The matmul begins while the kernel that quantises tokens still runs."""
    weight, scale = quantised(72, 256, granularity)
    missing = cuda_runtime.replaced("griddepcontrol.wait;", "", "int8_matmul_s8_sm90")
    with pytest.raises(EmulatorError, match="the launch before") as caught, missing, running(64):
        matmul(normal(70, 256, seed=1), weight, scale)
    assert caught.value.kind == "race"
