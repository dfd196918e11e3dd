"""Tests int8 matmuls by cuBLAS (on the emulator by PyTorch) on weights that our kernel dequantises."""

from __future__ import annotations

import contextlib
import itertools
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
from kernel_device import DEVICE, ON_EMULATOR

if ON_EMULATOR:  # on a machine with a GPU, the emulator is not built
    from emulator import cuda_runtime, device, launches, options

pytestmark = MARKS

KERNEL = "int8_dequantize_weight_sm80"


# Compute capability and SMs of the GPUs that the schedulers know: A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
GPUS = ((80, 108), (86, 82), (89, 128), (90, 132), (100, 148), (120, 170))


@contextlib.contextmanager
def dequantising(**changes: Any) -> Iterator[list[Any]]:
    """Forces products to be computed in this way; yields the launches. ``changes`` are options of the emulator."""
    if not EMULATED:
        with native.forced_int8_tile(-1), launches_on_gpu() as kernels:
            yield []
        assert kernels and all(KERNEL in kernel for kernel in kernels)
        return
    checks = options.launching(**{"tracked": True, "uninitialised": True, "seed": 3, **changes})
    gpu = device.emulated(80, num_sms=4)
    with native.forced_int8_tile(-1), gpu, cuda_runtime.raising_faults(), checks, launches.recorded() as found:
        yield found
    assert found and all(KERNEL in launched.report.kernel for launched in found)


@contextlib.contextmanager
def launches_on_gpu() -> Iterator[list[str]]:
    """Yields a list that holds, at the end, the names of fastattn's kernels that ran."""
    if ON_EMULATOR:  # the emulator has no CUPTI
        with launches.recorded() as launched:
            found: list[str] = []
            yield found
        found += [each.report.kernel for each in launched]
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = []
        yield found
        torch.cuda.synchronize()
    found += [event.name for event in profile.events() if "fastattn" in event.name]


def int8_matmul(*arguments: Any) -> Tensor:
    return torch.ops.fastattn.int8_matmul(*arguments, False)


def gradients(*arguments: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.fastattn.int8_matmul_grad_input(*arguments)


@each_dtype
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_products_and_gradients(granularity: str | int, dtype: torch.dtype) -> None:
    """Rows of weights end with a chunk of 16, or within one."""
    for m, n, k in ((1, 8, 128), (65, 130, 256), (3, 1, 384)):
        weight, scale = quantised(n, k, granularity, seed=m)
        with dequantising():
            int8_cases.check_forward(int8_matmul, normal(m, k, seed=1, dtype=dtype), weight, scale)
            int8_cases.check_grad_input(gradients, normal(m, n, seed=2, dtype=dtype), weight, scale)


@each_dtype
@pytest.mark.parametrize("n, k", [(1, 1), (7, 13), (300, 203)])
def test_odd_sizes_and_views(n: int, k: int, dtype: torch.dtype) -> None:
    """Memory between the rows of the weight holds 127, and between those of x NaN."""
    weight, scale = quantised(n, k, "channel")
    wide = torch.full((n, 256), 127, dtype=torch.int8, device=DEVICE)
    wide[:, :k] = weight
    x = torch.full((5, 256), torch.nan, dtype=dtype, device=DEVICE)
    x[:, :k] = normal(5, k, seed=1, dtype=dtype)
    with dequantising():
        out = int8_cases.check_forward(int8_matmul, x[:, :k], wide[:, :k], scale)
        assert torch.equal(out, int8_matmul(x[:, :k].contiguous(), weight, scale, None, None, "none"))
        int8_cases.check_grad_input(gradients, normal(2, 3, n, seed=2, dtype=dtype), wide[:, :k], scale)


@pytest.mark.slow
@only_emulated
def test_blocks_fit_into_the_workspace() -> None:
    """260 rows of 2^17 weights are more than 2^25 weights, so there are two blocks."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (260, 2**17), dtype=torch.int8, generator=generator)
    scale = torch.full((260, 1), 2.0**-9)
    x = torch.randint(-1, 2, (2, 2**17), generator=generator).to(torch.bfloat16)
    with dequantising(tracked=False, uninitialised=False) as found:
        out = int8_matmul(x, weight, scale, None, None, "none")
    assert len(found) == 2
    exact = x.float() @ weight.float().t() * 2.0**-9  # no sum exceeds 2^24
    assert (out.float() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_what_follows_a_product_is_rounded_once() -> None:
    """Our kernel then runs even where cuBLAS is forced: it adds bias, activation and residual in fp32."""
    weight, scale = quantised(48, 64, "channel")
    recorded = launches.recorded() if EMULATED else launches_on_gpu()
    with native.forced_int8_tile(-1), recorded as found:
        for arguments in (epilogue("none", 5, 48), (normal(48, seed=1), None, "none"), (None, None, "relu")):
            int8_cases.check_forward(int8_matmul, normal(5, 64, seed=1), weight, scale, *arguments)
    kernels = [launched.report.kernel for launched in found] if EMULATED else found
    assert kernels and not any(KERNEL in kernel for kernel in kernels)


@pytest.mark.parametrize("arch, num_sms", GPUS)
def test_few_tokens_are_not_dequantised(arch: int, num_sms: int) -> None:
    """For layers of any size, dequantising would move five bytes for one."""
    for tokens, outputs, depth in itertools.product((1, 4, 16), SMALL_AND_LARGE, SMALL_AND_LARGE):
        for op, has_groups in itertools.product(("int8_matmul", "int8_matmul_grad_input"), (False, True)):
            product = native.Int8Product(op, torch.bfloat16, has_groups, False, tokens, outputs, depth)
            kernel = native.int8_matmul_kernel(product, arch, num_sms)
            assert kernel in native.KERNELS, (product, kernel)


SMALL_AND_LARGE = (64, 128, 256, 768, 1024, 2048, 4096, 14336)


def test_a_matmul_of_each_block_is_counted() -> None:
    """A weight of 16384 x 8192 is dequantised in four blocks, at the cost of four layers with a quarter of it."""
    for op, count, sizes in (
        ("int8_matmul", 4, (2048, 16384, 8192)),
        ("int8_matmul_grad_input", 4, (512, 16384, 8192)),
    ):
        product = native.Int8Product(op, torch.bfloat16, False, False, *sizes)
        block = product._replace(outputs=product.outputs // count)
        whole, part = (native.int8_ways(each, 90, 132)[native.DEQUANTISED] for each in (product, block))
        assert whole == pytest.approx(count * part)


def test_the_bias_gradient_costs_a_kernel_beside_cublas() -> None:
    product = native.Int8Product("int8_matmul_grad_input", torch.bfloat16, True, False, 4096, 4096, 4096)
    alone, with_bias = (native.int8_ways(product._replace(has_epilogue=bias), 90, 132) for bias in (False, True))
    read = 2 * 4096 * 4096 / 4.8e12 * 1e6
    assert with_bias[native.DEQUANTISED] >= alone[native.DEQUANTISED] + read
    (kernel,) = alone.keys() - {native.DEQUANTISED}
    assert with_bias[kernel] == alone[kernel]


@only_emulated
def test_the_fastest_way_is_taken_and_told() -> None:
    """Scales of groups slow down an A100's kernels but not cuBLAS, which multiplies many tokens faster."""
    weight = fastattn.quantize_int8(torch.randn(512, 512), granularity=64)
    few, many = torch.randn(8, 512).bfloat16(), torch.randn(4096, 512).bfloat16()
    with device.emulated(80, num_sms=8), fastattn.use_backend("cuda"):
        product = native.Int8Product("int8_matmul", torch.bfloat16, True, False, 4096, 512, 512)
        ways = native.int8_ways(product, 80, 8)
        assert min(ways, key=lambda way: ways[way]) == native.DEQUANTISED and len(ways) == 2
        explained = fastattn.explain(fastattn.int8_linear, many, weight)
        assert explained.kernel == native.DEQUANTISED and "µs" not in str(explained)
        with fastattn.record() as calls:
            out = fastattn.int8_linear(many, weight)
        assert [call.kernel for call in calls] == [native.DEQUANTISED]
        assert torch.equal(out, many @ weight.dequantize(torch.bfloat16).t())
        of_few = fastattn.explain(fastattn.int8_linear, few, weight)
        assert of_few.kernel in native.KERNELS
        with_bias = fastattn.explain(fastattn.int8_linear, many, weight, torch.randn(512).bfloat16())
        assert with_bias.kernel in native.KERNELS


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
def test_a_mapped_call_is_explained_by_all_its_tokens() -> None:
    """torch.vmap hides the samples, but one kernel multiplies all of their tokens."""
    weight = fastattn.quantize_int8(torch.randn(2048, 2048), granularity=64)
    x = torch.randn(512, 8, 2048).bfloat16()
    with device.emulated(90, num_sms=132), fastattn.use_backend("cuda"):
        of_one = fastattn.explain(fastattn.int8_linear, x[0], weight)
        of_all = fastattn.explain(fastattn.int8_linear, x.flatten(0, 1), weight)
        mapped = fastattn.explain(torch.vmap(lambda each: fastattn.int8_linear(each, weight)), x)
        assert mapped.kernel == of_all.kernel != of_one.kernel
        residual = torch.zeros(512, 8, 2048).bfloat16()
        add = torch.vmap(lambda added: fastattn.int8_linear(x[0], weight, residual=added))
        unmapped = fastattn.explain(fastattn.int8_linear, x.flatten(0, 1), weight, residual=residual.flatten(0, 1))
        assert fastattn.explain(add, residual).kernel == unmapped.kernel


@only_emulated
def test_a_mapped_gradient_is_recorded_as_what_runs() -> None:
    """Each sample then has its own bias gradient, which the kernel does not compute."""
    weight, bias = fastattn.quantize_int8(torch.randn(64, 64)), torch.randn(64).half()
    x = torch.randn(40, 3, 64).half()

    def loss(each: Tensor, bias: Tensor) -> Tensor:
        return fastattn.int8_linear(each, weight, bias).float().sum()

    with device.emulated(90, num_sms=4), fastattn.use_backend("cuda"), fastattn.record() as calls:
        torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(x, bias)
    expected = [
        native.int8_matmul_kernel(native.Int8Product(op, torch.float16, False, has_bias, 120, 64, 64), 90, num_sms=4)
        for op, has_bias in (("int8_matmul", True), ("int8_matmul_grad_input", False))
    ]
    assert [call.kernel for call in calls] == expected


@only_emulated
def test_a_product_with_the_weight_itself_is_explained_as_the_gradient() -> None:
    """DTensor writes a linear layer's backward pass as ``grad @ weight``."""
    weight = fastattn.nn.Int8Linear(256, 128, dtype=torch.float16).weight
    grad_out = torch.randn(20, 128).half()
    with device.emulated(90, num_sms=4), fastattn.use_backend("cuda"), fastattn.record() as calls:
        explained = fastattn.explain(torch.mm, grad_out, weight)
        torch.mm(grad_out, weight)
    assert "grad_input" in explained.kernel and [call.kernel for call in calls] == [explained.kernel]


@only_emulated
def test_a_forced_way_ends_with_its_block() -> None:
    weight, x = fastattn.quantize_int8(torch.randn(64, 64)), torch.randn(4, 64).half()
    with device.emulated(90, num_sms=4), fastattn.use_backend("cuda"), native.forced_int8_tile(-1):
        with native.forced_int8_tile(80, 32):
            assert fastattn.explain(fastattn.int8_linear, x, weight).kernel == "int8_matmul_sm80<32, float16>"
        assert fastattn.explain(fastattn.int8_linear, x, weight).kernel == native.DEQUANTISED


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
    """For our kernels, 37 columns are copied into longer rows, whose padding may hold NaN."""
    padded = torch.full((37, 40), torch.nan, dtype=dtype)
    padded[:, :37] = torch.eye(37)
    if not bool((padded[:, :37] @ torch.eye(37, dtype=dtype)).isfinite().all()):
        pytest.skip("torch's own product multiplies what pads rows on this CPU")
    weight, scale = quantised(37, 37, "channel")
    eye = torch.eye(37, dtype=dtype, device=DEVICE)
    for _ in range(3):
        torch.full((64, 64), torch.nan, dtype=dtype, device=DEVICE)  # frees NaN memory that the copy may get
        with dequantising():
            out = int8_matmul(eye, weight, scale, None, None, "none")
            grad, _ = gradients(eye, weight, scale, False)
        assert bool(out.isfinite().all()) and bool(grad.isfinite().all())
