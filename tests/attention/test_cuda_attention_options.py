"""Tests the CUDA C++ forward kernels with every option, through their op, against the oracle.

They run on a GPU if there is one, else as PTX on the emulator, as sm_80 and as sm_90, with all checks and at several
seeds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import cuda_forward
import fastattn
import instances
from attention_cases import Case, make_problem
from cuda_forward import CAUSAL, assert_equal, run
from cuda_kernels import DTYPES, EMULATED, FAMILY, MARKS, checked, each_dtype, on_both, only_emulated
from fastattn import native
from kernel_device import DEVICE
from turns import in_turn

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import EmulatorError, cuda_runtime, device, launches

pytestmark = MARKS

Dims = tuple[int, int]  # head dim of queries and keys, head dim of values
PLAIN_KERNEL = "attention_forward_sm80"
# This softcap is so large that it changes nothing: with it, cases without options run on the kernel with options.
NO_OPTION = 1e4
HOPPER_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

each_hopper_dims = pytest.mark.parametrize("head_dims", HOPPER_DIMS, ids=str)


def check(case: Case, kernels: str, **launching: Any) -> None:
    """Compares a case with the oracle; on the emulated sm_90, the kernel with options must have run."""
    if kernels == "sm_80":
        cuda_forward.check(case, **launching)
        return
    if not (case.softcap > 0 or case.alibi or case.mask or case.dropout > 0):
        case = replace(case, softcap=NO_OPTION)
    cuda_forward.check(case, "attention_forward_options_sm90", **launching)


def hopper_name(head_dims: Dims, dtype: torch.dtype) -> str:
    dims = ", ".join(map(str, dict.fromkeys(head_dims)))
    return f"attention_forward_options_sm90<{dims}, {str(dtype).removeprefix('torch.')}>"


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


@pytest.mark.parametrize(
    ("case", "dtype", "kernels"),
    [
        *((*each, "sm_80") for each in itertools.product(OPTIONS, DTYPES)),
        *((*each, "sm_90") for each in in_turn([(case,) for case in OPTIONS], DTYPES)),
    ],
    ids=str,
    indirect=["kernels"],
)
def test_each_option(case: Case, dtype: torch.dtype, kernels: str) -> None:
    check(replace(case, dtype=dtype), kernels, seed=case.shape[-1])


# Each kernel's own head dim and some below, with values narrower and wider than queries.
HEAD_DIMS = {
    "sm_80": [(32, 32), (8, 24), (64, 64), (40, 64), (96, 96), (96, 72), (128, 128), (128, 16), (192, 128), (256, 256)],
    "sm_90": [(8, 24), (64, 64), (96, 72), (128, 16), (16, 128), (192, 128), (136, 72), (192, 136), (200, 256)],
}


@each_dtype
@pytest.mark.parametrize(
    ("kernels", "head_dims"),
    [(kernels, head_dims) for kernels, given in HEAD_DIMS.items() for head_dims in given],
    ids=str,
    indirect=["kernels"],
)
def test_head_dims(kernels: str, head_dims: Dims, dtype: torch.dtype) -> None:
    window, shape = ((50, 4), SHAPE) if kernels == "sm_80" else ((150, 4), (1, 4, 2, 70, 300))
    check(Case(head_dims=head_dims, dtype=dtype, window=window, sinks=True, shape=shape), kernels)


@on_both
@each_dtype
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed(case: Case, dtype: torch.dtype, kernels: str) -> None:
    check(replace(case, dtype=dtype), kernels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "head_dim", "dtype"),
    in_turn(itertools.product(PLAIN_CASES, (32, 64, 96, 128, 192, 256)), DTYPES),
    ids=str,
)
def test_the_kernel_without_options(case: Case, head_dim: int, dtype: torch.dtype) -> None:
    cuda_forward.check(replace(case, head_dims=(head_dim, head_dim), dtype=dtype), PLAIN_KERNEL)


# Several tiles of rows and of keys for each head dim: full tiles, with masked tiles before and after them.
LARGE = (1, 4, 2, 200, 330)


@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
@each_hopper_dims
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
def test_options_at_each_head_dim(case: Case, head_dims: Dims, kernels: str) -> None:
    dtype = torch.bfloat16 if case.mask == "float" or case.softcap > 0 else torch.float16
    check(replace(case, head_dims=head_dims, dtype=dtype), kernels, seed=sum(head_dims))


@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
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
def test_each_kind_of_bias(kind: torch.dtype, expanded: tuple[int, ...], keys: int, kernels: str) -> None:
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


def test_windows_and_sinks_leave_nan_in_masked_keys_alone() -> None:
    """NaN between packed sequences, and in keys that no row sees, is never multiplied."""
    case = Case(lengths=((70, 30), (150, 200)), window=(20, 5), sinks=True, head_dims=(64, 64))
    problem, clean = make_problem(case), run(case)
    problem.key[60:70], problem.value[60:70] = torch.nan, torch.inf  # row i of sequence 0 sees keys 60 + i to 85 + i
    problem.value[150 + 140 :][:5] = torch.nan  # row i of sequence 1 sees keys 150 + i to 175 + i
    out, lse = run(case, problem).values()
    rows = torch.cat([torch.arange(10, 70), torch.arange(70, 100)])
    assert torch.equal(out[rows], clean["out"][rows]) and torch.equal(lse[:, rows], clean["lse"][:, rows])
    assert out[:10].isnan().all()


@on_both
@pytest.mark.parametrize("broken", [(0, 300, 2, 40), (-7, 5, 2**31 - 1, 9), (9, 9, 9, 9)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_offsets_in_device_memory_are_not_trusted(head_dim: int, broken: tuple[int, ...], kernels: str) -> None:
    """With any offsets, nothing outside of the tensors is touched. Sequences that overlap write the same rows."""
    case = Case(lengths=((20, 13, 7), (11, 30, 8)), head_dims=(head_dim, head_dim))
    problem = make_problem(case)
    problem.cu_seqlens_q = torch.tensor(broken, dtype=torch.int32, device=DEVICE)
    problem.cu_seqlens_k = torch.tensor(broken[::-1], dtype=torch.int32, device=DEVICE)
    assert not any(tensor.isnan().any() for tensor in run(case, problem, races=False).values())


HIDDEN = {
    "sm_80": [
        Case(window=(20, 3), shape=(1, 2, 1, 60, 80), softcap=4.0),
        Case(window=(6, 2), shape=(1, 2, 2, 50, 60), sinks=True),
        Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 40, 70)),
        Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 40, 70), dropout=0.3),
    ],
    "sm_90": [
        Case(window=(20, 3), shape=(1, 2, 1, 160, 180), softcap=4.0, head_dims=(64, 64)),
        Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=(1, 2, 1, 40, 370), head_dims=(128, 128)),
        Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 240, 270), dropout=0.3, head_dims=(256, 256)),
        Case(mask="bool", mask_shape=(0, 1, 1, 1), shape=(1, 2, 1, 140, 270), head_dims=(192, 128)),
    ],
}


@each_dtype
@pytest.mark.parametrize("spoiled", ["nan", "inf"])
@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        pytest.param(kernels, case, marks=[pytest.mark.slow] * (kernels == "sm_90"))
        for kernels, cases in HIDDEN.items()
        for case in cases
    ],
    ids=str,
    indirect=["kernels"],
)
def test_masked_keys_have_no_influence(case: Case, spoiled: str, dtype: torch.dtype, kernels: str) -> None:
    """NaN or infinity in one key reaches the rows that see it, and no other."""
    case = replace(case, dtype=dtype)
    problem, at = make_problem(case), 17
    clean = run(case)
    for tensor in (problem.key, problem.value):
        tensor[:, :, at] = float(spoiled)
    out, lse = run(case, problem).values()
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


# --- Rings, clusters, order ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
@pytest.mark.parametrize(
    ("head_dims", "tiles"), in_turn([(dims,) for dims in HOPPER_DIMS], (1, 4, 2, 5, 3, 6), each=3), ids=str
)
def test_rings_go_round(head_dims: Dims, tiles: int, kernels: str) -> None:
    """There are any number of key tiles, with and without a masked one, and CTAs take several tiles of rows."""
    tile = native.KERNELS[hopper_name(head_dims, torch.float16)]
    for missing in (0, 5):
        keys = tiles * tile["block_n"] - missing
        case = Case(shape=(1, 3, 1, 2 * tile["block_m"], keys), head_dims=head_dims, alibi="head")
        check(case, kernels, seed=tiles)


@pytest.mark.slow
@only_emulated
@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
@pytest.mark.parametrize("num_sms", [1, 2, 132])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
def test_any_number_of_sms(heads: tuple[int, int], num_sms: int, kernels: str) -> None:
    """Pairs of CTAs load tiles of keys together for two heads, for two tiles of rows, or each alone."""
    shape = (1, heads[0], heads[0] // heads[1], 500, 300)
    with device.emulated(90, num_sms=num_sms):
        for window in ((-1, -1), CAUSAL):
            check(Case(shape=shape, head_dims=(256, 256), window=window, softcap=3.0), kernels, seed=num_sms)


ORDERED = Case(window=(30, 30), shape=(1, 2, 1, 200, 150), dropout=0.2, mask="float", mask_shape=(0, 1, 1, 1))
LARGE_ORDERED = replace(ORDERED, window=(230, 30), shape=(1, 2, 1, 300, 450), head_dims=(128, 128))


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        (ORDERED, "sm_80"),
        *((replace(LARGE_ORDERED, dtype=dtype), "sm_90") for dtype in DTYPES),
    ],
    ids=str,
    indirect=["kernels"],
)
def test_order_of_warps_and_copies_has_no_influence(case: Case, kernels: str) -> None:
    assert_equal(run(case, seed=100), run(case, seed=1))


@only_emulated
@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
@pytest.mark.parametrize(
    ("instruction", "instead"),
    [
        ("wgmma.wait_group.sync.aligned 1;", ""),
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        ("wgmma.fence.sync.aligned;", ""),
    ],
    ids=["no wait for QK", "no wait for PV", "no fence"],
)
def test_a_fault_planted_in_the_kernel_is_found(instruction: str, instead: str, kernels: str) -> None:
    case = Case(shape=(1, 2, 1, 200, 500), head_dims=(64, 64), softcap=3.0)
    with cuda_runtime.replaced(instruction, instead), pytest.raises(EmulatorError) as caught:
        check(case, kernels)
    assert caught.value.kind == "wgmma"


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


# --- The dispatcher ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kernels", ["sm_90"], indirect=True)
@each_hopper_dims
@each_dtype
def test_the_dispatcher_chooses_the_kernel_for_hopper(head_dims: Dims, dtype: torch.dtype, kernels: str) -> None:
    dims = head_dims[0], *head_dims
    query, key, value = (torch.randn(1, 2, 40, dim, dtype=dtype, device=DEVICE) for dim in dims)
    name = hopper_name(head_dims, dtype)
    explained = fastattn.explain(fastattn.attention, query, key, value, softcap=2.0)
    assert (explained.backend, explained.kernel) == ("cuda", name)
    with fastattn.record() as calls, checked():
        fastattn.attention(query, key, value, softcap=2.0)
    assert calls == [("attention", "cuda", name)]


def test_every_instance_is_launched() -> None:
    assert instances.rows_of("attention/instances/forward_options_sm90.cu") == sorted(
        (*head_dims, dtype) for head_dims in HOPPER_DIMS for dtype in instances.DTYPES
    )
