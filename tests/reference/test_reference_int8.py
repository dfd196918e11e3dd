"""Tests the oracle itself: int8 weights, against plain Python loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from by_hand import normal, quantized_by_hand
from fastattn import reference
from fastattn.activations import ACTIVATIONS, result_columns

GRANULARITIES = ("tensor", "channel", 32, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantisation_is_within_half_a_step(granularity: str | int, dtype: torch.dtype) -> None:
    weight = (normal(1, 5, 128) * torch.logspace(-3, 3, 5, dtype=torch.float64)[:, None]).to(dtype)
    quantized, scale = reference.quantize_int8(weight, granularity)
    rows, groups = {"tensor": (1, 1), "channel": (5, 1)}.get(
        str(granularity), (5, 128 // (int(granularity) if isinstance(granularity, int) else 1))
    )
    assert quantized.dtype == torch.int8
    assert (scale.dtype, scale.shape) == (torch.float32, (rows, groups))
    assert quantized.abs().amax() == 127
    step = scale.double().repeat_interleave(128 // groups, dim=1).expand(5, 128)
    error = (reference.dequantize_int8(quantized, scale, torch.float64) - weight.double()).abs()
    # Half a step, plus the roundings of x / scale and of the scale, each at most 127 * 2^-24 steps.
    assert bool((error <= step * (0.5 + 2 * 127 * 2**-24)).all())
    if granularity != "tensor":
        group = 128 // groups
        assert bool((quantized.abs().view(5, groups, group).amax(-1) == 127).all())


def test_rounding_is_to_nearest_even_and_symmetric() -> None:
    weight = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, -127.0]])
    quantized, scale = reference.quantize_int8(weight)
    assert scale.item() == 1.0
    assert quantized.tolist() == [[127, 0, 2, 2, 0, -2, -126, -127]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_channel_of_zeros_has_scale_one(granularity: str | int) -> None:
    for tiny in (0.0, 1e-45):  # 1e-45 / 127 underflows to 0 in fp32
        weight = torch.full((2, 64), tiny)
        quantized, scale = reference.quantize_int8(weight, granularity)
        assert bool((scale == 1).all())
        assert not bool(quantized.any())


@pytest.mark.parametrize("granularity", ["tensor", "channel", 32])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)], ids=str)
def test_empty_weights(shape: tuple[int, int], granularity: str | int) -> None:
    quantized, scale = reference.quantize_int8(torch.zeros(shape), granularity)
    assert quantized.shape == shape
    y = reference.int8_linear(torch.ones(2, shape[1]), quantized, scale, torch.full((shape[0],), 0.5))
    assert torch.equal(y, torch.full((2, shape[0]), 0.5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("activations", ["16bit", "int8"])
@pytest.mark.parametrize("granularity", ["tensor", "channel", 32])
def test_int8_linear_is_the_plain_loop(granularity: str | int, activations: str, activation: str) -> None:
    columns = 5
    rows = 2 * columns if activation == "swiglu" else columns
    x, weight, bias, residual = normal(1, 3, 64), normal(2, rows, 64), normal(3, rows), normal(4, 3, columns)
    quantized, scale = reference.quantize_int8(weight, granularity)
    y = reference.int8_linear(x, quantized, scale, bias, activation, residual, activations)
    by_hand = {
        "none": lambda t: t,
        "relu": lambda t: max(t, 0.0),
        "gelu": lambda t: t * (1 + math.erf(t / math.sqrt(2))) / 2,
        "gelu_tanh": lambda t: t * (1 + math.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))) / 2,
        "silu": lambda t: t / (1 + math.exp(-t)),
    }
    group = 64 // scale.shape[1]

    def total(m: int, n: int) -> float:
        row = x[m].tolist()
        if activations == "int8":
            rounded, step = quantized_by_hand(row)
            row = [q * step for q in rounded]
        steps = scale.expand(rows, -1)[n].tolist()
        return sum(row[k] * quantized[n, k].item() * steps[k // group] for k in range(64)) + bias[n].item()

    for m, n in itertools.product(range(3), range(columns)):
        if activation == "swiglu":
            expected = by_hand["silu"](total(m, n)) * total(m, n + columns)
        else:
            expected = by_hand[activation](total(m, n))
        torch.testing.assert_close(y[m, n].item(), expected + residual[m, n].item())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_int8_linear(activation: str) -> None:
    quantized, scale = reference.quantize_int8(normal(2, 4, 32), 32)
    columns = result_columns(activation, 4)
    leaves = (normal(1, 2, 2, 32, grad=True), normal(3, 4, grad=True), normal(4, 2, 2, columns, grad=True))

    def linear(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return reference.int8_linear(x, quantized, scale, bias, activation, residual)

    assert torch.autograd.gradcheck(linear, leaves)


def test_the_gradient_passes_straight_through_int8_activations() -> None:
    quantized, scale = reference.quantize_int8(normal(2, 3, 8))
    x, grad = normal(1, 2, 8, grad=True), normal(3, 2, 3)
    y = reference.int8_linear(x, quantized, scale, input_precision="int8")
    (actual,) = torch.autograd.grad(y, x, grad)
    torch.testing.assert_close(actual, grad @ reference.dequantize_int8(quantized, scale, torch.float64))


def test_int8_linear_of_the_dequantised_weight_is_torchs_linear() -> None:
    x, weight, bias = normal(1, 2, 3, 64, dtype=torch.float32), normal(2, 5, 64, dtype=torch.float32), torch.ones(5)
    quantized, scale = reference.quantize_int8(weight)
    expected = F.linear(x, reference.dequantize_int8(quantized, scale, torch.float32), bias)
    torch.testing.assert_close(reference.int8_linear(x, quantized, scale, bias), expected)
    compiled = torch.compile(reference.int8_linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, quantized, scale, bias), expected)
