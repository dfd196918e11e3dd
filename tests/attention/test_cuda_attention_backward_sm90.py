"""Tests the Hopper backward kernels without options against the oracle: in the cases of the kernels for sm_80, and
their own rings, exchange of dS and persistent CTAs.

They run on an H100 or H200 if there is one, else as PTX on the emulated sm_90, with all checks and at several seeds.
"""

from __future__ import annotations

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
import test_cuda_attention_backward as backward
from attention_cases import Case, Problem, make_problem
from cuda_kernels import DTYPES, EMULATED, HOPPER_MARKS, checked, each_dtype, only_emulated
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = HOPPER_MARKS

NARROW = (64, 96, 128)
WIDE = ((192, 128), (192, 192), (256, 256))  # head dims of the wide kernel
HEAD_DIMS = tuple((head_dim, head_dim) for head_dim in NARROW) + WIDE
BLOCK_N = {64: 256, 96: 128, 128: 128, 192: 64, 256: 64}
SKIPPED_KEYS = {64: 128, 128: 128, 256: 64}  # keys that a tile skips at a time where none of its rows sees them
CAUSAL = (-1, 0)

each_head_dim = pytest.mark.parametrize("head_dim", NARROW)
each_pair = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)


def kernels_for(head_dims: tuple[int, int]) -> tuple[str, str]:
    wide = "_wide" if max(head_dims) > max(NARROW) else ""
    return f"attention_backward_key_value{wide}_sm90", "attention_backward_query_sm90"


def is_plain(case: Case) -> bool:
    """Returns whether the kernel without options runs: it only scales scores and masks them by a window."""
    return not (case.softcap or case.alibi or case.mask or case.dropout)


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


def check_same_bits(case: Case, gpus: tuple[int, ...]) -> None:
    """Checks that deterministic gradients have the same bits at another seed, and on GPUs with ``gpus`` SMs."""
    problem = make_problem(case)
    first = check(case, problem, deterministic=True)
    again = backward.run(case, problem, deterministic=True, **({"seed": 1} if EMULATED else {}))
    backward.assert_equal(again, first)
    for num_sms in gpus if EMULATED else ():
        with device.emulated(90, num_sms=num_sms):
            found = backward.run(case, problem, deterministic=True, seed=num_sms, workers=1)
            backward.assert_equal(found, first)


def check_any_order(case: Case) -> None:
    """Sums dQ in any order; dK and dV must have the same bits, as one CTA computes each tile."""
    with device.emulated(90, num_sms=1):
        first, second = (check(case, seed=seed) for seed in range(2))
    del first["grad_query"], second["grad_query"]
    backward.assert_equal(first, second)


def check_with_one_sm(case: Case, seed: int) -> None:
    """Checks a case whose tiles of keys all go to one CTA, one after the other."""
    if not EMULATED:
        check(case)
        return
    with device.emulated(90, num_sms=1):
        check(case, seed=seed)


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


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize(
    "head_dims",
    [(64, 64), (96, 96), (128, 128), (8, 24), (40, 16), (72, 96), (64, 128), (104, 88), (136, 8), (64, 160), (200, 72)],
    ids=str,
)
def test_head_dims(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Each kernel runs at its own head dim and below, with values narrower and wider than queries."""
    check(Case(head_dims=head_dims, dtype=dtype, window=(50, 4), shape=(1, 2, 2, 81, 170)), seed=head_dims[0])


PACKED = [case for case in backward.PACKED_CASES if is_plain(case)]


@each_pair
@pytest.mark.parametrize("index", range(len(PACKED)), ids=[str(case) for case in PACKED])
def test_packed(index: int, head_dims: tuple[int, int]) -> None:
    has_pairs = all(sum(lengths) > 0 for lengths in PACKED[index].lengths)  # else there is nothing to launch
    which = (index + HEAD_DIMS.index(head_dims)) % 2
    case = replace(PACKED[index], head_dims=head_dims, dtype=DTYPES[which])
    (check if has_pairs else backward.check)(case, deterministic=which == 0, seed=head_dims[0])


@pytest.mark.slow
@each_pair
def test_what_stands_beyond_a_sequence_has_no_influence(head_dims: tuple[int, int]) -> None:
    """Tiles of a packed sequence reach into the next one, whose NaN must not spread."""
    case = Case(lengths=((70, 30, 1), (150, 200, 90)), window=(40, 30), head_dims=head_dims)
    problem, clean = make_problem(case), backward.run(case, deterministic=True)
    for tensor in (problem.query, problem.grad_out):
        tensor[70:100] = torch.nan
    for tensor in (problem.key, problem.value):
        tensor[150:350] = torch.nan
    found = backward.run(case, problem, deterministic=True)
    for name, length in (("grad_query", 70), ("grad_key", 150), ("grad_value", 150)):
        assert torch.equal(found[name][:length], clean[name][:length]), name
    for name, begin in (("grad_query", 100), ("grad_key", 350), ("grad_value", 350)):
        assert torch.equal(found[name][begin:], clean[name][begin:]), name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("broken", [(0, 300, 2, 40), (-7, 5, 2**31 - 1, 9), (9, 9, 9, 9), (0, 140, 1, 139)], ids=str)
def test_offsets_in_device_memory_are_not_trusted(broken: tuple[int, ...], deterministic: bool) -> None:
    backward.test_offsets_in_device_memory_are_not_trusted(broken, deterministic)


def test_other_cases_of_packed_sequences() -> None:
    backward.test_rows_of_no_sequence_get_no_gradient_and_have_no_influence()
    backward.test_a_buffer_whose_sequences_are_all_empty()
    backward.test_sequences_that_overlap_do_not_wait_for_each_other()
    backward.test_bounds_larger_than_the_tensors()


@pytest.mark.parametrize("shape", [(0, 2, 1, 5, 5), (2, 0, 1, 5, 5), (1, 2, 1, 0, 5), (1, 2, 1, 5, 0)], ids=str)
def test_empty(shape: tuple[int, int, int, int, int]) -> None:
    case = Case(shape=shape, sinks=True, grad_lse=True)
    found = backward.run(case)
    for name in ("query", "key", "value"):
        assert torch.count_nonzero(found[f"grad_{name}"]) == 0


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
@pytest.mark.parametrize("kind", backward.MAGNITUDES)
def test_magnitudes(kind: str, head_dim: int) -> None:
    """Scores are large, and so is delta, to which the products of dP are added."""
    dtype = DTYPES[list(backward.MAGNITUDES).index(kind) % 2]
    shape = (1, 2, 1, 130, 200) if head_dim <= max(NARROW) else (1, 1, 1, 70, 130)
    backward.check_magnitude(kind, Case(window=CAUSAL, shape=shape, head_dims=(head_dim, head_dim), dtype=dtype))


def test_expanded_gradients_of_the_output_and_lse() -> None:
    backward.test_expanded_gradients_of_the_output_and_lse()


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
    backward.test_masked_keys_have_no_influence(replace(case, head_dims=head_dims), dtype, poison)


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
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_deterministic_gradients_have_the_same_bits(case: Case) -> None:
    """They are equal in any order of CTAs, warps and copies, and on GPUs of any size."""
    check_same_bits(case, gpus=(1, 2, 132))


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_gradients_in_any_order_are_as_good(case: Case) -> None:
    check_any_order(case)


@pytest.mark.parametrize("tiles", range(1, 6))
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rings_go_round(tiles: int, head_dim: int) -> None:
    """One CTA takes several tiles of keys, each with ``tiles`` tiles of rows."""
    case = Case(shape=(1, 2, 1, 64 * tiles - 3, 2 * BLOCK_N[head_dim]), head_dims=(head_dim, head_dim))
    check_with_one_sm(case, seed=tiles)


@only_emulated
@each_fault
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str, kinds: set[str]) -> None:
    check_fault_is_found(Case(shape=(1, 2, 1, 200, 300), head_dims=(128, 128)), instruction, instead, kinds)


@only_emulated
@each_wide_fault
def test_a_fault_planted_in_the_wide_kernel_is_found(instruction: str, instead: str, kinds: set[str]) -> None:
    check_fault_is_found(Case(shape=(1, 1, 1, 260, 64), head_dims=(256, 256)), instruction, instead, kinds)


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


@each_pair
def test_training_goes_through_both_kernels_for_hopper(head_dims: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(1, 2, 170, dim, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
        for dim in (head_dims[0], *head_dims)
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    with checked(), fastattn.use_backend("cuda"), fastattn.record() as calls:
        fastattn.attention(query, key, value, causal=True).float().square().sum().backward()
    forward, gradients = (kernel for _, _, kernel in calls)
    size, key_value, of_query = ", ".join(map(str, dict.fromkeys(head_dims))), *kernels_for(head_dims)
    assert forward == f"attention_forward_sm90<{size}, bfloat16>"
    assert gradients.split(" + ")[1:] == [f"{key_value}<{size}, bfloat16>", f"{of_query}<{head_dims[0]}, bfloat16>"]
    fastattn.reference.attention(*exact, causal=True)[0].square().sum().backward()
    for tensor, expected in zip((query, key, value), exact, strict=True):
        assert tensor.grad is not None and expected.grad is not None
        assert (tensor.grad.double() - expected.grad).abs().max() < 0.03 * expected.grad.abs().max()


def test_every_instance_is_launched() -> None:
    """test_cuda_attention_backward_options_sm90.py launches the instances with options."""
    widths = {"key_value": (NARROW, [[False, True]]), "query": (sorted({head_dim for head_dim, _ in HEAD_DIMS}), [])}
    for kernel, (head_dims, flags) in widths.items():
        assert instances.rows_of(f"attention/instances/backward_{kernel}_sm90.cu") == sorted(
            itertools.product(head_dims, instances.DTYPES, *flags)
        )
    assert instances.rows_of("attention/instances/backward_key_value_wide_sm90.cu") == sorted(
        (*head_dims, dtype, flag) for head_dims in WIDE for dtype in instances.DTYPES for flag in (False, True)
    )
