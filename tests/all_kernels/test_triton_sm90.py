"""Every Triton kernel of the package as Triton compiles it for sm_90 (wgmma), with the tiles that an H200 gets.

The other tests of these kernels run them as compiled for sm_80 where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import attention_cases
import test_triton_decode as decode
import test_triton_int8 as int8
from attention_cases import Case

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not on the emulator")

from emulator import device, launches, options  # noqa: E402

CAUSAL = (-1, 0)
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[launches.Launched]]:
    """The launches of the test."""
    with device.emulated(90), options.launching(seed=7), launches.recorded() as found:
        yield found


def used(launched: list[launches.Launched], opcode: str) -> bool:
    return any(row.opcode.startswith(opcode) for one in launched for row in one.report.rows)


CASES = [
    Case(shape=(1, 2, 1, 77, 131), head_dims=(64, 64), window=CAUSAL, small_tile=False, dtype=torch.bfloat16),
    Case(shape=(1, 2, 2, 50, 90), head_dims=(128, 128), small_tile=False, grad_lse=True),
    Case(shape=(1, 1, 1, 33, 47), head_dims=(64, 64), window=(20, 5), softcap=5.0, sinks=True, small_tile=False),
    Case(shape=(1, 2, 1, 33, 47), head_dims=(40, 24), alibi="head", window=CAUSAL, small_tile=False),
    Case(
        shape=(1, 2, 1, 33, 47), head_dims=(64, 64), mask="float", dropout=0.3, small_tile=False, dtype=torch.bfloat16
    ),
    Case(shape=(1, 2, 1, 33, 47), head_dims=(64, 64), mask="bool", mask_shape=(1, 0, 1, 1), small_tile=False),
    Case(
        shape=(1, 2, 1, 0, 0), head_dims=(64, 64), lengths=((17, 0, 33), (20, 5, 47)), window=CAUSAL, small_tile=False
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_forward_and_backward(
    case: Case, launched: list[launches.Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_cases.check(case, monkeypatch)
    assert used(launched, "wgmma.mma_async")


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("name", ["many-row-tiles", "page-64", "int8-page-64", "everything", "everything-16-bit"])
def test_decode(name: str, dtype: torch.dtype, launched: list[launches.Launched]) -> None:
    """With fewer rows than a wgmma has."""
    case = next(case for case in decode.CASES if case.name == name)
    decode.check(replace(case, dtype=dtype))
    assert used(launched, "mma.sync")


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("granularity", ["channel", 32])
@pytest.mark.parametrize("m", [65, 130])
def test_int8_matmul(m: int, granularity: str | int, dtype: torch.dtype, launched: list[launches.Launched]) -> None:
    weight, scale = int8.quantised(80, 256, granularity, seed=m)
    x, bias, residual = (int8.normal(*shape, seed=m, dtype=dtype) for shape in ((m, 256), (80,), (m, 80)))
    int8.check_forward(x, weight, scale, bias, residual, "gelu")
    int8.check_grad_input(int8.normal(m, 80, seed=m, dtype=dtype), weight, scale)
    assert used(launched, "wgmma.mma_async")
