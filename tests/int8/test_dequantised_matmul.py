"""Int8 matmuls by cuBLAS (on the emulator PyTorch's own matmul), from weights that our kernel dequantises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import int8_cases
from cuda_kernels import EMULATED, MARKS, each_dtype, only_emulated
from fastattn import native
from int8_cases import GRANULARITIES, epilogue, normal, quantised
from kernel_device import DEVICE

if EMULATED:  # a machine with a GPU needs no compiler to build the emulator with
    from emulator import cuda_runtime, device, launches, options

pytestmark = MARKS

KERNEL = "int8_dequantize_weight_sm80"


@contextlib.contextmanager
def dequantising(**changes: Any) -> Iterator[list[Any]]:
    """Products within are computed in this way; gives the list of launches. ``changes``: options of the emulator."""
    if not EMULATED:
        with native.forced_int8_tile(-1):
            yield []
        return
    checks = options.launching(**{"tracked": True, "uninitialised": True, "seed": 3, **changes})
    gpu = device.emulated(80, num_sms=4)
    with native.forced_int8_tile(-1), gpu, cuda_runtime.raising_faults(), checks, launches.recorded() as found:
        yield found
    assert found and all(KERNEL in launched.report.kernel for launched in found)


def int8_matmul(*arguments: Any) -> Tensor:
    return torch.ops.fastattn.int8_matmul(*arguments, False)


def gradients(*arguments: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.fastattn.int8_matmul_grad_input(*arguments)


@each_dtype
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_products_and_gradients(granularity: str | int, dtype: torch.dtype) -> None:
    """Rows of weights that end with a chunk of 16, or within one."""
    for m, n, k in ((1, 8, 128), (65, 130, 256), (3, 1, 384)):
        weight, scale = quantised(n, k, granularity, seed=m)
        with dequantising():
            int8_cases.check_forward(int8_matmul, normal(m, k, seed=1, dtype=dtype), weight, scale)
            int8_cases.check_grad_input(gradients, normal(m, n, seed=2, dtype=dtype), weight, scale)


@each_dtype
@pytest.mark.parametrize("n, k", [(1, 1), (7, 13), (300, 203)])
def test_odd_sizes_and_views(n: int, k: int, dtype: torch.dtype) -> None:
    """127 stands between the rows of the weight, NaN between those of x."""
    weight, scale = quantised(n, k, "channel")
    wide = torch.full((n, 256), 127, dtype=torch.int8, device=DEVICE)
    wide[:, :k] = weight
    x = torch.full((5, 256), torch.nan, dtype=dtype, device=DEVICE)
    x[:, :k] = normal(5, k, seed=1, dtype=dtype)
    with dequantising():
        out = int8_cases.check_forward(int8_matmul, x[:, :k], wide[:, :k], scale)
        assert torch.equal(out, int8_matmul(x[:, :k].contiguous(), weight, scale, None, None, "none"))
        int8_cases.check_grad_input(gradients, normal(2, 3, n, seed=2, dtype=dtype), wide[:, :k], scale)


@only_emulated
def test_blocks_fit_into_the_workspace() -> None:
    """260 rows of 2^17 weights are more than 2^25: two blocks."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (260, 2**17), dtype=torch.int8, generator=generator)
    scale = torch.full((260, 1), 2.0**-9)
    x = torch.randint(-1, 2, (2, 2**17), generator=generator).to(torch.bfloat16)
    with dequantising(tracked=False, uninitialised=False) as found:
        out = int8_matmul(x, weight, scale, None, None, "none")
    assert len(found) == 2
    exact = x.double() @ weight.double().t() * 2.0**-9
    assert (out.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_what_follows_a_product_is_rounded_once() -> None:
    """By a kernel of ours, which adds it in fp32, also where cuBLAS is asked for."""
    weight, scale = quantised(48, 64, "channel")
    with native.forced_int8_tile(-1), launches.recorded() if EMULATED else contextlib.nullcontext([]) as found:
        for arguments in (epilogue("none", 5, 48), (normal(48, seed=1), None, "none"), (None, None, "relu")):
            int8_cases.check_forward(int8_matmul, normal(5, 64, seed=1), weight, scale, *arguments)
    assert not any(KERNEL in launched.report.kernel for launched in found)


@only_emulated
def test_the_fastest_way_is_taken_and_told() -> None:
    """Scales of groups cost our kernels more than cuBLAS, which multiplies many tokens faster."""
    weight = fastattn.quantize_int8(torch.randn(2048, 2048), granularity=64)
    few, many = torch.randn(8, 2048).bfloat16(), torch.randn(4096, 2048).bfloat16()
    with device.emulated(90, num_sms=132), fastattn.use_backend("cuda"):
        ways = native.int8_ways("int8_matmul", 90, 132, torch.bfloat16, True, False, 4096, 2048, 2048)
        assert min(ways, key=lambda way: ways[way]) == native.DEQUANTISED and len(ways) == 2
        explained = fastattn.explain(fastattn.int8_linear, many, weight)
        assert explained.kernel == native.DEQUANTISED and explained.predicted == ways
        for way, microseconds in ways.items():
            assert f"predicted: {way}: {microseconds:.1f} µs" in str(explained)
        with fastattn.record() as calls:
            out = fastattn.int8_linear(many, weight)
        assert [call.kernel for call in calls] == [native.DEQUANTISED]
        assert torch.equal(out, many @ weight.dequantize(torch.bfloat16).t())
        of_few = fastattn.explain(fastattn.int8_linear, few, weight)
        assert of_few.kernel in native.KERNELS and of_few.predicted[of_few.kernel] == min(of_few.predicted.values())
        with_bias = fastattn.explain(fastattn.int8_linear, many, weight, torch.randn(2048).bfloat16())
        assert list(with_bias.predicted) == [with_bias.kernel]


@only_emulated
def test_gradients_take_it_too() -> None:
    weight = fastattn.quantize_int8(torch.randn(256, 128))
    x = torch.randn(20, 128).bfloat16().requires_grad_()
    grad_out = torch.randn(20, 256).bfloat16()
    with dequantising(), fastattn.use_backend("cuda"), fastattn.record() as calls:
        fastattn.int8_linear(x, weight).backward(grad_out)
    assert [call.kernel for call in calls] == [native.DEQUANTISED] * 2
    assert x.grad is not None and torch.equal(x.grad, grad_out @ weight.dequantize(torch.bfloat16))


@only_emulated
def test_a_forced_way_is_told_of_calls_seen_before() -> None:
    weight, x = fastattn.quantize_int8(torch.randn(64, 64)), torch.randn(4, 64).half()
    with device.emulated(90, num_sms=4), fastattn.use_backend("cuda"):
        before = fastattn.explain(fastattn.int8_linear, x, weight).kernel
        with native.forced_int8_tile(-1):
            assert fastattn.explain(fastattn.int8_linear, x, weight).kernel == native.DEQUANTISED
        assert fastattn.explain(fastattn.int8_linear, x, weight).kernel == before


@each_dtype
def test_what_pads_misaligned_rows_is_not_multiplied(dtype: torch.dtype) -> None:
    """37 columns are copied into rows with room behind them for our kernels; what stands there may be NaN."""
    weight, scale = quantised(37, 37, "channel")
    eye = torch.eye(37, dtype=dtype, device=DEVICE)
    for _ in range(3):
        torch.full((64, 64), torch.nan, dtype=dtype, device=DEVICE)  # memory that the copy may get
        with dequantising():
            out = int8_matmul(eye, weight, scale, None, None, "none")
            grad, _ = gradients(eye, weight, scale, False)
        assert bool(out.isfinite().all()) and bool(grad.isfinite().all())
