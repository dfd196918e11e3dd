"""Tests every Triton kernel as Triton compiles it for sm_90 (wgmma), with the tiles that an H200 gets.

Without a GPU, the other tests of these kernels run them as compiled for sm_80.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import attention_cases
import decode_cases
import int8_cases
import merge_cases
from attention_cases import Case

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels run on the GPU, not on the emulator", allow_module_level=True)

from emulator import device, launches, options

CAUSAL = (-1, 0)
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def launched() -> Iterator[list[launches.Launched]]:
    """Emulates a Hopper GPU, and yields the list of the test's launches."""
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
    # Long enough for each pipeline of three stages to wrap around, with full, masked and cut-off tiles.
    Case(shape=(1, 1, 1, 330, 340), head_dims=(64, 64), small_tile=False, dtype=torch.bfloat16),
    Case(shape=(1, 1, 1, 330, 340), head_dims=(128, 128), window=CAUSAL, small_tile=False),
    Case(shape=(1, 1, 1, 140, 150), head_dims=(256, 256), window=CAUSAL, small_tile=False, dtype=torch.bfloat16),
    Case(
        shape=(1, 2, 1, 0, 0), head_dims=(64, 64), lengths=((17, 0, 33), (20, 5, 47)), window=CAUSAL, small_tile=False
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_forward_and_backward(
    case: Case, launched: list[launches.Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_cases.check(case, monkeypatch)
    assert used(launched, "wgmma.mma_async")


@pytest.mark.slow
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL], ids=str)
def test_a_value_that_is_nan_reaches_the_rows_that_see_it(
    window: tuple[int, int], launched: list[launches.Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last, masked tile leaves the NaN value out of its product, and writes NaN after the output is stored."""
    case = Case(shape=(1, 1, 1, 140, 150), head_dims=(64, 64), window=window, small_tile=False)
    problem = attention_cases.make_problem(case)
    problem.value[:, :, 141, 3] = torch.nan
    out = attention_cases.run_kernels(case, problem, monkeypatch)["out"]
    expected = torch.zeros(out.shape, dtype=torch.bool)
    expected[:, :, 0 if window == (-1, -1) else 131 :, 3] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("name", ["many-row-tiles", "page-64", "int8-page-64", "everything", "everything-16-bit"])
def test_decode(name: str, dtype: torch.dtype, launched: list[launches.Launched]) -> None:
    """A tile of decoding has fewer rows than a wgmma, so Triton uses mma.sync."""

    case = next(case for case in decode_cases.CASES if case.name == name)
    decode_cases.check(replace(case, dtype=dtype), decode_cases.operator_of(torch.ops.fastattn_triton))
    assert used(launched, "mma.sync")


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
def test_merge_attention(dtype: torch.dtype) -> None:
    merge_cases.check(merge_cases.problem((2, 2, 40, 128), (torch.float32, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=["f16", "bf16"])
@pytest.mark.parametrize("granularity", ["channel", 32])
@pytest.mark.parametrize("m", [65, 130])
def test_int8_matmul(m: int, granularity: str | int, dtype: torch.dtype, launched: list[launches.Launched]) -> None:
    ops = torch.ops.fastattn_triton
    weight, scale = int8_cases.quantised(80, 256, granularity, seed=m)
    x, bias, residual = (int8_cases.normal(*shape, seed=m, dtype=dtype) for shape in ((m, 256), (80,), (m, 80)))
    int8_cases.check_forward(ops.int8_matmul, x, weight, scale, bias, residual, "gelu")
    int8_cases.check_grad_input(
        ops.int8_matmul_grad_input, int8_cases.normal(m, 80, seed=m, dtype=dtype), weight, scale
    )
    assert used(launched, "wgmma.mma_async")
