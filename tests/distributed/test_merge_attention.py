"""Tests that two results of attention, merged, are attention over the keys of both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn import InputError
from fastattn.distributed import merge_attention
from fastattn.distributed.merge import merge_into
from fastattn.reference import attention as attend


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 6)
    query, key, value = (drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))
    return query, key, value


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_dense(at: int) -> None:
    """Compares results and gradients; one of the two sets of keys may be empty."""
    inputs = [tensor.requires_grad_() for tensor in problem()]
    query, key, value = inputs
    expected = attend(*inputs)
    parts = [attend(query, key[:, :, part], value[:, :, part]) for part in (slice(0, at), slice(at, None))]
    found = merge_attention(*parts[0], *parts[1])
    weights = [drawn(*result.shape, seed=3) for result in expected]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(results, inputs, weights) for results in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_packed() -> None:
    query, key, value = problem()
    whole = attend(query[:1], key[:1], value[:1])
    parts = [attend(query[:1], key[:1, :, part], value[:1, :, part]) for part in (slice(0, 4), slice(4, None))]
    packed = [result for out, lse in parts for result in (out[0].transpose(0, 1), lse[0])]
    out, lse = merge_attention(*packed)
    torch.testing.assert_close(out, whole[0][0].transpose(0, 1))
    torch.testing.assert_close(lse, whole[1][0])


def test_a_sink_in_one_of_them() -> None:
    query, key, value = problem()
    sinks = drawn(4, seed=5)
    first = attend(query, key[:, :, :4], value[:, :, :4], sinks=sinks)
    last = attend(query, key[:, :, 4:], value[:, :, 4:])
    torch.testing.assert_close(merge_attention(*first, *last), attend(query, key, value, sinks=sinks))


def test_rows_that_see_nothing() -> None:
    """The output in such a row, even NaN, has no influence, and gradients are finite."""
    out_a, out_b = drawn(1, 2, 3, 4), drawn(1, 2, 3, 4, seed=1)
    lse_a, lse_b = drawn(1, 2, 3, seed=2), drawn(1, 2, 3, seed=3)
    lse_a[..., 0] = lse_a[..., 1] = lse_b[..., 1] = -math.inf
    out_a[:, :, 0] = math.nan
    leaves = [tensor.requires_grad_() for tensor in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge_attention(*leaves)
    assert torch.equal(out[:, :, 0], out_b[:, :, 0]) and torch.equal(lse[..., 0], lse_b[..., 0])
    assert bool((out[:, :, 1] == 0).all()) and bool((lse[..., 1] == -math.inf).all())
    grads = torch.autograd.grad((out.sum(), lse[..., [0, 2]].sum()), leaves)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert all(bool((grad[:, :, 1] == 0).all()) for grad in grads)


def test_16_bits_are_merged_in_float32() -> None:
    """A result of 64 merges, rounded once at the end, is as exact as that of one call; float64 stays float64."""
    query, key, _ = problem(torch.bfloat16)
    key = key.repeat(1, 1, 64, 1)
    value = torch.randn(2, 2, 9 * 64, 6, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = attend(query.double(), key.double(), value.double())[0]
    merged: tuple[Tensor, Tensor] | None = None
    for keys, values in zip(key.float().split(9, 2), value.float().split(9, 2), strict=True):
        block = attend(query.float(), keys, values)
        merged = block if merged is None else merge_attention(*merged, *block)
    assert merged is not None and merged[0].dtype == torch.float32
    once = exact.bfloat16()
    assert (merged[0].double() - exact).abs().max() < 1e-6
    assert (merged[0].bfloat16() != once).sum() <= 1
    result = attend(*problem(torch.bfloat16))
    assert merge_attention(*result, *result)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: lambda t: t[0, 0]}, r"out_a: expected \[B, Hq, Sq, Dv\] or"),
        ({2: lambda t: t[:, :, :3]}, "out_b: expected shape of out_a"),
        ({1: lambda t: t.transpose(1, 2)}, r"lse_a: expected shape \[B, Hq, Sq\]"),
        ({3: lambda t: t[:1]}, r"lse_b: expected shape \[B, Hq, Sq\]"),
        ({1: lambda t: t.long()}, "lse_a: expected torch.float16"),
        ({2: lambda t: t.to("meta")}, "out_b: expected a tensor on cpu like the first argument, got one on meta"),
    ],
)
def test_bad_input(change: dict[int, Any], message: str) -> None:
    given = [*attend(*problem()), *attend(*problem())]
    for place, function in change.items():
        given[place] = function(given[place])
    with pytest.raises(InputError, match=message):
        merge_attention(*given)
    with pytest.raises(TypeError, match=r"out_a: expected a torch\.Tensor, got float"):
        merge_attention(1.0, *given[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_place(dtype: torch.dtype) -> None:
    """The merge writes to some rows of a larger output."""
    first, block = attend(*problem(dtype)), attend(*problem(torch.bfloat16))
    out, lse = torch.zeros(2, 4, 9, 6, dtype=dtype), torch.zeros(2, 4, 9, dtype=dtype)
    rows = slice(3, 8)
    out[:, :, rows], lse[:, :, rows] = first
    merge_into(out[:, :, rows], lse[:, :, rows], *block)
    expected = merge_attention(*first, *block)
    assert torch.equal(out[:, :, rows], expected[0]) and torch.equal(lse[:, :, rows], expected[1])
    assert bool((out[:, :, :3] == 0).all()) and bool((out[:, :, 8:] == 0).all())


def test_it_compiles() -> None:
    given = [*attend(*problem()), *attend(*problem())]
    compiled = torch.compile(merge_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), merge_attention(*given))


def test_importing_fastattn_does_not_import_it() -> None:
    assert "distributed" not in fastattn.__all__
