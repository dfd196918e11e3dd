"""Tests the int8 product on a CPU, block by block: results, gradients, and the memory that it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from by_hand import normal
from fastattn import reference
from fastattn.functional import int8_on_cpu
from oracle import check_against_oracle

ROWS, COLUMNS = 50, 128  # blocks of 8 rows, and one of 2
GRANULARITIES = ("tensor", "channel", 32)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_on_cpu, "_BLOCK_ELEMENTS", 8 * COLUMNS // torch.get_num_threads())


def weight_of(granularity: str | int) -> fastattn.Int8Weight:
    return fastattn.quantize_int8(normal(1, ROWS, COLUMNS), granularity)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(COLUMNS,), (1, COLUMNS), (3, 5, COLUMNS), (0, COLUMNS)], ids=str)
def test_product_and_gradients_meet_the_oracle(shape: tuple[int, ...], granularity: Any, dtype: torch.dtype) -> None:
    weight = weight_of(granularity)
    x, grad = normal(2, *shape, dtype=dtype, grad=True), normal(3, *shape[:-1], ROWS, dtype=dtype)

    def results(x: Tensor, compute_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        y = reference.int8_linear(x, weight.data, weight.scale, activation="silu", compute_dtype=compute_dtype)
        return y, torch.autograd.grad(y, x, grad.to(y.dtype))[0]

    oracle = results(x.detach().double().requires_grad_(), None)
    rough = results(x, dtype)
    y = fastattn.int8_linear(x, weight, activation="silu")
    found = y, torch.autograd.grad(y, x, grad)[0]
    for name, *three in zip(("y", "x's gradient"), found, oracle, rough, strict=True):
        assert three[0].dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(three[0], three[1])
        else:
            check_against_oracle(name, *three)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)], ids=str)
def test_empty_weights(shape: tuple[int, int]) -> None:
    weight = fastattn.quantize_int8(torch.zeros(shape))
    x = torch.ones(2, shape[1], requires_grad=True)
    y = fastattn.int8_linear(x, weight)
    assert torch.equal(y, torch.zeros(2, shape[0]))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(2, shape[1]))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_second_derivatives(granularity: Any) -> None:
    weight = weight_of(granularity)
    x = normal(2, 2, COLUMNS, grad=True)
    assert torch.autograd.gradgradcheck(lambda x: int8_on_cpu.product(x[:, :16].repeat(1, 8), *parts(weight)), x)


def parts(weight: fastattn.Int8Weight) -> tuple[Tensor, Tensor]:
    return weight.data, weight.scale


def test_forward_mode() -> None:
    weight = weight_of("channel")
    x, tangent = normal(2, 2, COLUMNS), normal(3, 2, COLUMNS)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(fastattn.int8_linear(forward_ad.make_dual(x, tangent), weight))
    torch.testing.assert_close(y.tangent, fastattn.int8_linear(tangent, weight))


class LargestFloat(TorchDispatchMode):
    """A mode that records the size of the largest floating tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and not function.is_view:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_the_weight_is_never_floating_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product, saved tensor or gradient holds the whole weight as floating numbers."""
    weight, saved = weight_of(32), []
    # Under a dispatch mode it usually does not multiply.
    monkeypatch.setattr(int8_on_cpu, "can_multiply", lambda *_: True)
    x = normal(2, 3, COLUMNS, dtype=torch.float32, grad=True)
    with (
        LargestFloat() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
    ):
        fastattn.int8_linear(x, weight).sum().backward()
    assert 0 < largest.elements <= 8 * COLUMNS
    assert all(t.dtype == torch.int8 or t.numel() < weight.data.numel() for t in saved)
    assert any(t.dtype == torch.int8 for t in saved)
