"""Tests the Hopper backward kernels, with and without options, against the oracle: in the cases of the kernels for
sm_80, and their own rings, exchange of dS and persistent CTAs.

They run on an H100 or H200 if there is one, else as PTX on the emulated sm_90, with all checks and at several seeds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastattn
import instances
import test_attention_gradients as gradients
import test_cuda_attention_backward as backward
from attention_cases import SEED, Case, Problem, make_problem, run_reference
from cuda_kernels import DTYPES, EMULATED, HOPPER_MARKS, checked, each_dtype, only_emulated
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = HOPPER_MARKS

NARROW = (64, 96, 128)
WIDE = ((192, 128), (192, 192), (256, 256))  # head dims of the wide kernel
HEAD_DIMS = tuple((head_dim, head_dim) for head_dim in NARROW) + WIDE
SOME = [(64, 64), (128, 128), *WIDE]
BLOCK_N = {64: 256, 96: 128, 128: 128, 192: 64, 256: 64}
SKIPPED_KEYS = {64: 128, 128: 128, 256: 64}  # keys that a tile skips at a time where none of its rows sees them
CAUSAL = (-1, 0)

each_head_dim = pytest.mark.parametrize("head_dim", NARROW)
each_pair = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
some_head_dims = pytest.mark.parametrize("head_dims", SOME, ids=str)
# The kernels without and with options are two families.
each_family = pytest.mark.parametrize("kernels", ["plain", "options"])


def kernels_for(head_dims: tuple[int, int]) -> tuple[str, str]:
    wide = "_wide" if max(head_dims) > max(NARROW) else ""
    return f"attention_backward_key_value{wide}_sm90", "attention_backward_query_sm90"


def is_plain(case: Case) -> bool:
    """Returns whether the kernel without options runs: it only scales scores and masks them by a window."""
    return not (case.softcap or case.alibi or case.mask or case.dropout)


def by_family(cases: list[Case]) -> list[tuple[str, Case]]:
    return [("plain" if is_plain(case) else "options", case) for case in cases]


def check(case: Case, problem: Problem | None = None, **how: Any) -> dict[str, Tensor]:
    """Compares every gradient with the oracle, and checks that the Hopper kernels ran."""
    if not EMULATED:
        return backward.check(case, problem, **how)
    with launches.recorded() as found:
        result = backward.check(case, problem, **how)
    ran = [launched.report.kernel for launched in found]
    for kernel in kernels_for(case.head_dims):
        assert sum(kernel in each for each in ran) == 1, ran
    return result


each_fault = pytest.mark.parametrize(
    ("instruction", "instead", "kinds"),
    [
        ("wgmma.wait_group.sync.aligned 1;", "", {"wgmma", "race"}),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", {"wgmma", "race"}),
        ("wgmma.fence.sync.aligned;", "", {"wgmma"}),
        ("fence.proxy.async.shared::cta;", "", {"proxy"}),
        ("cp.async.bulk.wait_group.read 0;", "", {"race"}),
    ],
    ids=["no wait for dQ", "no wait for dP", "no fence", "no fence of dS and dQ", "no wait for additions"],
)
each_wide_fault = pytest.mark.parametrize(
    ("instruction", "instead", "kinds"),
    [
        ("wgmma.wait_group.sync.aligned 1;", "", {"race"}),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;", {"wgmma", "race"}),
        ("wgmma.fence.sync.aligned;", "", {"wgmma"}),
        ("fence.proxy.async.shared::cta;", "", {"proxy"}),
        ("cp.async.bulk.wait_group.read 0;", "", {"race"}),
    ],
    ids=["no wait for gradients", "no wait for scores", "no fence", "no fence of dS and dQ", "no wait for additions"],
)


def check_fault_is_found(case: Case, instruction: str, instead: str, kinds: set[str]) -> None:
    """Plants a fault in the kernel for dK and dV, and checks that the emulator finds it."""
    kernel = kernels_for(case.head_dims)[0]
    with cuda_runtime.replaced(instruction, instead, kernel), pytest.raises(EmulatorError) as caught:
        for seed in range(4):  # ends at the first seed that finds it
            backward.run(case, seed=seed)
    assert caught.value.kind in kinds


# --- What every backward kernel must do -------------------------------------------------------------------------------

LENGTHS = [(1, 1), (64, 128), (65, 129), (63, 127), (130, 257), (257, 130), (1, 300), (300, 1)]


MAGNITUDES = gradients.MAGNITUDES[:4]
WINDOWS = [(-1, -1), CAUSAL, (70, 5)]


@pytest.mark.parametrize(
    ("lengths", "window", "head_dim"), in_turn(itertools.product(LENGTHS, WINDOWS), [64, 128]), ids=str
)
def test_shapes(lengths: tuple[int, int], window: tuple[int, int], head_dim: int) -> None:
    # The lse has a gradient for the reason in test_lengths_around_tiles of test_cuda_attention_backward.py.
    shape, dtype = (1, 2, 1, *lengths), DTYPES[(sum(lengths) + head_dim // 64) % 2]
    case = Case(shape=shape, head_dims=(head_dim, head_dim), window=window, dtype=dtype, grad_lse=True)
    check(case, seed=lengths[0], deterministic=lengths[1] % 2 == 0)


@pytest.mark.parametrize(
    ("head_dims", "lengths", "window"),
    in_turn(itertools.product(WIDE, [(1, 1), (64, 128), (65, 63), (190, 130), (1, 200), (200, 1)]), WINDOWS),
    ids=str,
)
def test_shapes_of_wide_heads(head_dims: tuple[int, int], lengths: tuple[int, int], window: tuple[int, int]) -> None:
    dtype = DTYPES[sum(lengths) % 2]
    case = Case(shape=(1, 2, 1, *lengths), head_dims=head_dims, window=window, dtype=dtype, grad_lse=True)
    check(case, seed=lengths[0], deterministic=lengths[0] == 65)


PLAIN = [case for case in backward.OPTIONS if is_plain(case)]


@pytest.mark.parametrize("index", range(len(PLAIN)), ids=[str(case) or "none" for case in PLAIN])
def test_windows_scales_and_sinks(index: int) -> None:
    dtype = DTYPES[index % 2]
    case = replace(PLAIN[index], dtype=dtype, head_dims=HEAD_DIMS[index % len(HEAD_DIMS)])
    check(case, deterministic=index % 4 >= 2, seed=index)


BELOW = [(8, 24), (72, 96), (64, 128), (104, 88), (136, 8), (64, 160)]


@each_dtype
@pytest.mark.parametrize(
    ("kernels", "head_dims"),
    [
        *(("options", head_dims) for head_dims in BELOW),
        *(
            pytest.param("plain", head_dims, marks=pytest.mark.slow)
            for head_dims in (*BELOW, (64, 64), (96, 96), (128, 128), (40, 16), (200, 72))
        ),
    ],
    ids=str,
)
def test_head_dims(kernels: str, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Each kernel runs at its own head dim and below, with values narrower and wider than queries."""
    softcap = 15.0 if kernels == "options" else 0.0
    case = Case(head_dims=head_dims, dtype=dtype, window=(50, 4), softcap=softcap, shape=(1, 2, 2, 81, 170))
    check(case, seed=head_dims[0])


@each_pair
@pytest.mark.parametrize(("kernels", "case"), by_family(backward.PACKED_CASES), ids=str)
def test_packed(kernels: str, case: Case, head_dims: tuple[int, int]) -> None:
    has_pairs = all(sum(lengths) > 0 for lengths in case.lengths)  # else there is nothing to launch
    which = (backward.PACKED_CASES.index(case) + HEAD_DIMS.index(head_dims)) % 2
    case = replace(case, head_dims=head_dims, dtype=DTYPES[which])
    (check if has_pairs else backward.check)(case, deterministic=which == 0, seed=head_dims[0])


@pytest.mark.parametrize(
    ("kernels", "head_dims"),
    [
        *(("options", head_dims) for head_dims in SOME),
        *(pytest.param("plain", head_dims, marks=pytest.mark.slow) for head_dims in HEAD_DIMS),
    ],
    ids=str,
)
def test_what_stands_beyond_a_sequence_has_no_influence(kernels: str, head_dims: tuple[int, int]) -> None:
    """Tiles of a packed sequence reach into the next one, whose NaN must not spread."""
    options: dict[str, Any] = {"softcap": 5.0, "dropout": 0.2} if kernels == "options" else {}
    case = Case(lengths=((70, 30, 1), (150, 200, 90)), window=(40, 30), head_dims=head_dims, **options)
    problem, clean = make_problem(case), backward.run(case, deterministic=True)
    for tensor in (problem.query, problem.grad_out):
        tensor[70:100] = torch.nan
    for tensor in (problem.key, problem.value):
        tensor[150:350] = torch.nan
    found = backward.run(case, problem, deterministic=True)
    for name, begin, end in (("grad_query", 70, 100), ("grad_key", 150, 350), ("grad_value", 150, 350)):
        assert torch.equal(found[name][:begin], clean[name][:begin]), name
        assert torch.equal(found[name][end:], clean[name][end:]), name


@pytest.mark.parametrize("layout", ["bshd", "sliced", "misaligned"])
@each_dtype
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    check(Case(layout=layout, shape=(2, 4, 2, 70, 165), head_dims=(64, 64), window=CAUSAL, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2])
@each_pair
def test_query_heads_that_share_keys(head_dims: tuple[int, int], kv_heads: int) -> None:
    """The CTA of a tile of keys loops over the rows of each query head, whose last tile is not full."""
    heads = 8 if max(head_dims) <= max(NARROW) else 4
    case = Case(shape=(2, heads, kv_heads, 100, 140), head_dims=head_dims, window=CAUSAL, dtype=torch.bfloat16)
    check(case, seed=kv_heads)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", MAGNITUDES)
def test_magnitudes(kind: str, head_dim: int) -> None:
    """Scores are large, and so is delta, to which the products of dP are added."""
    dtype = DTYPES[list(MAGNITUDES).index(kind) % 2]
    shape = (1, 2, 1, 130, 200) if head_dim <= max(NARROW) else (1, 1, 1, 70, 130)
    gradients.check_magnitude(
        "sm_90", kind, Case(window=CAUSAL, shape=shape, head_dims=(head_dim, head_dim), dtype=dtype)
    )


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded_inputs_and_gradients(dim: int, head_dim: int) -> None:
    """Inputs, and the gradient that `out.mean(dim)` sends, have strides of 0."""
    case = Case(shape=(2, 2, 2, 70, 90), head_dims=(head_dim, head_dim))
    problem = make_problem(case)
    for name in ("query", "grad_out") if dim == 2 else ("query", "key", "value", "grad_out"):
        tensor = getattr(problem, name)
        setattr(problem, name, tensor.narrow(dim, 0, 1).expand(tensor.shape))
    check(case, problem)


def test_keys_and_values_that_are_one_row() -> None:
    case = Case(shape=(1, 2, 1, 70, 90))
    for name in ("key", "value"):
        problem = make_problem(case)
        setattr(problem, name, getattr(problem, name)[:, :, :1].expand(-1, -1, 90, -1))
        check(case, problem)


MASKED = [
    Case(window=CAUSAL, shape=(1, 2, 1, 200, 200)),
    Case(window=(6, 2), shape=(1, 2, 2, 290, 300), sinks=True),
    Case(window=CAUSAL, first_row=0, shape=(1, 2, 1, 70, 150)),  # no row sees the poisoned keys
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dims", "case", "poison"),
    in_turn(itertools.product([(64, 64), (128, 128), *WIDE], MASKED), [torch.nan, torch.inf]),
    ids=str,
)
def test_masked_keys_have_no_influence(head_dims: tuple[int, int], case: Case, poison: float) -> None:
    dtype = torch.bfloat16 if poison == torch.inf else torch.float16
    gradients.check_that_masked_keys_have_no_influence("sm_90", replace(case, head_dims=head_dims, dtype=dtype), poison)


# --- Options ----------------------------------------------------------------------------------------------------------

OPTIONS = [
    *(case for case in backward.OPTIONS if not is_plain(case)),
    Case(mask="bool", mask_shape=(1, 1, 1, 1), shape=(2, 2, 1, 130, 300), window=(200, 40)),
    Case(mask="float", mask_shape=(0, 0, 1, 1), shape=(1, 2, 2, 200, 131), softcap=5.0, dropout=0.3),
    Case(alibi="head", dropout=0.5, shape=(1, 4, 2, 150, 290), window=CAUSAL),
]


CASES_OF_OPTIONS = [
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
        for case, head_dims, dtype, deterministic in CASES_OF_OPTIONS
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


@pytest.mark.parametrize(
    ("lengths", "head_dims"),
    in_turn([((1, 1),), ((64, 128),), ((65, 129),), ((130, 257),), ((1, 300),), ((300, 1),)], SOME, each=3),
    ids=str,
)
def test_lengths_around_tiles_with_a_bias(lengths: tuple[int, int], head_dims: tuple[int, int]) -> None:
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


@pytest.mark.parametrize(("kind", "head_dims"), in_turn([(kind,) for kind in MAGNITUDES], SOME, each=3), ids=str)
def test_magnitudes_with_a_softcap(kind: str, head_dims: tuple[int, int]) -> None:
    gradients.check_magnitude(
        "sm_90", kind, Case(window=CAUSAL, shape=(1, 2, 1, 130, 200), head_dims=head_dims, softcap=30.0)
    )


@pytest.mark.parametrize(
    ("mask", "poison", "head_dims"),
    in_turn(itertools.product(["bool", "inf"], [torch.nan, torch.inf]), SOME, each=3),
    ids=str,
)
def test_keys_hidden_by_a_mask_have_no_influence(mask: str, poison: float, head_dims: tuple[int, int]) -> None:
    """This holds in tiles without window masking, too."""
    case = Case(mask=mask, mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 192, 300), dropout=0.1, head_dims=head_dims)
    gradients.check_keys_hidden_by_a_mask("sm_90", case, poison)


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
def test_masked_keys_have_no_influence_with_options(
    case: Case, head_dims: tuple[int, int], dtype: torch.dtype, poison: float
) -> None:
    gradients.check_that_masked_keys_have_no_influence("sm_90", replace(case, head_dims=head_dims, dtype=dtype), poison)


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


# --- CTAs that split a tile of keys -----------------------------------------------------------------------------------

SHARED = {
    "query heads divided": Case(shape=(1, 8, 1, 150, 200), window=CAUSAL, head_dims=(128, 128)),
    "three query heads": Case(shape=(1, 6, 2, 140, 100), head_dims=(64, 64), dtype=torch.bfloat16),
    "rows divided": Case(shape=(1, 1, 1, 700, 150), head_dims=(96, 96), sinks=True, grad_lse=True),
    "both": Case(shape=(1, 2, 1, 900, 130), window=(200, 60), head_dims=(128, 128)),
    "tiles too short": Case(shape=(1, 2, 1, 500, 500), window=CAUSAL, head_dims=(64, 64)),
    "narrower heads": Case(shape=(1, 4, 1, 300, 270), head_dims=(72, 40), dtype=torch.bfloat16),
    "wide heads": Case(shape=(1, 4, 1, 300, 130), window=CAUSAL, head_dims=(192, 128)),
    "wide heads, rows divided": Case(shape=(1, 1, 1, 600, 100), head_dims=(256, 256), dtype=torch.bfloat16),
    "wide heads, packed": Case(lengths=((5, 0, 333), (40, 7, 90)), shape=(1, 4, 2, 0, 0), head_dims=(192, 192)),
    "packed": Case(lengths=((5, 0, 333, 1, 170), (40, 7, 90, 0, 270)), shape=(1, 8, 2, 0, 0), head_dims=(128, 128)),
    "packed, causal": Case(lengths=((130, 600), (129, 900)), shape=(1, 1, 1, 0, 0), window=CAUSAL, head_dims=(64, 64)),
}


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("name", SHARED)
def test_ctas_that_share_a_tile(name: str, deterministic: bool) -> None:
    """CTAs that split a tile add up its dK and dV in fp32. A tile of one CTA is stored without such sums."""
    check(SHARED[name], deterministic=deterministic, seed=1)


@only_emulated
def test_a_tile_is_shared_where_it_would_leave_sms_idle() -> None:
    """With one SM no tile is split, and its CTA stores dK and dV. With 132 SMs, the last kernel stores them."""
    case = SHARED["rows divided"]
    stored = []
    for num_sms in (1, 132):
        with device.emulated(90, num_sms=num_sms), launches.recorded() as found:
            backward.run(case)
        kernels = kernels_for(case.head_dims)
        reports = [next(one.report for one in found if kernel in one.report.kernel) for kernel in kernels]
        stored.append([sum(row.global_bytes for row in report.rows if "st.global" in row.opcode) for report in reports])
    keys, queries = (2 * 150 * 96 * 2, 700 * 96 * 2)
    assert stored == [[keys, queries], [0, keys + queries]]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1,) * 34 + (130,) + (1,) * 5, (0,) * 40 + (130, 0, 129)], ids=["ones", "empties"])
def test_more_packed_sequences_than_lanes(lengths: tuple[int, ...]) -> None:
    """A warp counts the tiles of 32 sequences at a time."""
    check(Case(lengths=(lengths, lengths), shape=(1, 4, 2, 0, 0), window=CAUSAL, head_dims=(64, 64)))


# --- Order ------------------------------------------------------------------------------------------------------------

ORDERED = [
    Case(window=(90, 30), shape=(1, 4, 2, 200, 150), dtype=torch.bfloat16, head_dims=(128, 128)),
    Case(window=CAUSAL, shape=(2, 2, 1, 300, 350), head_dims=(64, 64)),
    Case(lengths=((5, 0, 133, 1, 17), (40, 7, 0, 1, 270)), shape=(1, 4, 4, 0, 0), grad_lse=True, head_dims=(96, 96)),
    SHARED["query heads divided"],
    SHARED["rows divided"],
    SHARED["wide heads"],
    Case(window=CAUSAL, shape=(1, 4, 2, 150, 170), dtype=torch.bfloat16, head_dims=(192, 128)),
    Case(lengths=((5, 133, 1, 17), (40, 7, 1, 150)), shape=(1, 2, 2, 0, 0), head_dims=(256, 256)),
    Case(window=(90, 30), shape=(1, 4, 2, 200, 150), dropout=0.2, mask="float", mask_shape=(0, 0, 1, 1)),
    Case(window=CAUSAL, shape=(2, 2, 1, 300, 350), softcap=8.0, head_dims=(64, 64), dtype=torch.bfloat16),
    Case(lengths=((5, 0, 133, 1, 17), (40, 7, 0, 1, 270)), shape=(1, 4, 4, 0, 0), alibi="head", head_dims=(96, 96)),
    Case(shape=(1, 4, 2, 200, 150), window=CAUSAL, softcap=8.0, dropout=0.2, head_dims=(256, 256)),
    # There are few work tiles, so CTAs split the rows of a tile.
    Case(shape=(1, 1, 1, 600, 100), alibi="head", dropout=0.2, head_dims=(192, 128), dtype=torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "case"), by_family(ORDERED), ids=str)
def test_deterministic_gradients_have_the_same_bits(kernels: str, case: Case) -> None:
    """They are equal in any order of CTAs, warps and copies, and on GPUs of any size."""
    problem = make_problem(case)
    first = check(case, problem, deterministic=True)
    again = backward.run(case, problem, deterministic=True, **({"seed": 1} if EMULATED else {}))
    backward.assert_equal(again, first)
    for num_sms in (1, 2, 132) if EMULATED and kernels == "plain" else (1, 132) if EMULATED else ():
        with device.emulated(90, num_sms=num_sms):
            found = backward.run(case, problem, deterministic=True, seed=num_sms, workers=1)
            backward.assert_equal(found, first)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize(("kernels", "case"), by_family(ORDERED), ids=str)
def test_gradients_in_any_order_are_as_good(kernels: str, case: Case) -> None:
    """dQ is summed in any order; dK and dV have the same bits, as one CTA computes each tile."""
    with device.emulated(90, num_sms=1):
        first, second = (check(case, seed=seed) for seed in range(2))
    del first["grad_query"], second["grad_query"]
    backward.assert_equal(first, second)


@pytest.mark.parametrize(
    ("kernels", "head_dim", "tiles"),
    [
        *itertools.product(["plain"], [64, 128, 192, 256], range(1, 6)),
        *itertools.product(["options"], [64, 128, 256], [1, 2, 3, 5]),
    ],
)
def test_rings_go_round(kernels: str, head_dim: int, tiles: int) -> None:
    """One CTA takes several tiles of keys, each with ``tiles`` tiles of rows, of heads with different slopes."""
    options: dict[str, Any] = {"alibi": "head", "dropout": 0.1, "seed": tiles} if kernels == "options" else {}
    shape = (1, 2, 1, 64 * tiles - 3, 2 * BLOCK_N[head_dim])
    with device.emulated(90, num_sms=1) if EMULATED else contextlib.nullcontext():
        check(Case(shape=shape, head_dims=(head_dim, head_dim), **options), **({"seed": tiles} if EMULATED else {}))


FAULTY_OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "options": {"alibi": "head", "dropout": 0.2}}


@only_emulated
@each_family
@each_fault
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str, kinds: set[str], kernels: str) -> None:
    case = Case(shape=(1, 2, 1, 200, 300), head_dims=(128, 128), **FAULTY_OPTIONS[kernels])
    check_fault_is_found(case, instruction, instead, kinds)


@only_emulated
@each_family
@each_wide_fault
def test_a_fault_planted_in_the_wide_kernel_is_found(
    instruction: str, instead: str, kinds: set[str], kernels: str
) -> None:
    shape = (1, 1, 1, 260, 64) if kernels == "plain" else (1, 2, 1, 200, 130)
    case = Case(shape=shape, head_dims=(256, 256), **FAULTY_OPTIONS[kernels])
    check_fault_is_found(case, instruction, instead, kinds)


@only_emulated
@pytest.mark.parametrize(("head_dim", "kernel"), [(64, 0), (128, 1), (192, 0), (256, 1)])
def test_a_kernel_that_does_not_wait_for_the_one_before_is_found(head_dim: int, kernel: int) -> None:
    """The kernels for dK and dV, and for dQ, begin while the kernel before them still runs."""
    case = Case(shape=(1, 1, 1, 70, 130), head_dims=(head_dim, head_dim))
    missing = cuda_runtime.replaced("griddepcontrol.wait;", "", kernels_for(case.head_dims)[kernel])
    with missing, pytest.raises(EmulatorError, match="the launch before") as caught:
        backward.run(case, seed=head_dim)
    assert caught.value.kind == "race"


@only_emulated
@pytest.mark.slow
def test_kernels_begin_one_after_the_other_on_request() -> None:
    """Then a kernel that does not wait for the one before is right all the same."""
    test = f"{__file__}::test_a_kernel_that_does_not_wait_for_the_one_before_is_found"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", test]
    environment = {**os.environ, "FASTATTN_DEPENDENT_LAUNCH": "0"}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert "DID NOT RAISE" in done.stdout, done.stdout + done.stderr


# --- What a launch does -----------------------------------------------------------------------------------------------


@only_emulated
@each_dtype
@each_pair
def test_shared_memory_without_conflicts_and_global_memory_in_whole_sectors(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    length = 256 if max(head_dims) <= max(NARROW) else 128
    case = Case(head_dims=head_dims, dtype=dtype, window=CAUSAL, shape=(1, 1, 1, length, length))
    with launches.recorded() as found:
        backward.run(case)
    for kernel in kernels_for(head_dims):
        (report,) = (launched.report for launched in found if kernel in launched.report.kernel)
        assert report.bank_conflicts == 0
        assert not [
            row
            for row in report.rows
            if row.global_bytes and 32 * row.global_sectors > max(row.global_bytes, 32 * row.warps)
        ]


@only_emulated
@each_pair
def test_shared_memory_without_conflicts_with_options(head_dims: tuple[int, int]) -> None:
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


@only_emulated
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_tiles_that_no_row_sees_are_not_visited(head_dim: int) -> None:
    """With a window of 8 keys of 1000, the tensor cores work on the tiles at the diagonal only."""
    with launches.recorded() as found:
        backward.run(Case(window=(8, 0), shape=(1, 1, 1, 1000, 1000), head_dims=(head_dim, head_dim)))
    kernel = kernels_for((head_dim, head_dim))[0]
    (report,) = (launched.report for launched in found if kernel in launched.report.kernel)
    (work,) = report.tensor_core.values()
    keys = SKIPPED_KEYS[head_dim]
    rows = keys + 64  # rows of the row tiles that see these keys
    assert work.multiply_adds <= 5 * -(-1000 // keys) * rows * keys * head_dim


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("window", [CAUSAL, (8, 0), (0, 30), (-1, -1)], ids=str)
@pytest.mark.parametrize("lengths", [(320, 256), (130, 130), (256, 600), (40, 300)], ids=str)
def test_consumers_skip_steps_in_which_no_row_sees_their_keys(
    lengths: tuple[int, int], window: tuple[int, int], deterministic: bool
) -> None:
    """They skip first and last steps, of heads that share keys, and all steps where a tile has few keys."""
    case = Case(shape=(1, 4, 2, *lengths), window=window, head_dims=(64, 64))
    check(case, deterministic=deterministic, seed=sum(lengths))


# --- The dispatcher ---------------------------------------------------------------------------------------------------


@each_family
@each_pair
def test_training_goes_through_both_kernels_for_hopper(head_dims: tuple[int, int], kernels: str) -> None:
    softcap = 20.0 if kernels == "options" else 0.0
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, 2, 170, dim, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
        for dim in (head_dims[0], *head_dims)
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    with checked(), fastattn.use_backend("cuda"), fastattn.record() as calls:
        fastattn.attention(query, key, value, causal=True, softcap=softcap).float().square().sum().backward()
    forward, gradients = (kernel for _, _, kernel in calls)
    size, key_value, of_query = ", ".join(map(str, dict.fromkeys(head_dims))), *kernels_for(head_dims)
    of_key_value = f"{size}, bfloat16, options" if softcap else f"{size}, bfloat16"
    assert forward == f"attention_forward{'_options' if softcap else ''}_sm90<{size}, bfloat16>"
    assert gradients.split(" + ")[1:] == [f"{key_value}<{of_key_value}>", f"{of_query}<{head_dims[0]}, bfloat16>"]
    fastattn.reference.attention(*exact, causal=True, softcap=softcap)[0].square().sum().backward()
    for tensor, expected in zip((query, key, value), exact, strict=True):
        assert tensor.grad is not None and expected.grad is not None
        assert (tensor.grad.double() - expected.grad).abs().max() < 0.03 * expected.grad.abs().max()


def test_every_instance_is_launched() -> None:
    widths = {"key_value": (NARROW, [[False, True]]), "query": (sorted({head_dim for head_dim, _ in HEAD_DIMS}), [])}
    for kernel, (head_dims, flags) in widths.items():
        assert instances.rows_of(f"attention/instances/backward_{kernel}_sm90.cu") == sorted(
            itertools.product(head_dims, instances.DTYPES, *flags)
        )
    assert instances.rows_of("attention/instances/backward_key_value_wide_sm90.cu") == sorted(
        (*head_dims, dtype, flag) for head_dims in WIDE for dtype in instances.DTYPES for flag in (False, True)
    )
