"""Compares every option that a backend's kernels take with the oracle, through the public functions.

A few calls have many options each; `proof.Gate` counts them. test_three_backends.py tests more options of attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import append_cases
import attention_cases
import decode_cases
import fastattn
import int8_cases
import paged_cases
from cuda_kernels import HAS_KERNELS, NO_KERNELS, checked
from fastattn import reference
from fastattn.functional.int8_weight import Int8Weight
from kernel_device import DEVICE
from oracle import check_against_oracle

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    with checked(), fastattn.use_backend(request.param):
        yield request.param


ATTENTION = {
    "bool mask": attention_cases.Case(head_dims=(32, 32), mask="bool", dtype=torch.bfloat16),
    "packed": attention_cases.Case(head_dims=(32, 32), lengths=((33, 5), (47, 63)), window=(40, 9), alibi="batch"),
    "bias": attention_cases.Case(
        head_dims=(32, 32), mask="float", window=(-1, 0), softcap=20.0, sinks=True, dropout=0.3
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, backend: str) -> None:
    case = ATTENTION[name]
    problem = attention_cases.make_problem(case)
    found = attention_cases.run_public(case, problem, backend)
    attention_cases.compare(case, problem, found, names=found)


def test_pages_and_the_largest_score(backend: str) -> None:
    arguments = paged_cases.make(paged_cases.Case())
    found = fastattn.attention_varlen(**arguments, return_lse=True, return_max_logit=True)
    arguments["return_max_logit"] = True
    wide = {name: each.double() if name in ("query", "key", "value") else each for name, each in arguments.items()}
    exact = reference.attention_varlen(**wide)
    composite = reference.attention_varlen(**arguments, compute_dtype=arguments["query"].dtype)
    for name, *values in zip(("out", "lse", "max logit"), found, exact, composite, strict=True):
        check_against_oracle(name, *values)


DECODE = {
    "scores": decode_cases.Case(
        "scores", dims=(64, 40), queries=3, window=(40, -1), softcap=9.0, alibi="batch", sinks=True
    ),
    "int8 pages": decode_cases.Case(
        "int8 pages", page_size=16, capacity=208, dims=(64, 64), int8=True, new=2, queries=2, rotary_dim=16
    ),
    "fp8": decode_cases.Case("fp8", dims=(128, 128), fp8="heads", new=1, dtype=torch.bfloat16, splits=2),
    "prompt": decode_cases.Case("prompt", dims=(64, 64), queries=70, new=70, heads=(8, 2), capacity=144, int8=True),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str, backend: str) -> None:
    decode_cases.check(DECODE[name], decode_cases.run_public)


def test_a_tree_of_queries(backend: str) -> None:
    case = decode_cases.Case("tree", dims=(64, 64), queries=4, new=4)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool, device=DEVICE)
    arguments = {**decode_cases.make_arguments(case), "tree_mask": tree[None].expand(3, -1, -1)}
    decode_cases.check(case, decode_cases.run_public, arguments)


@pytest.mark.parametrize("cache", [{}, {"int8": True}, {"fp8": "heads"}], ids=["16-bit", "int8", "fp8"])
def test_append_to_cache(cache: dict[str, Any], backend: str) -> None:
    arguments = append_cases.make_arguments(append_cases.Case("append", dims=(64, 72), absent=(-1, 80), **cache))
    expected = append_cases.expected(arguments)
    fastattn.append_to_cache(**arguments)
    append_cases.check_caches(arguments, expected)


@pytest.mark.parametrize(
    ("activation", "backend"), list(itertools.product(["silu", "swiglu"], ["cuda", "triton"])), indirect=["backend"]
)
def test_int8_linear_and_its_gradients(activation: str, backend: str) -> None:
    """Checks the gradients against autograd over the reference in float64."""
    m, n, k = 19, 48, 256
    weight, scale = int8_cases.quantised(n, k, 64)
    bias, residual, _ = int8_cases.epilogue(activation, m, n)
    x, leaves = int8_cases.normal(m, k, seed=1), []

    def result(dtype: torch.dtype, ours: bool) -> Tensor:
        leaves[:] = [each.detach().to(dtype).requires_grad_() for each in (x, bias, residual)]
        if ours:
            return fastattn.int8_linear(
                leaves[0], Int8Weight(weight, scale, 64), leaves[1], activation=activation, residual=leaves[2]
            )
        return reference.int8_linear(leaves[0], weight, scale.to(dtype), leaves[1], activation, leaves[2])

    found = []
    for dtype, ours in ((x.dtype, True), (torch.float64, False), (x.dtype, False)):
        out = result(dtype, ours)
        grad_out = int8_cases.normal(*out.shape, seed=5).to(dtype)
        found.append([out, *torch.autograd.grad(out, leaves, grad_out)])
    for name, *values in zip(("out", "grad x", "grad bias", "grad residual"), *found, strict=True):
        check_against_oracle(name, *values)


def test_int8_activations() -> None:
    if not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    weight, scale = int8_cases.quantised(72, 640, "channel")
    x = int8_cases.normal(5, 640, seed=1)
    with checked(), fastattn.use_backend("cuda"):
        out = fastattn.int8_linear(x, Int8Weight(weight, scale), input_precision="int8")
    int8_cases.assert_near_int8_oracle(out, x, weight, scale)
