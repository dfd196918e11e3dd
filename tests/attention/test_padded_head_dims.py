"""Tests head dims between those of the kernels: the public functions pad them, in every kernel backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from cuda_kernels import HAS_KERNELS, NO_KERNELS
from fastattn import reference
from kernel_device import DEVICE
from oracle import check_against_oracle

pytestmark = pytest.mark.usefixtures("emulated_gpu")


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    with fastattn.use_backend(request.param):
        yield request.param


def inputs(head_dim: int, value_dim: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(head_dim * 1000 + value_dim)
    shapes = ((2, 4, 9, head_dim), (2, 2, 13, head_dim), (2, 2, 13, value_dim))
    drawn = (torch.randn(shape, generator=generator).to(DEVICE, torch.float16) for shape in shapes)
    query, key, value = (tensor.requires_grad_(**options) for tensor in drawn)
    return query, key, value


def results(function: Any, leaves: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Returns output, lse and the gradients of both."""
    out, lse = function(*leaves)
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=DEVICE).view(t.shape) for t in (out, lse)]
    return [out, lse, *torch.autograd.grad((out, lse), leaves, weights)]


@pytest.mark.parametrize("dims", [(1, 1), (4, 20), (20, 16), (61, 64), (63, 63), (100, 36)], ids=str)
def test_results_are_those_of_the_reference(dims: tuple[int, int], backend: str) -> None:
    """Triton pads 1 and 4 dims to 16. 61 and 63 become 64, which the native kernel without options takes."""
    leaves = inputs(*dims)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return fastattn.attention(query, key, value, causal=True, return_lse=True)

    def compute(dtype: torch.dtype) -> list[Tensor]:
        wide = tuple(leaf.detach().to(dtype).requires_grad_() for leaf in leaves)
        return results(lambda *tensors: reference.attention(*tensors, causal=True, compute_dtype=dtype), wide)

    exact, composite = compute(torch.float64), compute(torch.float16)
    for name, actual, *expected in zip(
        ("out", "lse", "grad_query", "grad_key", "grad_value"), results(attend, leaves), exact, composite, strict=True
    ):
        check_against_oracle(name, actual, *expected)


def test_the_drop_in_and_packed_sequences(backend: str) -> None:
    """Three functions give the same rows; the default scale is that of the head dim before padding."""
    query, key, value = (tensor.detach()[:1] for tensor in inputs(20, 36))
    out = fastattn.attention(query, key, value)
    drop_in = fastattn.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    offsets = [torch.tensor([0, length], dtype=torch.int32, device=DEVICE) for length in (9, 13)]
    packed = fastattn.attention_varlen(*(t[0].transpose(0, 1) for t in (query, key, value)), *offsets, 9, 13)
    assert isinstance(out, Tensor) and isinstance(packed, Tensor)
    torch.testing.assert_close(out, drop_in, rtol=0, atol=2e-3)
    torch.testing.assert_close(out[0].transpose(0, 1), packed, rtol=0, atol=2e-3)
    assert out.shape == (1, 4, 9, 36)


def test_the_order_of_dims_in_memory_stays(backend: str) -> None:
    leaves = tuple(t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(20, 36))
    out = fastattn.attention(*leaves)
    assert isinstance(out, Tensor) and out.stride(1) < out.stride(2)


def test_explain_says_what_is_padded(backend: str) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(20, 32))
    explained = fastattn.explain(fastattn.attention, query, key, value)
    assert explained.backend == backend
    reason = "its head dim, 20, is padded with zeros to 24"
    assert explained.copied == {"query": reason, "key": reason}
    assert f"copied first: query: {reason}" in str(explained)
