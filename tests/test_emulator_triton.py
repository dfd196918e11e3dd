"""Triton kernels as Triton compiles them for sm_80, on the emulator: small ones, and those of the package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attention_cases
import test_triton_decode as decode
import test_triton_int8 as int8
from attention_cases import Case

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not on the emulator")

import triton.language as tl  # noqa: E402

from emulator import Report  # noqa: E402
from emulator.triton_compile import on_emulator  # noqa: E402
from emulator_kernels import histogram_kernel, matmul_kernel  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16]
CAUSAL = (-1, 0)
# The launchers' own tiles: what is compiled is what a GPU would get.
CASES = [
    Case(shape=(1, 2, 1, 77, 131), head_dims=(64, 64), window=CAUSAL, small_tile=False),
    Case(shape=(1, 2, 2, 50, 90), head_dims=(128, 128), small_tile=False, grad_lse=True),
    Case(shape=(1, 1, 1, 33, 47), head_dims=(64, 64), window=(20, 5), softcap=5.0, sinks=True, small_tile=False),
    Case(shape=(1, 2, 1, 33, 47), head_dims=(40, 24), alibi="head", window=CAUSAL, small_tile=False),
    Case(shape=(1, 2, 1, 33, 47), mask="float", dropout=0.3),
    Case(shape=(1, 2, 1, 33, 47), mask="bool", mask_shape=(1, 0, 1, 1)),
    Case(shape=(1, 2, 1, 0, 0), lengths=((17, 0, 33), (20, 5, 47)), window=CAUSAL),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_forward_and_backward(case: Case, dtype: torch.dtype, monkeypatch: Any) -> None:
    case = replace(case, dtype=dtype)
    reports: list[Report] = []
    with on_emulator(seed=7, after=reports.append):
        attention_cases.check(case, monkeypatch)
    assert sum(report.instructions.get("tensor core", 0) for report in reports) > 0


DECODE_CASES = (
    "one-query",
    "lengths-out-of-range",
    "append-out-of-range",
    "many-row-tiles",
    "sinks-split",
    "rotary-partial-interleaved",
    "page-16",
    "int8-append",
    "int8-page-64",
    "everything",
    "everything-16-bit",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode(name: str, dtype: torch.dtype) -> None:
    case = next(case for case in decode.CASES if case.name == name)
    reports: list[Report] = []
    with on_emulator(seed=3, after=reports.append):
        decode.check(replace(case, dtype=dtype))
    assert reports


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("granularity", ["channel", 32, 128])
@pytest.mark.parametrize("m", [1, 65, 130])
def test_int8_matmul(m: int, granularity: str | int, dtype: torch.dtype) -> None:
    weight, scale = int8.quantised(80, 256, granularity, seed=m)
    x, bias, residual = (int8.normal(*shape, seed=m, dtype=dtype) for shape in ((m, 256), (80,), (m, 80)))
    reports: list[Report] = []
    with on_emulator(seed=5, after=reports.append):
        int8.check_forward(x, weight, scale, bias, residual, "gelu")
        int8.check_grad_input(int8.normal(m, 80, seed=m, dtype=dtype), weight, scale)
    assert len(reports) >= 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_matmul(dtype: torch.dtype, transposed: bool) -> None:
    """Small integers, so that the result is exact; sizes that fill no block."""
    m, n, k = 70, 50, 90
    a, b = torch.randint(-8, 9, (m, k)).to(dtype), torch.randint(-8, 9, (k, n)).to(dtype)
    strided = b.T.contiguous().T if transposed else b
    out = torch.empty(m, n, dtype=torch.int32 if dtype == torch.int8 else torch.float32)
    total = tl.int32 if dtype == torch.int8 else tl.float32
    reports: list[Report] = []
    with on_emulator(after=reports.append):
        matmul_kernel[(3, 2)](
            a, strided, out, m, n, k, *strided.stride(), SUM=total, M_BLOCK=32, N_BLOCK=32, K_BLOCK=32
        )
    assert torch.equal(out.double(), a.double() @ b.double())
    assert reports[0].tensor_core


def test_atomics() -> None:
    values, counts = torch.randint(0, 10, (1000,), dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    with on_emulator():
        histogram_kernel[(8,)](values, counts, 1000, BLOCK=128)
    assert torch.equal(counts.long(), values.bincount(minlength=10))
