"""Compares an instance or two of each kernel of both backends with the oracle, with every check on.

This is all that `-m quick` runs of the kernels. The other modules test all instances, shapes and values.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import append_cases
import attention_cases
import decode_cases
import int8_cases
import merge_cases
from cuda_kernels import HAS_KERNELS, NO_KERNELS, checked
from fastattn import reference
from int8_cases import normal, quantised
from kernel_device import DEVICE

pytest.importorskip("triton")
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("emulated_gpu", "tracked_tensors")]

CAUSAL = (-1, 0)
OPS = {"cuda": torch.ops.fastattn, "triton": torch.ops.fastattn_triton}


@pytest.fixture(params=OPS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not HAS_KERNELS:
        pytest.skip(NO_KERNELS)
    with checked():
        yield request.param


ATTENTION = {
    "causal": attention_cases.Case(
        shape=(1, 2, 2, 70, 150), head_dims=(64, 64), window=CAUSAL, dtype=torch.bfloat16, grad_lse=True
    ),
    "values of another width": attention_cases.Case(shape=(1, 1, 1, 33, 47), head_dims=(128, 96)),
    "options": attention_cases.Case(
        shape=(1, 2, 1, 40, 90), head_dims=(64, 64), window=(40, 9), softcap=8.0, sinks=True, dropout=0.2, alibi="head"
    ),
    "bias": attention_cases.Case(
        shape=(1, 2, 1, 33, 47), head_dims=(32, 32), mask="float", window=CAUSAL, dtype=torch.bfloat16
    ),
    "packed": attention_cases.Case(
        shape=(1, 2, 1, 0, 0), head_dims=(64, 64), lengths=((17, 0, 33), (20, 5, 47)), window=CAUSAL
    ),
    "ranges of keys": attention_cases.Case(shape=(1, 2, 1, 70, 150), head_dims=(64, 64), ranges=2),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_and_its_gradients(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ATTENTION[name]
    attention_cases.use_small_tiles(monkeypatch)
    problem = attention_cases.make_problem(case)
    found = attention_cases.run_public(case, problem, backend, deterministic=True)
    attention_cases.compare(case, problem, found, names=found)


DECODE = {
    "append": decode_cases.Case(
        "append", lengths=(37, 130, 1), dims=(64, 64), new=2, queries=2, rotary_dim=16, dtype=torch.bfloat16
    ),
    "split int8 pages": decode_cases.Case(
        "split int8 pages", page_size=16, capacity=208, dims=(128, 128), int8=True, new=1, splits=3, softcap=9.0
    ),
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(name: str, backend: str) -> None:
    decode_cases.check(DECODE[name], decode_cases.operator_of(OPS[backend]))


@pytest.mark.parametrize("int8", [False, True], ids=["16-bit", "int8"])
def test_append_to_cache(int8: bool, backend: str) -> None:
    arguments = append_cases.make_arguments(append_cases.Case("append", dims=(64, 72), int8=int8, absent=(-1, 80)))
    expected = append_cases.expected(arguments)
    OPS[backend].append_to_cache(**arguments)
    append_cases.check_caches(arguments, expected)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_merge_attention_and_its_gradients(packed: bool, backend: str) -> None:
    merge_cases.check(merge_cases.problem((40, 2, 64) if packed else (1, 2, 40, 64)))


@pytest.mark.parametrize("granularity", ["channel", 64])
@pytest.mark.parametrize("m", [5, 70])
def test_int8_matmul(m: int, granularity: str | int, backend: str) -> None:
    """With few tokens, the kernel splits the sums, and a second Triton kernel combines the partials."""
    outputs, columns = 72, 640
    weight, scale = quantised(outputs, columns, granularity)
    epilogue = int8_cases.epilogue("silu", m, outputs, torch.bfloat16)
    x = normal(m, columns, seed=1, dtype=torch.bfloat16)
    int8_cases.check_forward(OPS[backend].int8_matmul, x, weight, scale, *epilogue)
    grad_out = normal(m, outputs, seed=2, dtype=torch.bfloat16)
    int8_cases.check_grad_input(OPS[backend].int8_matmul_grad_input, grad_out, weight, scale)


@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
def test_int8_matmul_with_int8_activations() -> None:
    """The oracle is float64 over the same int8 tokens: the kernel rounds only its fp32 sums and the result."""
    m, outputs, columns = 5, 72, 640
    weight, scale = quantised(outputs, columns, "channel")
    x = normal(m, columns, seed=1)
    with checked():
        out = torch.ops.fastattn.int8_matmul(x, weight, scale, None, None, "none", True)
    tokens, token_scale = (each.to(DEVICE, torch.float64) for each in reference.quantize_rows(x))
    exact = reference.int8_linear(tokens * token_scale[..., None], weight, scale.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-5)
