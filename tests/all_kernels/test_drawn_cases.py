"""Runs compiled kernels on the emulator, with random shapes, strides, options and orders of warps.

Each run draws the same cases (``derandomize``), and a failure names the smallest failing case. Options for which Triton
compiles another kernel are drawn from short lists.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import attention_cases
import decode_cases
import int8_cases
from attention_cases import Case
from cuda_kernels import EMULATED, HAS_KERNELS, NO_KERNELS, checked
from oracle import check_against_oracle

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import device, options

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("emulated_gpu"),
    pytest.mark.skipif(not EMULATED, reason="kernels run on the GPU, not on the emulator"),
]

# FASTATTN_EXAMPLES=1000 draws more examples, other ones in each run.
MORE = int(os.environ.get("FASTATTN_EXAMPLES", "0"))


def drawing(examples: int) -> Any:
    return settings(
        max_examples=MORE or examples,
        derandomize=not MORE,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@pytest.fixture(autouse=True)
def allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loosens the bound of `check_against_oracle`, as its docstring says for drawn shapes."""
    for module in (attention_cases, decode_cases, int8_cases):
        monkeypatch.setattr(module, "check_against_oracle", functools.partial(check_against_oracle, allowance=4.0))


SEEDS = st.integers(0, 2**32 - 1)
HEADS = st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 1), (4, 2)])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16])


@st.composite
def strided(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """Copies a tensor into a 16-byte aligned view with another order of dims in memory, and NaN in the gaps."""
    order = draw(st.permutations(range(tensor.ndim - 1)))
    gaps = [draw(st.integers(0, 2)) for _ in order]
    shape = [tensor.shape[dim] + gap for dim, gap in zip(order, gaps, strict=True)]
    row = tensor.shape[-1] + 8 * draw(st.integers(0, 1))
    buffer = torch.full((*shape, row), torch.nan, dtype=tensor.dtype)
    view = buffer.permute(*(order.index(dim) for dim in range(tensor.ndim - 1)), tensor.ndim - 1)
    view = view[tuple(slice(0, size) for size in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
@pytest.mark.usefixtures("tracked_tensors")
@drawing(30)
@given(data=st.data(), dtype=DTYPES, heads=HEADS, head_dim=st.sampled_from([64, 128]), seed=SEEDS)
def test_native_forward(data: Any, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, seed: int) -> None:
    rows, keys, batch = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 260)), data.draw(st.integers(1, 2))
    causal, top_left = data.draw(st.booleans()), data.draw(st.booleans())
    case = Case(
        shape=(batch, heads[0], heads[0] // heads[1], rows, keys),
        head_dims=(head_dim, head_dim),
        dtype=dtype,
        window=(-1, 0 if causal else -1),
        first_row=0 if top_left and causal else None,
        scale=data.draw(st.sampled_from([0.02, 0.125, 1.0, -0.3])),
    )
    problem = attention_cases.make_problem(case)
    for name in ("query", "key", "value"):
        setattr(problem, name, data.draw(strided(getattr(problem, name))))
    with checked(seed=seed):
        out, lse, _ = torch.ops.fastattn.attention_forward(*attention_cases.forward_arguments(case, problem))
    found = {"out": out, "lse": lse}
    attention_cases.compare(case, problem, found, names=found)


# Triton compiles one kernel per case: odd sizes above 1 are not specialised, and strides are multiples of 16.
ATTENTION = [
    Case(window=(-1, 0), head_dims=(64, 64), dtype=torch.bfloat16),
    Case(window=(20, 3), softcap=5.0, sinks=True, head_dims=(48, 16)),
    Case(mask="inf", mask_shape=(0, 1, 1, 1), alibi="batch"),
]
ODD = st.integers(1, 35).map(lambda half: 2 * half + 1)


@pytest.mark.slow
@drawing(12)
@given(data=st.data(), case=st.sampled_from(ATTENTION), heads=st.sampled_from([(2, 1), (3, 1), (4, 2)]), seed=SEEDS)
def test_triton_attention(
    data: Any, case: Case, heads: tuple[int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws so many keys that some query sees at least two. Otherwise the gradients are zero but for roundings, and
    PyTorch's composite computation, which sets the bound, has no error at all."""
    rows, keys, batch = data.draw(ODD), data.draw(ODD.map(lambda keys: keys + 6)), data.draw(st.integers(1, 3))
    layout = data.draw(st.sampled_from(["bhsd", "bshd"]))
    shape = (batch, heads[0], heads[0] // heads[1], rows, keys)
    with options.launching(seed=seed):
        attention_cases.check(replace(case, shape=shape, layout=layout, seed=seed % 1000), monkeypatch)


@drawing(6)
@given(data=st.data(), page_size=st.sampled_from([0, 16]), dtype=DTYPES, seed=SEEDS)
def test_triton_decode(data: Any, page_size: int, dtype: torch.dtype, seed: int) -> None:
    lengths = data.draw(st.lists(st.integers(-5, 170), min_size=1, max_size=4))
    new, splits = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5))
    case = decode_cases.Case(
        "drawn",
        tuple(lengths),
        page_size=page_size,
        capacity=160,
        new=new,
        splits=splits,
        dtype=dtype,
        seed=seed % 1000,
    )

    with options.launching(seed=seed):
        decode_cases.check(case, decode_cases.operator_of(torch.ops.fastattn_triton))


def check_int8(ops: Any, x: Tensor, grad_out: Tensor, weight: Tensor, scale: Tensor) -> None:
    int8_cases.check_forward(ops.int8_matmul, x, weight, scale)
    int8_cases.check_grad_input(ops.int8_matmul_grad_input, grad_out, weight, scale)


@pytest.mark.slow
@drawing(8)
@given(m=st.integers(1, 140), n=st.integers(1, 140), groups=st.integers(1, 5), dtype=DTYPES, seed=SEEDS)
def test_triton_int8_matmul(m: int, n: int, groups: int, dtype: torch.dtype, seed: int) -> None:
    k = 32 * groups
    weight, scale = int8_cases.quantised(n, k, 32, seed=seed % 1000)
    x, grad_out = int8_cases.normal(m, k, seed=m, dtype=dtype), int8_cases.normal(m, n, seed=n, dtype=dtype)
    with options.launching(seed=seed):
        check_int8(torch.ops.fastattn_triton, x, grad_out, weight, scale)


@pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
@pytest.mark.usefixtures("tracked_tensors")
@drawing(30)
@given(data=st.data(), m=st.integers(1, 140), dtype=DTYPES, num_sms=st.integers(1, 20), seed=SEEDS)
def test_native_int8_matmul(data: Any, m: int, dtype: torch.dtype, num_sms: int, seed: int) -> None:
    granularity = data.draw(st.sampled_from(int8_cases.GRANULARITIES))
    step = granularity if isinstance(granularity, int) else 16
    n, k = 8 * data.draw(st.integers(1, 40)), step * data.draw(st.integers(1, 640 // step))
    weight, scale = int8_cases.quantised(n, k, granularity, seed=seed % 1000)
    x = data.draw(strided(int8_cases.normal(2, m, k, seed=m, dtype=dtype)))
    grad_out = data.draw(strided(int8_cases.normal(2, m, n, seed=n, dtype=dtype)))
    with device.emulated(90, num_sms=num_sms), checked(seed=seed):
        check_int8(torch.ops.fastattn, x, grad_out, weight, scale)
