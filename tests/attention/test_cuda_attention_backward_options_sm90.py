"""Tests the Hopper backward kernels with options against the oracle: softcap, ALiBi, bias, mask and dropout, combined
with what the kernels without options have.

They run on an H100 or H200 if there is one, else as PTX on the emulated sm_90, with all checks and at several seeds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import fastattn
import test_cuda_attention_backward as backward
from attention_cases import SEED, Case, make_problem, run_reference
from cuda_kernels import DTYPES, EMULATED, HOPPER_MARKS, checked, each_dtype, only_emulated
from kernel_device import DEVICE
from test_cuda_attention_backward_sm90 import (
    BLOCK_N,
    CAUSAL,
    HEAD_DIMS,
    NARROW,
    WIDE,
    check,
    check_any_order,
    check_fault_is_found,
    check_same_bits,
    check_with_one_sm,
    each_fault,
    each_pair,
    each_wide_fault,
    is_plain,
    kernels_for,
)
from turns import in_turn

if EMULATED:
    from emulator import launches

pytestmark = HOPPER_MARKS

SOME = [(64, 64), (128, 128), *WIDE]
some_head_dims = pytest.mark.parametrize("head_dims", SOME, ids=str)


# --- Options ----------------------------------------------------------------------------------------------------------

OPTIONS = [
    *(case for case in backward.OPTIONS if not is_plain(case)),
    Case(mask="bool", mask_shape=(1, 1, 1, 1), shape=(2, 2, 1, 130, 300), window=(200, 40)),
    Case(mask="float", mask_shape=(0, 0, 1, 1), shape=(1, 2, 2, 200, 131), softcap=5.0, dropout=0.3),
    Case(alibi="head", dropout=0.5, shape=(1, 4, 2, 150, 290), window=CAUSAL),
]


TURNS = [
    (case, head_dims, dtype, deterministic)
    for kernel in (HEAD_DIMS[: len(NARROW)], WIDE)
    for case, head_dims, dtype, deterministic in zip(
        OPTIONS, itertools.cycle(kernel), itertools.cycle(DTYPES), itertools.cycle((False, False, True, True))
    )
]


# Head dims and dtypes alternate, as do dQ summed in any order and in one fixed order.
@pytest.mark.parametrize(
    ("case", "deterministic"),
    [
        (replace(case, dtype=dtype, head_dims=head_dims), deterministic)
        for case, head_dims, dtype, deterministic in TURNS
    ],
    ids=str,
)
def test_each_option(case: Case, deterministic: bool) -> None:
    check(case, deterministic=deterministic, seed=sum(case.shape))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(12))
def test_combinations(index: int) -> None:
    """Cases have many options at once, with layouts, sinks and gradients of the lse."""
    head_dims = ((64, 64), (64, 48), (24, 96), (128, 128), (192, 128), (256, 200))[index % 6]
    case = replace(backward.combination(index), head_dims=head_dims)
    if is_plain(case):
        case = replace(case, softcap=9.0)
    check(case, deterministic=index % 2 == 0, seed=index)


@each_dtype
@pytest.mark.parametrize("head_dims", [(8, 24), (72, 96), (64, 128), (104, 88), (136, 8), (64, 160)], ids=str)
def test_head_dims_below_those_of_the_kernels(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(head_dims=head_dims, dtype=dtype, window=(50, 4), softcap=15.0, shape=(1, 2, 2, 81, 170))
    check(case, seed=head_dims[0])


@pytest.mark.parametrize(
    ("lengths", "head_dims"),
    in_turn([((1, 1),), ((64, 128),), ((65, 129),), ((130, 257),), ((1, 300),), ((300, 1),)], SOME, each=3),
    ids=str,
)
def test_lengths_around_tiles(lengths: tuple[int, int], head_dims: tuple[int, int]) -> None:
    """The bias is not read for rows and keys beyond the tensors."""
    shape = (1, 2, 1, *lengths)
    case = Case(
        shape=shape,
        head_dims=head_dims,
        mask="float",
        mask_shape=(0, 1, 1, 1),
        softcap=8.0,
        grad_lse=True,
        dtype=torch.bfloat16,
    )
    check(case, deterministic=True, seed=lengths[0])


# The bias's dims [batch, heads, rows, keys]: 0 where it is broadcast, 1 where it has full size.
BROADCAST = [(0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1), (1, 1, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("mask_shape", BROADCAST, ids=str)
@pytest.mark.parametrize("mask", ["bool", "float", "inf"])
def test_broadcast_masks(mask: str, mask_shape: tuple[int, int, int, int]) -> None:
    head_dims = HEAD_DIMS[(sum(mask_shape) + len(mask)) % len(HEAD_DIMS)]
    case = Case(mask=mask, mask_shape=mask_shape, shape=(2, 4, 2, 100, 150), head_dims=head_dims, sinks=True)
    check(case, seed=sum(mask_shape))


@pytest.mark.parametrize("head_dims", [(64, 64), (256, 256)], ids=str)  # 64 dims load a bias early, 256 late
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "every second", "every third"])
def test_bias_of_any_dtype_and_strides(layout: str, dtype: torch.dtype, head_dims: tuple[int, int]) -> None:
    """Keys of the bias are not adjacent, or not in aligned pairs; the gaps hold NaN."""
    case = Case(mask="float", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 70, 151), head_dims=head_dims)
    problem = make_problem(case)
    assert problem.bias is not None
    bias = problem.bias.to(dtype)
    if layout == "transposed":
        laid_out = bias.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        gap = 3 if layout == "every third" else 2
        buffer = torch.full((*bias.shape[:3], bias.shape[3] * gap + 1), torch.nan, dtype=dtype, device=DEVICE)
        laid_out = buffer[..., 1 : 1 + bias.shape[3] * gap : gap]
        laid_out.copy_(bias)
    problem.bias = laid_out
    found = check(case, problem, deterministic=True)
    problem.bias = bias.contiguous()
    backward.assert_equal(backward.run(case, problem, deterministic=True), found)


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_mask_of_any_strides(mask: str) -> None:
    backward.test_mask_of_any_strides(mask)


@each_pair
@pytest.mark.parametrize("index", [2, 3])
def test_packed(index: int, head_dims: tuple[int, int]) -> None:
    case = backward.PACKED_CASES[index]
    assert not is_plain(case)
    check(replace(case, head_dims=head_dims), deterministic=head_dims[0] in (64, 192), seed=head_dims[0])


@some_head_dims
def test_what_stands_beyond_a_sequence_has_no_influence(head_dims: tuple[int, int]) -> None:
    """Tiles of a packed sequence reach into the next one, whose NaN must not spread."""
    case = Case(lengths=((70, 30, 1), (150, 200, 90)), window=(40, 30), head_dims=head_dims, softcap=5.0, dropout=0.2)
    problem, clean = make_problem(case), backward.run(case, deterministic=True)
    for tensor in (problem.query, problem.grad_out):
        tensor[70:100] = torch.nan
    for tensor in (problem.key, problem.value):
        tensor[150:350] = torch.nan
    found = backward.run(case, problem, deterministic=True)
    for name, begin, end in (("grad_query", 70, 100), ("grad_key", 150, 350), ("grad_value", 150, 350)):
        assert torch.equal(found[name][:begin], clean[name][:begin]), name
        assert torch.equal(found[name][end:], clean[name][end:]), name


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dropout_drops_what_the_reference_drops(head_dim: int) -> None:
    """A dO that singles out rows makes dV show, one by one, which probabilities were kept."""
    rows, keys = 150, 280
    case = Case(shape=(2, 2, 1, rows, keys), head_dims=(head_dim, head_dim), dropout=0.4)
    problem = make_problem(case)
    problem.query.zero_()  # makes every probability 1 / keys
    kept = []
    for first in range(0, rows, head_dim):  # dO of row first + d is 1 in dim d only
        dims = torch.arange(min(head_dim, rows - first))
        problem.grad_out.zero_()
        problem.grad_out[:, :, first + dims, dims] = 1
        found = backward.run(case, problem, deterministic=True)
        kept.append(found["grad_value"][..., dims].transpose(2, 3) != 0)
    each_key = torch.eye(keys, dtype=torch.float64, device=DEVICE).expand(2, 2, keys, keys)
    exact = fastattn.reference.attention(
        problem.query.double(), problem.key.double(), each_key, dropout_p=0.4, dropout_seed=SEED
    )[0]
    assert torch.equal(torch.cat(kept, 2), exact != 0)


@pytest.mark.parametrize(
    ("kind", "head_dims"), in_turn([(kind,) for kind in backward.MAGNITUDES], SOME, each=3), ids=str
)
def test_magnitudes(kind: str, head_dims: tuple[int, int]) -> None:
    backward.check_magnitude(kind, Case(window=CAUSAL, shape=(1, 2, 1, 130, 200), head_dims=head_dims, softcap=30.0))


@each_dtype
def test_every_key_at_finfo_min(dtype: torch.dtype) -> None:
    backward.test_every_key_at_finfo_min(dtype)


@pytest.mark.parametrize(
    ("mask", "poison", "head_dims"),
    in_turn(itertools.product(["bool", "inf"], [torch.nan, torch.inf]), SOME, each=3),
    ids=str,
)
def test_keys_hidden_by_a_mask_have_no_influence(mask: str, poison: float, head_dims: tuple[int, int]) -> None:
    """This holds in tiles without window masking, too."""
    case = Case(mask=mask, mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 192, 300), dropout=0.1, head_dims=head_dims)
    backward.check_keys_hidden_by_a_mask(case, poison)


@pytest.mark.slow
@some_head_dims
@pytest.mark.parametrize(("poison", "dtype"), [(torch.nan, torch.bfloat16), (torch.inf, torch.float16)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(window=CAUSAL, shape=(1, 2, 1, 200, 200), softcap=4.0),
        Case(window=CAUSAL, first_row=0, shape=(1, 2, 1, 70, 150), dropout=0.1),  # no row sees the poisoned keys
    ],
    ids=str,
)
def test_masked_keys_have_no_influence(
    case: Case, head_dims: tuple[int, int], dtype: torch.dtype, poison: float
) -> None:
    backward.test_masked_keys_have_no_influence(replace(case, head_dims=head_dims), dtype, poison)


@pytest.mark.parametrize("head_dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"dropout": 0.3}, {"alibi": "head"}], ids=str)
def test_nan_in_a_key_that_rows_see_reaches_what_the_reference_says(
    options: dict[str, Any], head_dims: tuple[int, int]
) -> None:
    case = Case(window=CAUSAL, shape=(1, 2, 1, 150, 150), head_dims=head_dims, **options)
    problem = make_problem(case)
    problem.key[:, :, 100] = torch.nan
    found = backward.run(case, problem, deterministic=True)
    assert found["grad_query"][:, :, 100:].isnan().all() and found["grad_query"][:, :, :100].isfinite().all()
    assert found["grad_key"][:, :, 100].isnan().all() and found["grad_value"][:, :, 100].isnan().all()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_a_saturated_softcap_keeps_its_gradients(head_dims: tuple[int, int], dropout: float) -> None:
    """Its derivative makes P times the derivative small, but fp16 must not lose the digits: most keys have it so."""
    case = Case(shape=(1, 1, 1, 64, 512), head_dims=head_dims, softcap=50.0, dropout=dropout, dtype=torch.float16)
    problem = make_problem(case)
    level = (5 * case.softcap / head_dims[0] ** 0.5) ** 0.5  # scores before the softcap are about five times it
    for tensor in (problem.query, problem.key):
        tensor.mul_(0.5).add_(level)
    problem.grad_out.mul_(100)
    found = backward.run(case, problem)
    exact = run_reference(case, problem, torch.float64, torch.float64)
    for name in ("grad_query", "grad_key", "grad_value"):
        error = found[name].double() - exact[name].double()
        assert error.norm() < 0.02 * exact[name].double().norm(), name


# --- Order ------------------------------------------------------------------------------------------------------------

ORDERED = [
    Case(window=(90, 30), shape=(1, 4, 2, 200, 150), dropout=0.2, mask="float", mask_shape=(0, 0, 1, 1)),
    Case(window=CAUSAL, shape=(2, 2, 1, 300, 350), softcap=8.0, head_dims=(64, 64), dtype=torch.bfloat16),
    Case(lengths=((5, 0, 133, 1, 17), (40, 7, 0, 1, 270)), shape=(1, 4, 4, 0, 0), alibi="head", head_dims=(96, 96)),
    Case(shape=(1, 4, 2, 200, 150), window=CAUSAL, softcap=8.0, dropout=0.2, head_dims=(256, 256)),
    # There are few work tiles, so CTAs split the rows of a tile.
    Case(shape=(1, 1, 1, 600, 100), alibi="head", dropout=0.2, head_dims=(192, 128), dtype=torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_deterministic_gradients_have_the_same_bits(case: Case) -> None:
    """They are equal in any order of CTAs, warps and copies, and on GPUs of any size."""
    check_same_bits(case, gpus=(1, 132))


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_gradients_in_any_order_are_as_good(case: Case) -> None:
    check_any_order(case)


@pytest.mark.parametrize("tiles", [1, 2, 3, 5])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rings_go_round(tiles: int, head_dim: int) -> None:
    """One CTA takes several tiles of keys, each with ``tiles`` tiles of rows, of heads with different slopes."""
    case = Case(
        shape=(1, 2, 1, 64 * tiles - 3, 2 * BLOCK_N[head_dim]),
        head_dims=(head_dim, head_dim),
        alibi="head",
        dropout=0.1,
        seed=tiles,
    )
    check_with_one_sm(case, seed=tiles)


@only_emulated
@each_fault
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str, kinds: set[str]) -> None:
    case = Case(shape=(1, 2, 1, 200, 300), head_dims=(128, 128), alibi="head", dropout=0.2)
    check_fault_is_found(case, instruction, instead, kinds)


@only_emulated
@each_wide_fault
def test_a_fault_planted_in_the_wide_kernel_is_found(instruction: str, instead: str, kinds: set[str]) -> None:
    case = Case(shape=(1, 2, 1, 200, 130), head_dims=(256, 256), alibi="head", dropout=0.2)
    check_fault_is_found(case, instruction, instead, kinds)


@only_emulated
@each_pair
def test_shared_memory_without_conflicts(head_dims: tuple[int, int]) -> None:
    case = Case(
        head_dims=head_dims,
        window=CAUSAL,
        shape=(1, 1, 1, 256, 256),
        softcap=5.0,
        mask="float",
        mask_shape=(0, 0, 1, 1),
        dropout=0.1,
    )
    with launches.recorded() as found:
        backward.run(case)
    (report,) = (launched.report for launched in found if kernels_for(head_dims)[0] in launched.report.kernel)
    assert report.bank_conflicts == 0


# --- The dispatcher ---------------------------------------------------------------------------------------------------


@each_pair
def test_training_goes_through_both_kernels_for_hopper(head_dims: tuple[int, int]) -> None:
    query, key, value = (
        torch.randn(1, 2, 170, dim).to(DEVICE, torch.bfloat16).requires_grad_() for dim in (head_dims[0], *head_dims)
    )
    with checked(), fastattn.use_backend("cuda"), fastattn.record() as calls:
        fastattn.attention(query, key, value, causal=True, softcap=20.0).float().square().sum().backward()
    forward, gradients = (kernel for _, _, kernel in calls)
    assert forward.startswith("attention_forward_options_sm90<")
    key_value, of_query = kernels_for(head_dims)
    size = ", ".join(map(str, dict.fromkeys(head_dims)))
    assert gradients.split(" + ")[1:] == [
        f"{key_value}<{size}, bfloat16, options>",
        f"{of_query}<{head_dims[0]}, bfloat16>",
    ]
