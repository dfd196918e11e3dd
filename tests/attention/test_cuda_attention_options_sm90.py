"""Tests the Hopper forward kernel with every option against the oracle: in the cases of the kernel for sm_80, and its
own tiles, rings and clusters.

It runs on an H100 or H200 if there is one, else as PTX on the emulated sm_90, with all checks and at several seeds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import instances
import test_cuda_attention_options as options
from attention_cases import Case, compare, forward_arguments, make_problem
from cuda_kernels import DTYPES, EMULATED, HOPPER_MARKS, checked, each_dtype, only_emulated
from fastattn import native
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, device, launches


pytestmark = HOPPER_MARKS

Dims = tuple[int, int]  # head dim of queries and keys, head dim of values
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
CAUSAL = (-1, 0)
KERNEL = "attention_forward_options_sm90"
# This softcap is so large that it changes nothing: with it, cases without options run on this kernel.
NO_OPTION = 1e4

each_head_dim = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)


def name_of(head_dims: Dims, dtype: torch.dtype) -> str:
    return f"{KERNEL}<{', '.join(map(str, dict.fromkeys(head_dims)))}, {str(dtype).removeprefix('torch.')}>"


def changes_scores(case: Case) -> bool:
    return bool(case.softcap > 0 or case.alibi or case.mask or case.dropout > 0)


def run(case: Case, **launching: Any) -> dict[str, Tensor]:
    problem = make_problem(case)
    with checked(**launching):
        out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    return {"out": out, "lse": lse}


def check(case: Case, **launching: Any) -> None:
    """Compares a case with the oracle, and checks that the Hopper kernel with options ran if there are rows."""
    if not changes_scores(case):
        case = replace(case, softcap=NO_OPTION)
    if not EMULATED:
        compare(case, make_problem(case), run(case), names=("out", "lse"))
        return
    with launches.recorded() as found:
        result = run(case, **launching)
    has_rows = case.shape[3] > 0 if case.lengths is None else sum(case.lengths[0]) > 0
    assert [KERNEL in launched.report.kernel for launched in found] == [True] * has_rows
    compare(case, make_problem(case), result, names=("out", "lse"))


# --- What every forward kernel with options must do -------------------------------------------------------------------


@pytest.mark.parametrize(("case", "dtype"), in_turn([(case,) for case in options.OPTIONS], DTYPES), ids=str)
def test_each_option(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype), seed=case.shape[-1])


@each_dtype
@pytest.mark.parametrize("case", options.PACKED_CASES, ids=str)
def test_packed(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype))


@each_dtype
@pytest.mark.parametrize(
    "head_dims",
    [(8, 24), (64, 64), (96, 72), (128, 16), (16, 128), (192, 128), (136, 72), (192, 136), (200, 256)],
    ids=str,
)
def test_head_dims(head_dims: Dims, dtype: torch.dtype) -> None:
    check(Case(head_dims=head_dims, dtype=dtype, window=(150, 4), sinks=True, shape=(1, 4, 2, 70, 300)))


# Several tiles of rows and of keys for each head dim: full tiles, with masked tiles before and after them.
LARGE = (1, 4, 2, 200, 330)


@each_head_dim
@pytest.mark.parametrize(
    "case",
    [
        Case(shape=LARGE, softcap=2.0, window=CAUSAL),
        Case(shape=LARGE, alibi="head", window=(150, 20)),
        Case(shape=LARGE, dropout=0.3, scale=-0.3),
        Case(shape=LARGE, mask="bool", mask_shape=(0, 0, 1, 1), window=CAUSAL),
        Case(shape=LARGE, mask="float", mask_shape=(1, 1, 1, 1), sinks=True, scale=0.0),
        Case(shape=LARGE, mask="inf", mask_shape=(0, 0, 0, 1), softcap=5.0, dropout=0.2),
    ],
    ids=str,
)
def test_options_at_each_head_dim(case: Case, head_dims: Dims) -> None:
    dtype = torch.bfloat16 if case.mask == "float" or case.softcap > 0 else torch.float16
    check(replace(case, head_dims=head_dims, dtype=dtype), seed=sum(head_dims))


# --- Biases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expanded", "keys"),
    in_turn(
        itertools.product(
            [torch.bool, torch.float16, torch.bfloat16, torch.float32], [(), (1,), (2,), (3,), (0, 1, 2)]
        ),
        [256, 255, 330],
    ),
    ids=str,
)
def test_each_kind_of_bias(kind: torch.dtype, expanded: tuple[int, ...], keys: int) -> None:
    """The bias is read in pairs or singly, and tiles end with the keys or beyond. The emulator checks each read."""
    generator = torch.Generator().manual_seed(keys)
    query, key, value = (
        torch.randn(1, 2, rows, 64, generator=generator).to(DEVICE, torch.float16) for rows in (70, keys, keys)
    )
    shape = [1 if dim in expanded else size for dim, size in enumerate((1, 2, 70, keys))]
    bias = torch.randn(shape, generator=generator)
    masked = bias > 0.3
    bias = ~masked if kind == torch.bool else bias.to(kind).masked_fill(masked, -torch.inf)
    bias = bias.to(DEVICE).expand(1, 2, 70, keys)
    with checked():
        out, lse, _ = torch.ops.fastattn.attention_forward(
            query, key, value, bias, None, None, None, None, None, 70, keys, 0.2, -1, -1, None, 0, 0, 0.0, 0.0, None
        )
    expected_out, expected_lse = fastattn.reference.attention(
        query.double(),
        key.double(),
        value.double(),
        scale=0.2,
        bias=bias if kind == torch.bool else bias.double(),
    )
    assert (out.double() - expected_out).abs().max() < 2e-3
    seen = ~expected_lse.isinf()
    assert (lse.double() - expected_lse)[seen].abs().max() < 1e-3
    assert torch.equal(lse.isinf(), ~seen)


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("spoiled", ["nan", "inf"])
@pytest.mark.parametrize(
    "case",
    [
        Case(window=(20, 3), shape=(1, 2, 1, 160, 180), softcap=4.0, head_dims=(64, 64)),
        Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 40, 370), head_dims=(128, 128)),
        Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 240, 270), dropout=0.3, head_dims=(256, 256)),
        Case(mask="bool", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 140, 270), head_dims=(192, 128)),
    ],
    ids=str,
)
def test_masked_keys_have_no_influence(case: Case, spoiled: str, dtype: torch.dtype) -> None:
    options.test_masked_keys_have_no_influence(case, spoiled, dtype)


# --- Rings, persistent CTAs, clusters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dims", "tiles"), in_turn([(dims,) for dims in HEAD_DIMS], (1, 4, 2, 5, 3, 6), each=3), ids=str
)
def test_rings_go_round(head_dims: Dims, tiles: int) -> None:
    """There are any number of key tiles, with and without a masked one, and CTAs take several tiles of rows."""
    tile = native.KERNELS[name_of(head_dims, torch.float16)]
    for missing in (0, 5):
        keys = tiles * tile["block_n"] - missing
        case = Case(shape=(1, 3, 1, 2 * tile["block_m"], keys), head_dims=head_dims, alibi="head")
        check(case, seed=tiles)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("num_sms", [1, 2, 132])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_any_number_of_sms(heads: tuple[int, int], num_sms: int) -> None:
    """Pairs of CTAs share tiles of keys between heads, between tiles of rows, or not at all."""
    shape = (1, heads[0], heads[0] // heads[1], 500, 300)
    with device.emulated(90, num_sms=num_sms):
        for window in ((-1, -1), CAUSAL):
            check(Case(shape=shape, head_dims=(256, 256), window=window, softcap=3.0), seed=num_sms)


@each_dtype
def test_order_of_warps_and_copies_has_no_influence(dtype: torch.dtype) -> None:
    case = Case(window=(230, 30), shape=(1, 2, 1, 300, 450), dropout=0.2, mask="float", mask_shape=(0, 1, 1, 1))
    case = replace(case, dtype=dtype, head_dims=(128, 128))
    first, again = run(case, seed=100), run(case, seed=1)
    assert torch.equal(first["out"], again["out"]) and torch.equal(first["lse"], again["lse"])


@only_emulated
@pytest.mark.parametrize(
    ("instruction", "instead"),
    [
        ("wgmma.wait_group.sync.aligned 1;", ""),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        ("wgmma.fence.sync.aligned;", ""),
    ],
    ids=["no wait for QK", "no wait for PV", "no fence"],
)
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str) -> None:
    case = Case(shape=(1, 2, 1, 200, 500), head_dims=(64, 64), softcap=3.0)
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        check(case)
    assert caught.value.kind == "wgmma"


# --- The dispatcher ---------------------------------------------------------------------------------------------------


@each_head_dim
@each_dtype
def test_the_dispatcher_chooses_the_kernel(head_dims: Dims, dtype: torch.dtype) -> None:
    dims = head_dims[0], *head_dims
    query, key, value = (torch.randn(1, 2, 40, dim, dtype=dtype, device=DEVICE) for dim in dims)
    name = name_of(head_dims, dtype)
    explained = fastattn.explain(fastattn.attention, query, key, value, softcap=2.0)
    assert (explained.backend, explained.kernel) == ("cuda", name)
    with fastattn.record() as calls, checked():
        fastattn.attention(query, key, value, softcap=2.0)
    assert calls == [("attention", "cuda", name)]


def test_every_instance_is_launched() -> None:
    assert instances.rows_of("attention/instances/forward_options_sm90.cu") == sorted(
        (*head_dims, dtype) for head_dims in HEAD_DIMS for dtype in instances.DTYPES
    )
