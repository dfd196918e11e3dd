"""Tests the int8 weight as a tensor: operations that keep its values, operations that use them, and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from by_hand import normal
from fastattn import InputError
from fastattn.functional.int8_linear import int8_linear
from fastattn.functional.int8_weight import GRANULARITIES, quantize_int8
from fastattn.nn import Int8Linear, Int8Tensor

N, K = 96, 256


@pytest.fixture(autouse=True)
def _on_the_torch_path() -> Iterator[None]:
    with fastattn.use_backend("torch"):
        yield


def weight_of(granularity: str | int = "channel", rows: int = N, columns: int = K, seed: int = 4) -> Int8Tensor:
    dense = normal(seed, rows, columns, dtype=torch.float32)
    return Int8Tensor.from_weight(quantize_int8(dense, granularity), torch.float32)


def assert_stands_for(weight: Tensor, dense: Tensor) -> None:
    assert isinstance(weight, Int8Tensor)
    assert weight.shape == dense.shape
    assert torch.equal(weight.dequantize(), dense)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_parts_of_the_weight_are_parts_of_what_it_stands_for(granularity: str | int) -> None:
    weight = weight_of(granularity)
    dense = weight.dequantize()
    assert_stands_for(weight[8:40], dense[8:40])
    assert_stands_for(weight[:, 128:], dense[:, 128:])
    for actual, expected in zip(weight.chunk(5), dense.chunk(5), strict=True):
        assert_stands_for(actual, expected)
    for actual, expected in zip(weight.split([128, 128], 1), dense.split([128, 128], 1), strict=True):
        assert_stands_for(actual, expected)
        assert not actual.is_contiguous()
        assert_stands_for(actual.contiguous(), expected)
        assert actual.contiguous().is_contiguous()
    assert_stands_for(torch.cat(weight.chunk(2, 1), 1), dense)
    if granularity != "tensor":
        assert_stands_for(torch.cat([weight, weight[:3]]), torch.cat([dense, dense[:3]]))
    assert_stands_for(F.pad(weight, (0, 0, 0, 3)), F.pad(dense, (0, 0, 0, 3)))
    assert_stands_for(weight.view(-1).view(N, K), dense)
    assert_stands_for(weight.t().t(), dense)
    assert torch.equal(weight.t().dequantize(), dense.t())
    assert torch.equal(weight.view(-1).dequantize(), dense.flatten())


def test_other_parts_and_wholes_are_refused() -> None:
    weight, grouped = weight_of(), weight_of(64)
    with pytest.raises(InputError, match="slice of an int8 weight: expected whole groups of 64 columns"):
        grouped[:, 32:]
    with pytest.raises(InputError, match="slice of an int8 weight: expected a step of 1"):
        weight[::2]
    with pytest.raises(
        InputError, match=r"cat of an int8 weight: expected int8 weights of one granularity, got .*64.*channel"
    ):
        torch.cat([weight, grouped])
    with pytest.raises(InputError, match="cat of an int8 weight: expected weights with the same 'channel' scales"):
        torch.cat([weight, weight_of(seed=5)], 1)
    with pytest.raises(InputError, match="pad of an int8 weight: expected rows of zeros below"):
        F.pad(weight, (0, 16))
    with pytest.raises(InputError, match="view of an int8 weight: expected"):
        weight.view(K, N)


@pytest.mark.parametrize("columns", [K, 40])
def test_copies_are_alike(columns: int, tmp_path: Any) -> None:
    weight = nn.Parameter(weight_of(columns=columns), requires_grad=False)
    torch.save(weight, tmp_path / "weight.pt")
    others = (
        weight.clone(),
        weight.detach(),
        weight.data,
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        torch.load(tmp_path / "weight.pt"),
        torch.empty_like(weight).copy_(weight),
        weight.to("meta").new_zeros(weight.shape, device="cpu").copy_(weight),
    )
    for other in others:
        assert isinstance(other, Int8Tensor)
        assert torch.equal(other, weight)
        assert other.int8_data.stride(0) % 16 == 0
        assert (other.dtype, other.requires_grad) == (torch.float32, False)
    assert isinstance(copy.deepcopy(weight), nn.Parameter) and isinstance(
        torch.load(tmp_path / "weight.pt"), nn.Parameter
    )
    assert weight.nbytes == N * columns + 4 * N
    assert "Int8Tensor([96" in repr(weight) and "channel" in repr(weight)


def test_dtypes_are_what_the_weight_stands_for() -> None:
    weight = weight_of()
    half = weight.half()
    assert (half.dtype, half.int8_data.dtype, half.int8_scale.dtype) == (torch.float16, torch.int8, torch.float32)
    assert half.dequantize().dtype == torch.float16
    assert torch.equal(half.dequantize(torch.float32), weight.dequantize())
    with pytest.raises(InputError, match=r"dtype: expected one of torch\.float16.*the weight stays int8"):
        weight.to(torch.int8)


def test_copies_between_int8_and_floating_tensors_convert() -> None:
    weight, dense = weight_of(64), normal(5, N, K, dtype=torch.float32)
    assert torch.equal(torch.empty(N, K).copy_(weight), weight.dequantize())
    weight.copy_(dense)
    assert torch.equal(weight.dequantize(), quantize_int8(dense, 64).dequantize())
    with pytest.raises(
        InputError, match=r"copy_ to an int8 weight: expected granularity 64, got .*channel.*dequantize"
    ):
        weight.copy_(weight_of())
    with pytest.raises(InputError, match="copy_"):
        weight.copy_(torch.zeros(N, K, dtype=torch.int8))


@pytest.mark.parametrize("granularity", ["tensor", "channel", 32])
def test_linear_layers_run_int8_linear(granularity: str | int) -> None:
    """This includes the two matmuls into which DTensor splits a layer, and those of its gradient."""
    weight, bias = weight_of(granularity), normal(2, N, dtype=torch.float32)
    x = normal(1, 5, K, dtype=torch.float32).requires_grad_()
    expected = int8_linear(x, weight.int8_weight, bias)
    grad_out = torch.randn_like(expected)
    (expected_grad,) = torch.autograd.grad(expected, x, grad_out)
    for y in (F.linear(x, weight, bias), int8_linear(x, weight, bias), torch.addmm(bias, x, weight.t())):
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y, x, grad_out)[0], expected_grad)
    torch.testing.assert_close(x @ weight.t() + bias, expected)
    explained = fastattn.explain(int8_linear, x, weight)
    assert (explained.backend, explained.kernel) == (
        "torch",
        fastattn.explain(int8_linear, x, weight.int8_weight).kernel,
    )
    with fastattn.record() as calls:
        F.linear(x.detach(), weight, bias)
    assert [call.op for call in calls] == ["int8_matmul"]


def test_everything_else_is_refused_by_name() -> None:
    weight = weight_of()
    for operation in (lambda: weight * 2, lambda: weight.abs(), lambda: weight.add_(1), lambda: weight @ weight.t()):
        with pytest.raises(InputError, match=r"^\w+: .* int8 weight.*; pass .*dequantize\(\)"):
            operation()
    with pytest.raises(InputError, match=r"^addmm: expected beta=1 and alpha=1 over an int8 weight, got 0\.5 and 1;"):
        torch.addmm(torch.zeros(N), torch.zeros(3, K), weight.t(), beta=0.5)
    with pytest.raises(InputError, match=r"F\.linear: expected a floating input and bias, got an int8 weight"):
        F.linear(weight, torch.zeros(3, K))
    with pytest.raises(InputError, match="weight: expected a reader that knows int8 weights"):
        weight.data_ptr()


def test_it_never_requires_a_gradient() -> None:
    parameter = nn.Parameter(weight_of())
    parameter.requires_grad_(False)
    parameter.requires_grad = False
    with pytest.raises(InputError, match=r"requires_grad: expected False for an int8 weight.*adapters.*dequantize"):
        parameter.requires_grad_(True)
    with pytest.raises(InputError, match="requires_grad: expected False for an int8 weight"):
        parameter.requires_grad = True
    with pytest.raises(InputError, match="requires_grad: expected False for an int8 weight"):
        nn.Sequential(Int8Linear.from_linear(nn.Linear(16, 16))).requires_grad_()
    assert not parameter.requires_grad
