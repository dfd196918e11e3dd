"""Tests the CUDA C++ forward kernel with every option, through its op, against the oracle; on a GPU or the emulator."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
from attention_cases import Case, compare, forward_arguments, make_problem
from cuda_kernels import DTYPES, EMULATED, FAMILY, MARKS, checked, each_dtype, only_emulated
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import launches

pytestmark = MARKS

CAUSAL = (-1, 0)
KERNEL = "attention_forward_options_sm80"
PLAIN_KERNEL = "attention_forward_sm80"
# Two tiles of rows and several of keys; the last of each is not full.
SHAPE = (1, 2, 1, 141, 101)
OPTIONS = [
    Case(window=CAUSAL, shape=(1, 2, 1, 47, 133)),
    Case(window=CAUSAL, first_row=0, shape=SHAPE),
    Case(window=(7, -1), shape=SHAPE),
    Case(window=(-1, 5), shape=SHAPE),
    Case(window=(40, 3), shape=(1, 2, 1, 101, 141)),
    Case(window=(0, 0), shape=(1, 2, 1, 140, 140)),
    Case(window=(2**31 - 1, 2**31 - 1), shape=SHAPE),
    Case(softcap=2.0, window=CAUSAL, shape=SHAPE),
    Case(alibi="head", shape=SHAPE),
    Case(alibi="batch", shape=(2, 3, 1, 17, 140), window=CAUSAL),
    Case(sinks=True, window=CAUSAL, shape=SHAPE),
    Case(sinks=True, shape=(1, 2, 1, 5, 0)),
    Case(dropout=0.3, shape=SHAPE),
    Case(dropout=0.7, window=CAUSAL, shape=(2, 2, 1, 30, 150)),
    Case(dropout=1.0, shape=SHAPE),
    Case(scale=0.0, softcap=1.0, shape=SHAPE),
    Case(scale=-0.4, sinks=True, shape=SHAPE),
    Case(shape=(2, 6, 3, 33, 77), window=(30, 30)),
    Case(shape=(1, 4, 4, 33, 77), sinks=True),
    Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=SHAPE),
    Case(mask="bool", mask_shape=(1, 1, 0, 1), shape=(2, 2, 2, 133, 47)),
    Case(mask="bool", mask_shape=(1, 0, 1, 0), shape=(2, 2, 1, 33, 77)),  # whole rows masked
    Case(mask="float", mask_shape=(1, 2, 1, 1), shape=(2, 4, 2, 33, 77)),
    Case(mask="float", mask_shape=(0, 1, 1, 1), shape=SHAPE, dropout=0.2),
    Case(mask="float", mask_shape=(1, 0, 1, 1), shape=(2, 3, 1, 20, 95), window=CAUSAL),
    Case(mask="float", mask_shape=(0, 0, 0, 0), shape=(2, 2, 1, 33, 77), softcap=3.0),
    Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=SHAPE),
    Case(mask="inf", mask_shape=(1, 2, 1, 0), sinks=True),
    Case(mask="min", mask_shape=(1, 0, 0, 1), shape=(2, 2, 1, 33, 77)),
    Case(mask="all min", mask_shape=(0, 0, 1, 1), shape=(2, 2, 1, 33, 77)),
    Case(layout="bshd", shape=(2, 4, 2, 19, 65), softcap=5.0),
    Case(layout="sliced", shape=(2, 4, 2, 19, 65), softcap=5.0),
    Case(layout="misaligned", shape=(2, 4, 2, 19, 65), softcap=5.0),
    Case(magnitude=30.0, window=(9, 9), shape=SHAPE),
]
# Each kernel's own head dim and some below, with values narrower and wider than queries.
HEAD_DIMS = [(32, 32), (8, 24), (64, 64), (40, 64), (96, 96), (96, 72), (128, 128), (128, 16), (192, 128), (256, 256)]
PACKED = ((5, 0, 133, 1, 17), (40, 7, 0, 1, 70))
PACKED_CASES = [
    Case(lengths=PACKED),
    Case(lengths=PACKED, window=CAUSAL, shape=(1, 4, 2, 0, 0), sinks=True),
    Case(lengths=PACKED, window=(9, 2), softcap=2.0, head_dims=(40, 24)),
    Case(lengths=PACKED, alibi="batch", dropout=0.4, window=CAUSAL),
    Case(lengths=((0, 0), (3, 4))),
]


# Cases of the kernel without options, other than full and causal attention.
PLAIN_CASES = [
    Case(window=(40, 3), shape=(1, 2, 1, 141, 301)),
    Case(window=(150, 20), shape=(1, 2, 2, 200, 330)),  # full tiles between masked ones
    Case(window=(90, 0), shape=(1, 2, 1, 301, 301)),
    Case(window=(0, 0), shape=(1, 2, 1, 130, 130)),
    Case(window=(-1, 70), first_row=0, shape=(1, 2, 1, 141, 201)),
    Case(window=(5, 2), first_row=0, shape=(1, 2, 1, 301, 101)),  # rows after the last key see none
    Case(window=(5, 2), shape=(1, 2, 1, 301, 101), sinks=True),  # rows before the first key, with a sink
    Case(sinks=True, shape=(1, 4, 2, 33, 200)),
    Case(sinks=True, window=(0, 0), scale=-0.3, shape=(1, 2, 1, 33, 33)),
    Case(lengths=PACKED, window=(9, 2), sinks=True, shape=(1, 4, 2, 0, 0)),
    Case(lengths=((130, 0, 1, 64), (200, 64, 0, 300))),
    Case(lengths=((130, 0, 1, 64), (200, 64, 0, 300)), window=CAUSAL),
]


def run(case: Case, **launching: Any) -> dict[str, Tensor]:
    problem = make_problem(case)
    with checked(**launching):
        out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    return {"out": out, "lse": lse}


def check(case: Case, **launching: Any) -> None:
    compare(case, make_problem(case), run(case, **launching), names=("out", "lse"))


@each_dtype
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_each_option(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype), seed=case.shape[-1])


@each_dtype
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_head_dims(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(Case(head_dims=head_dims, dtype=dtype, window=(50, 4), sinks=True, shape=SHAPE))


@each_dtype
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "head_dim", "dtype"),
    in_turn(itertools.product(PLAIN_CASES, (32, 64, 96, 128, 192, 256)), DTYPES),
    ids=str,
)
def test_the_kernel_without_options(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    case = replace(case, head_dims=(head_dim, head_dim), dtype=dtype)
    if not EMULATED:
        check(case)
        return
    with launches.recorded() as found:
        check(case)
    assert [PLAIN_KERNEL in launched.report.kernel for launched in found] == [True]


def test_windows_and_sinks_leave_nan_in_masked_keys_alone() -> None:
    """NaN between packed sequences, and in keys that no row sees, is never multiplied."""
    case = Case(lengths=((70, 30), (150, 200)), window=(20, 5), sinks=True, head_dims=(64, 64))
    problem, clean = make_problem(case), run(case)
    problem.key[60:70], problem.value[60:70] = torch.nan, torch.inf  # row i of sequence 0 sees keys 60 + i to 85 + i
    problem.value[150 + 140 :][:5] = torch.nan  # row i of sequence 1 sees keys 150 + i to 175 + i
    with checked():
        out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    rows = torch.cat([torch.arange(10, 70), torch.arange(70, 100)])
    assert torch.equal(out[rows], clean["out"][rows]) and torch.equal(lse[:, rows], clean["lse"][:, rows])
    assert out[:10].isnan().all()


@pytest.mark.parametrize("broken", [(0, 300, 2, 40), (-7, 5, 2**31 - 1, 9), (9, 9, 9, 9)], ids=str)
def test_offsets_in_device_memory_are_not_trusted(broken: tuple[int, ...]) -> None:
    """With any offsets, nothing outside of the tensors is touched. Sequences that overlap write the same rows."""
    case = Case(lengths=((20, 13, 7), (11, 30, 8)))
    problem = make_problem(case)
    problem.cu_seqlens_q = torch.tensor(broken, dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor(broken[::-1], dtype=torch.int32, device=DEVICE)
    with checked(races=False):
        out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    assert not out.isnan().any() and not lse.isnan().any()


@each_dtype
@pytest.mark.parametrize("spoiled", ["nan", "inf"])
@pytest.mark.parametrize(
    "case",
    [
        Case(window=(20, 3), shape=(1, 2, 1, 60, 80), softcap=4.0),
        Case(window=(6, 2), shape=(1, 2, 2, 50, 60), sinks=True),
        Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 40, 70)),
        Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 40, 70), dropout=0.3),
    ],
    ids=str,
)
def test_masked_keys_have_no_influence(case: Case, spoiled: str, dtype: torch.dtype) -> None:
    """NaN or infinity in one key reaches the rows that see it, and no other."""
    case = replace(case, dtype=dtype)
    problem, at = make_problem(case), 17
    clean = run(case)
    for tensor in (problem.key, problem.value):
        tensor[:, :, at] = float(spoiled)
    with checked():
        out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    row = torch.arange(case.shape[3])[:, None] + case.shape[4] - case.shape[3]
    left, right = (side if side >= 0 else 10**6 for side in case.window)
    sees = ((row - left <= at) & (at <= row + right)).view(1, 1, -1).to(DEVICE)
    if problem.bias is not None:
        column = problem.bias.expand(*case.shape[:2], *case.shape[3:])[..., at]
        sees = sees & (column if column.dtype == torch.bool else column != -torch.inf)
    sees = sees.expand(lse.shape)
    assert sees.any() and not sees.all()
    assert torch.equal(out[~sees], clean["out"][~sees]) and torch.equal(lse[~sees], clean["lse"][~sees])
    if spoiled == "nan":
        assert out[sees].isnan().all()


@pytest.mark.skipif(not EMULATED, reason="a GPU takes whatever order it likes")
def test_order_of_warps_and_copies_has_no_influence() -> None:
    case = Case(window=(30, 30), shape=(1, 2, 1, 200, 150), dropout=0.2, mask="float", mask_shape=(0, 1, 1, 1))
    first, again = run(case, seed=100), run(case, seed=1)
    assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])


@only_emulated
def test_key_tiles_that_no_row_sees_are_not_visited() -> None:
    """With a window of 8 keys of 1000, the tensor cores work on the tiles at the diagonal only."""
    case = Case(window=(8, 0), shape=(1, 1, 1, 1000, 1000), head_dims=(64, 64))
    with launches.recorded() as found:
        run(case)
    (launched,) = found
    assert PLAIN_KERNEL in launched.report.kernel
    assert launched.report.bank_conflicts == 0
    (work,) = launched.report.tensor_core.values()
    assert work.multiply_adds <= 2 * 8 * 128 * (128 + 2 * 32) * 64


@each_dtype
def test_the_public_functions_choose_the_kernel_without_options(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 40, 64, dtype=dtype, device=DEVICE) for _ in range(3))
    name = f"attention_forward_sm{FAMILY}<64, {str(dtype).removeprefix('torch.')}>"
    options: dict[str, Any] = {"window": (5, 5), "sinks": torch.zeros(2, device=DEVICE)}
    assert fastattn.explain(fastattn.attention, query, key, value, **options).kernel == name
    offsets = torch.tensor([0, 15, 40], dtype=torch.int32, device=DEVICE)
    packed = [t[0].transpose(0, 1) for t in (query, key, value)]
    with fastattn.record() as calls, checked():
        fastattn.attention(query, key, value, **options)
        fastattn.attention_varlen(*packed, offsets, offsets, 25, 25, **options)
    assert calls == [("attention", "cuda", name)] * 2


@each_dtype
def test_the_public_functions_choose_it(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 40, 72, dtype=dtype, device=DEVICE) for _ in range(3))
    name = f"attention_forward_options_sm{FAMILY}<96, {str(dtype).removeprefix('torch.')}>"
    explained = fastattn.explain(fastattn.attention, query, key, value, window=(5, 5), softcap=2.0)
    assert (explained.backend, explained.kernel) == ("cuda", name)
    with fastattn.record() as calls, checked():
        fastattn.attention(query, key, value, window=(5, 5), softcap=2.0)
        fastattn.scaled_dot_product_attention(query, key, value, torch.ones(40, 40, dtype=torch.bool, device=DEVICE))
    assert calls == [("attention", "cuda", name)] * 2
