"""Makes weights and inputs for the int8 matmul's tests, and compares results with the oracle, for every backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import proof
from fastattn import reference
from fastattn.activations import ACTIVATIONS, result_columns
from kernel_device import DEVICE
from oracle import check_against_oracle

GRANULARITIES = ["tensor", "channel", 32, 64, 128]
ACTIVATION_NAMES = list(ACTIVATIONS)
_FP32_UNIT = 2.0**-24  # fp32's unit roundoff


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float16, std: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def quantised(n: int, k: int, granularity: str | int, seed: int = 0, std: float = 0.05) -> tuple[Tensor, Tensor]:
    return reference.quantize_int8(normal(n, k, seed=seed, dtype=torch.float32, std=std), granularity)


def epilogue(activation: str, m: int, n: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, str]:
    """Returns bias, residual and activation for ``m`` tokens and ``n`` rows of weights."""
    return normal(n, seed=21, dtype=dtype), normal(m, result_columns(activation, n), seed=22, dtype=dtype), activation


def check_forward(
    int8_matmul: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Asserts that the kernel meets the oracle on these inputs."""

    def double(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    out = int8_matmul(x, weight, scale, bias, residual, activation)
    oracle = reference.int8_linear(x.double(), weight, scale.double(), double(bias), activation, double(residual))
    composite = reference.int8_linear(x, weight, scale, bias, activation, residual, compute_dtype=x.dtype)
    assert out.dtype == x.dtype and out.is_contiguous()
    check_against_oracle("out", out, oracle, composite)
    return out


def assert_near_int8_oracle(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> None:
    """Asserts that a kernel with int8 activations meets the oracle over the same int8 tokens. Integer sums are exact;
    the bound allows for fp32's roundings of the scaled sums of groups and splits and of what follows, and for the
    result's."""
    assert out.dtype == x.dtype and out.is_contiguous()
    proof.compared()
    q, token_scale = (each.to(DEVICE, torch.float64) for each in reference.quantize_rows(x))
    tokens = q * token_scale[..., None]
    extra = [None if each is None else each.double() for each in (bias, residual)]
    oracle = reference.int8_linear(tokens, weight, scale.double(), extra[0], activation, extra[1])
    magnitude = reference.int8_linear(tokens.abs(), weight.double().abs(), scale.double().abs())
    magnitude = sum((each.abs() for each in extra if each is not None), magnitude)
    roundings = 8 + 2 * scale.shape[1] + 16
    info = torch.finfo(x.dtype)
    allowed = roundings * _FP32_UNIT * magnitude + 0.501 * info.eps * oracle.abs() + info.smallest_normal * info.eps
    error = (out.double() - oracle).abs()
    worst = int((error - allowed).argmax()) if error.numel() else 0
    assert bool((error <= allowed).all()), (worst, out.flatten()[worst], oracle.flatten()[worst])


def check_grad_input(
    int8_matmul_grad_input: Callable[..., tuple[Tensor, Tensor]], grad_out: Tensor, weight: Tensor, scale: Tensor
) -> Tensor:
    """Asserts that the input's gradient and the bias's gradient meet the oracle."""
    out, grad_bias = int8_matmul_grad_input(grad_out, weight, scale, True)
    oracle = grad_out.double() @ reference.dequantize_int8(weight, scale, torch.float64)
    composite = grad_out @ reference.dequantize_int8(weight, scale, grad_out.dtype)
    assert out.dtype == grad_out.dtype and out.is_contiguous()
    check_against_oracle("grad_input", out, oracle, composite)
    check_grad_bias(grad_bias, grad_out)
    return out


def check_grad_bias(grad_bias: Tensor, grad_out: Tensor) -> None:
    """Asserts that it is the exact sum over the tokens, rounded once; allows for sums in fp32, which may cancel."""
    rows = grad_out.double()[None].flatten(0, -2)
    exact, info = rows.sum(0), torch.finfo(grad_out.dtype)
    assert grad_bias.dtype == grad_out.dtype and grad_bias.shape == exact.shape
    in_float32 = rows.abs().sum(0) * rows.shape[0] * torch.finfo(torch.float32).eps
    bound = exact.abs() * info.eps / 2 + in_float32 + info.smallest_normal * info.eps
    assert bool(((grad_bias.double() - exact).abs() <= bound).all())
