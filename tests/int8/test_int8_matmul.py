"""Tests what the int8 matmul and its gradients do on every family of kernels, against the oracle.

They run on a GPU if there is one, else on the emulator. Other modules test what a family has of its own.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import int8_cases
from cuda_kernels import each_dtype, only_emulated
from fastattn import reference
from int8_cases import ACTIVATION_NAMES, GRANULARITIES, epilogue, normal, quantised
from int8_kernels import GRADIENT, Kernels, on
from kernel_device import DEVICE

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")

each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
on_cuda = on("sm_80", "sm_90")
on_all = on("sm_80", "sm_90", "triton")
on_triton_slowly = on("sm_80", "sm_90", slow=("triton",))


# --- Shapes -----------------------------------------------------------------------------------------------------------


@on_cuda
@each_dtype
@pytest.mark.parametrize("m", [1, 7, 65, 130])
def test_odd_sizes(m: int, dtype: torch.dtype, kernels: Kernels) -> None:
    """Not all rows of weight, input and result are aligned."""
    for n, k in [(1, 1), (3, 16), (8, 7), (65, 33), (130, 258), (131, 129), (259, 300)]:
        weight, scale = quantised(n, k, "channel", seed=m)
        extra = epilogue("silu", m, n, dtype)
        kernels.check_forward(normal(m, k, seed=1, dtype=dtype), weight, scale, *extra, how={"seed": n})
        kernels.check_gradients(normal(m, n, seed=2, dtype=dtype), weight, scale, seed=n)


@on_cuda
@pytest.mark.parametrize("n, k", [(7, 129), (130, 100), (64, 24)])
def test_what_lies_between_rows_is_not_read(n: int, k: int, kernels: Kernels) -> None:
    """Memory after the rows of x, the gradient and the residual holds NaN, and after the weight's rows 127."""
    m, room = 5, 160
    weight, scale = quantised(n, k, "channel")
    wide = torch.full((n, room), 127, dtype=torch.int8, device=DEVICE)
    wide[:, :k] = weight

    def with_room(rows: Tensor) -> Tensor:
        longer = torch.full((m, room), torch.nan, dtype=rows.dtype, device=DEVICE)
        longer[:, : rows.shape[1]] = rows
        return longer[:, : rows.shape[1]]

    x, grad_out = normal(m, k, seed=1), normal(m, n, seed=2)
    bias, residual, activation = epilogue("gelu", m, n)
    out = kernels.check_forward(with_room(x), wide[:, :k], scale, bias, with_room(residual), activation)
    assert torch.equal(out, kernels.matmul(x, weight, scale, bias, residual, activation))
    grad_x = kernels.check_gradients(with_room(grad_out), wide[:, :k], scale)
    assert torch.equal(grad_x, kernels.grad_input(grad_out, weight, scale))


@on_cuda
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_that_are_no_power_of_two_in_number(group: int, kernels: Kernels) -> None:
    """Rows of scales are no multiple of 16 bytes, and the last step has fewer groups than the others."""
    weight, scale = quantised(24, 5 * group, group)
    kernels.check_forward(normal(5, 5 * group, seed=1), weight, scale)
    kernels.check_gradients(normal(5, 24, seed=2), weight, scale)


@on("sm_80", "triton")
@pytest.mark.parametrize("m, n, k", [(0, 8, 16), (3, 0, 16), (3, 8, 0), (0, 0, 0)])
def test_empty(m: int, n: int, k: int, kernels: Kernels) -> None:
    weight, scale = torch.zeros(n, k, dtype=torch.int8, device=DEVICE), torch.ones(n, 1, device=DEVICE)
    bias = normal(n, seed=2)
    int8_cases.check_forward(kernels.ops.int8_matmul, normal(m, k, seed=1), weight, scale, bias, activation="relu")
    int8_cases.check_grad_input(kernels.ops.int8_matmul_grad_input, normal(m, n, seed=3), weight, scale)


@on_all
def test_one_dimensional_input(kernels: Kernels) -> None:
    weight, scale = quantised(24, 32, "channel")
    assert kernels.check_forward(normal(32, seed=1), weight, scale).shape == (24,)
    assert kernels.check_gradients(normal(24, seed=1), weight, scale).shape == (32,)


@on_triton_slowly
@pytest.mark.parametrize("granularity", ["tensor", "channel", 64])
def test_leading_dims_and_views(granularity: str | int, kernels: Kernels) -> None:
    """Batch dims, rows of longer rows, transposed, misaligned, overlapping and repeated inputs have the bits of a
    contiguous copy."""
    weight, scale = quantised(48, 128, granularity)
    turned = quantised(128, 64, granularity)
    wide = normal(2, 5, 200, seed=1)
    wide[..., 136:] = torch.nan
    residual, bias = normal(2, 5, 104, seed=3)[..., :48], normal(49, seed=4)[1:]
    for x in (
        wide[..., :128],
        wide[:, ::2, 8:136],
        wide[..., 1:129],
        wide[:1, :1, :128].expand(2, 5, 128),
        normal(300, seed=5).as_strided((2, 5, 128), (80, 16, 1)),
        normal(5, 128, 2, seed=2).permute(2, 0, 1),
        normal(128, 6, seed=2).t(),
    ):
        added = residual[:, : x.shape[1]] if x.dim() == 3 else None
        out = kernels.check_forward(x, weight, scale, bias, added)
        contiguous = None if added is None else added.contiguous()
        assert torch.equal(out, kernels.matmul(x.contiguous(), weight, scale, bias, contiguous))
        assert torch.equal(kernels.check_gradients(x, *turned), kernels.grad_input(x.contiguous(), *turned))
    shifted = torch.zeros(weight.numel() + 1, dtype=torch.int8, device=DEVICE)[1:].view(weight.shape).copy_(weight)
    kernels.check_forward(wide[..., :128], shifted, scale)
    kernels.check_forward(wide[..., :128], weight[:1].expand(48, 128), scale)


# --- Epilogues --------------------------------------------------------------------------------------------------------


@on_cuda
@each_dtype
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_epilogues(activation: str, dtype: torch.dtype, kernels: Kernels) -> None:
    """Sums reach from -10 to 10, into every activation's tails. On more SMs, CTAs split the tile."""
    m, n, k = 4, 48, 640
    weight, scale = quantised(n, k, "channel", std=0.1)
    x = normal(m, k, seed=1, std=(1000 / k) ** 0.5, dtype=dtype)
    bias, residual, _ = epilogue(activation, m, n, dtype)
    for with_bias, with_residual, more in itertools.product([False, True], [False, True], [1, 4]):
        added = bias if with_bias else None, residual if with_residual else None
        kernels.check_forward(x, weight, scale, *added, activation, how={"num_sms": more * kernels.num_sms})


@on_cuda
@each_dtype
@each_granularity
@pytest.mark.parametrize("m", [1, 40, 70, 97])
def test_swiglu(m: int, granularity: str | int, dtype: torch.dtype, kernels: Kernels) -> None:
    """A tile pairs gates with ups where their number is less than a tile's, equal, or more. 70 tokens are two tiles."""
    for outputs, k in ((7, 128), (64, 256), (128, 256), (137, 384)):
        weight, scale = quantised(2 * outputs, k, granularity, seed=m, std=0.1)
        x, extra = normal(m, k, seed=1, dtype=dtype), epilogue("swiglu", m, 2 * outputs, dtype)
        kernels.check_forward(x, weight, scale, *extra, how={"seed": outputs, "tokens": 64 if m < 97 else 128})


@on_triton_slowly
@pytest.mark.parametrize("activation", ACTIVATION_NAMES[1:])
def test_nan_passes_through_the_epilogue(activation: str, kernels: Kernels) -> None:
    weight, scale = quantised(16, 32, "channel")
    x = normal(3, 32, seed=1)
    x[1, 4] = torch.nan
    out = kernels.matmul(x, weight, scale, activation=activation)
    assert bool(out[1].isnan().all()) and not bool(out[[0, 2]].isnan().any())


# --- Gradients of a bias ----------------------------------------------------------------------------------------------


@on_cuda
@each_dtype
@pytest.mark.parametrize("are_many_sms", [False, True])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 130, 300])
def test_gradient_of_a_bias(m: int, are_many_sms: bool, dtype: torch.dtype, kernels: Kernels) -> None:
    """There are eleven steps, the last of them partial, and fewer or more tiles of columns, which divide the steps."""
    num_sms = 8 if are_many_sms else kernels.num_sms
    for k in (16, 272, 1552) if are_many_sms else (16, 272):
        weight, scale = quantised(680, k, "channel")
        kernels.check_gradients(normal(m, 680, seed=k, dtype=dtype), weight, scale, num_sms=num_sms, seed=k)


@on_cuda
@each_dtype
@pytest.mark.parametrize("m", [1, 130])
@pytest.mark.parametrize("n", [1, 3, 5, 13, 100])
def test_gradient_of_a_bias_of_any_width(n: int, m: int, dtype: torch.dtype, kernels: Kernels) -> None:
    """There are one or several tiles of tokens; memory after the rows of dY holds NaN."""
    weight, scale = quantised(n, 40, "channel")
    wide = torch.full((m, 104), torch.nan, dtype=dtype, device=DEVICE)
    grad_out = wide[:, :n].copy_(normal(m, n, seed=n, dtype=dtype))
    kernels.check_gradients(grad_out, weight, scale, seed=n)


@only_emulated
@on("sm_80", slow=("sm_90",))
@pytest.mark.parametrize("m, tokens", [(5, 64), (300, 64), (300, 256)])
def test_a_bias_takes_no_launch_of_its_own_and_has_the_same_bits_always(m: int, tokens: int, kernels: Kernels) -> None:
    """Computing it does not change the input's gradient."""
    weight, scale = quantised(680, 272, "channel")
    grad_out, results = normal(m, 680, seed=1), []
    for how in ({"seed": 1}, {"seed": 2, "workers": 1}, {"seed": 3, "num_sms": 8}, {"seed": 4, "num_sms": 8}):
        with kernels.running(GRADIENT, tokens=tokens, **how) as found:
            results.append(kernels.ops.int8_matmul_grad_input(grad_out, weight, scale, True))
        assert len(found) == 1 and found[0].report.bank_conflicts == 0
        assert torch.equal(kernels.grad_input(grad_out, weight, scale, tokens=tokens, **how), results[-1][0])
    assert all(torch.equal(grad_bias, results[0][1]) for _, grad_bias in results)
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[2][0], results[3][0])


# --- Exact results ----------------------------------------------------------------------------------------------------


@on_cuda
@each_dtype
def test_every_int8_number_is_exact(dtype: torch.dtype, kernels: Kernels) -> None:
    """This includes -128, which quantisation never makes. Each result is one product with a power of two."""
    numbers = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE).view(16, 16)
    scale = torch.full((16, 1), 0.5, device=DEVICE)
    x = 2 * torch.eye(16, dtype=dtype, device=DEVICE)
    assert torch.equal(kernels.matmul(x, numbers, scale), numbers.t().to(dtype))
    assert torch.equal(kernels.grad_input(x, numbers, scale), numbers.to(dtype))


@on_all
@each_dtype
def test_extreme_weights_are_exact(dtype: torch.dtype, kernels: Kernels) -> None:
    """Weights are -127, 127, 1 and -1, inputs and the scale powers of two: every step is exact, so the result is."""
    weight = torch.tensor([[127, -127, 1, -1] * 8], dtype=torch.int8, device=DEVICE).repeat(16, 1)
    scale = torch.full((16, 1), 2.0**-7, device=DEVICE)
    x = torch.full((2, 32), 0.5, dtype=dtype, device=DEVICE)
    x[:, ::2] = 1.0
    exact = x.double() @ reference.dequantize_int8(weight, scale, torch.float64).t()
    assert torch.equal(kernels.matmul(x, weight, scale), exact.to(dtype))
    grad_out = torch.ones(2, 16, dtype=dtype, device=DEVICE)
    exact = grad_out.double() @ reference.dequantize_int8(weight, scale, torch.float64)
    assert torch.equal(kernels.grad_input(grad_out, weight, scale), exact.to(dtype))


@on_cuda
@each_dtype
def test_the_largest_factor_takes_every_weight(dtype: torch.dtype, kernels: Kernels) -> None:
    """A scale just below a power of two rounds up to it; -128 times this factor is still finite."""
    weight = torch.full((16, 16), -128, dtype=torch.int8, device=DEVICE)
    scale = torch.full((16, 1), float.fromhex("0x1.fffp-1"), device=DEVICE)
    found = kernels.grad_input(torch.eye(16, dtype=dtype, device=DEVICE), weight, scale)
    assert torch.equal(found, torch.full_like(found, -128.0))


@on_cuda
def test_fp16_overflows_where_the_exact_result_does(kernels: Kernels) -> None:
    """It does not overflow before: sums of 127 * 60000 pass through."""
    weight = torch.full((16, 64), 127, dtype=torch.int8, device=DEVICE)
    weight[8:, 32:] = -127
    scale = torch.full((16, 1), 0.25, device=DEVICE)
    exact = 0.25 * weight.double()
    x = torch.full((3, 64), 60000.0, dtype=torch.float16, device=DEVICE)
    x[1], x[2] = -x[1], 8.0
    out = kernels.matmul(x, weight, scale)
    assert torch.equal(out, (x.double() @ exact.t()).half())
    assert bool(out[0, :8].isposinf().all() and out[1, :8].isneginf().all() and (out[:2, 8:] == 0).all())
    grad_out = x[:, :16].clone()
    grad_out[1, 8:] *= -1
    assert torch.equal(kernels.grad_input(grad_out, weight, scale), (grad_out.double() @ exact).half())


# --- Scales -----------------------------------------------------------------------------------------------------------


@on_triton_slowly
@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_a_channel_of_zeros(granularity: str | int, dtype: torch.dtype, kernels: Kernels) -> None:
    """Its scale is 1, which is large among the others: these must not lose precision."""
    dense = normal(40, 64, seed=1, dtype=torch.float32, std=0.02)
    dense[3] = 0.0
    weight, scale = reference.quantize_int8(dense, granularity)
    assert bool((scale[3] == 1).all())
    out = kernels.check_forward(normal(6, 64, seed=2, dtype=dtype), weight, scale)
    assert bool((out[:, 3] == 0).all())
    kernels.check_gradients(normal(6, 40, seed=3, dtype=dtype), weight, scale)


@on_all
@each_granularity
def test_small_gradients_and_small_scales_do_not_underflow(granularity: str | int, kernels: Kernels) -> None:
    """Weights around 1e-4 are below fp16's normal range. The gradient must be as good as for larger weights."""
    weight, scale = quantised(256, 128, granularity, std=1e-4)
    grad_out = normal(4, 256, seed=1, std=100.0)
    found = kernels.check_gradients(grad_out, weight, scale)
    exact = grad_out.double() @ reference.dequantize_int8(weight, scale, torch.float64)
    assert (found.double() - exact).abs().max() <= 2e-3 * exact.abs().max()


@on_cuda
@each_dtype
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_scales_of_any_sign_and_size(granularity: str | int, dtype: torch.dtype, kernels: Kernels) -> None:
    weight, scale = quantised(48, 64, granularity)
    scale[::3] *= -1
    scale[1::3] *= 1e-3
    scale[5] *= -1e3
    kernels.check_forward(normal(6, 64, seed=2, dtype=dtype), weight, scale)
    kernels.check_gradients(normal(6, 48, seed=3, dtype=dtype), weight, scale)


@on_cuda
@each_dtype
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
@pytest.mark.parametrize("granularity", ["channel", 32])
def test_scales_that_rise_and_fall_along_the_sum(
    granularity: str | int, falling: bool, dtype: torch.dtype, kernels: Kernels
) -> None:
    """Scales span eleven orders of magnitude: a larger scale changes the exponent with which the sum is kept."""
    weight, scale = quantised(640, 64, granularity, std=1.0)
    exponents = torch.linspace(-9, 2, 640, device=DEVICE)
    scale *= 10 ** (exponents.flip(0) if falling else exponents)[:, None]
    scale[:70] *= 0 if not falling else 1
    for more in (1, 4):
        grad_out = normal(6, 640, seed=3, dtype=dtype)
        kernels.check_gradients(grad_out, weight, scale, num_sms=more * kernels.num_sms)
    # Gradients that are zero elsewhere show the small scales alone.
    grad_out = normal(6, 640, seed=4, dtype=dtype)
    grad_out[:, (exponents > -5) if not falling else (exponents < -5)] = 0
    kernels.check_gradients(grad_out, weight, scale)


@on_all
@each_dtype
def test_scales_of_zeros_give_zeros(dtype: torch.dtype, kernels: Kernels) -> None:
    weight, scale = quantised(16, 64, "channel")
    scale = torch.zeros_like(scale)
    assert not bool(kernels.grad_input(normal(3, 16, seed=1, dtype=dtype), weight, scale).any())
    assert not bool(kernels.matmul(normal(3, 64, seed=1, dtype=dtype), weight, scale).any())
