"""Compares caches and int8 layers on CUDA tensors with the same calls in float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastattn
from oracle import check_against_oracle

DTYPE = torch.bfloat16
NEAR = {"16": 2e-2, "int8": 6e-2, "fp8": 1.5e-1}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DTYPE)


def turn(step: int, rows: int, heads: int) -> Tensor:
    return draw(2, heads, rows, 64, seed=100 * step + heads)


def run(device: str, dtype: torch.dtype, cache: Any, **options: Any) -> list[Tensor]:
    """Runs a prompt and two steps of generation."""
    found = []
    for step, rows in enumerate((9, 1, 2)):
        query, key, value = (turn(step, rows, heads).to(device, dtype) for heads in (4, 2, 2))
        found.append(cache(query, key, value, rows, **options).double().cpu())
    return found


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("kind", ["16", "int8", "fp8"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
def test_generation(kind: str, paged: bool, backend: str) -> None:
    options: dict[str, Any] = {"16": {}, "int8": {"quantized": True}, "fp8": {"quantized": torch.float8_e4m3fn}}[kind]

    def make(device: str, dtype: torch.dtype, **options: Any) -> Any:
        arguments = {"device": device, "dtype": dtype, **options}
        if not paged:
            cache = fastattn.KVCache(1, 2, 2, 64, capacity=32, **arguments)
            return lambda q, k, v, rows: cache.attend(0, q, k, v)
        pool = fastattn.PagedKVCache(1, 8, 2, 64, page_size=16, **arguments)
        sequences = [pool.add(), pool.add()]
        return lambda q, k, v, rows: pool.step(sequences, num_new=rows).attend(0, q, k, v)

    expected = run("cpu", torch.float64, make("cpu", torch.float64))
    with fastattn.use_backend(backend):
        found = run("cuda", DTYPE, make("cuda", DTYPE, **options))
    torch.testing.assert_close(found, expected, rtol=0, atol=NEAR[kind])


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("granularity", ["channel", 64])
@pytest.mark.parametrize("rows", [3, 100])
def test_int8_linear_and_its_gradients(rows: int, granularity: Any, backend: str) -> None:
    weight, bias, residual = draw(96, 192), draw(96), draw(rows, 96)
    x = draw(rows, 192).mul(0.2).cuda().requires_grad_()
    quantised = fastattn.quantize_int8(weight.cuda(), granularity)
    with fastattn.use_backend(backend):
        out = fastattn.int8_linear(x, quantised, bias.cuda(), activation="silu", residual=residual.cuda())
        out.backward(residual.cuda())

    def plain(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = x.detach().cpu().to(dtype).requires_grad_()
        dense = quantised.dequantize(dtype).cpu()
        result = nn.functional.silu(nn.functional.linear(leaf, dense, bias.to(dtype))) + residual.to(dtype)
        return result, *torch.autograd.grad(result, leaf, residual.to(dtype))

    for name, got, exact, composite in zip(
        ("out", "grad"), (out, x.grad), plain(torch.float64), plain(DTYPE), strict=True
    ):
        assert got is not None
        check_against_oracle(name, got, exact, composite)


def test_a_quantised_model_moves_to_the_device_and_keeps_its_bits() -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 32)).to(DTYPE)
    fastattn.nn.quantize_model(model)
    x = draw(5, 128)
    with fastattn.use_backend("torch"):
        expected = model.double()(x.double())
    moved = model.to("cuda", DTYPE)
    with fastattn.record() as calls:
        out = moved(x.cuda())
    assert {call.backend for call in calls} == {"cuda"}
    torch.testing.assert_close(out.double().cpu(), expected, rtol=3e-2, atol=3e-2)
