"""Tests every gradient of the CUDA C++ attention backward kernels for sm_80 against the oracle.

They run on a GPU if there is one, else as PTX on the emulator, with all of its checks and at several seeds.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
import instances
from attention_cases import (
    Case,
    Problem,
    backward_arguments,
    compare,
    forward_arguments,
    make_problem,
    run_ops,
    run_public,
    run_reference,
)
from cuda_kernels import DTYPES, EMULATED, FAMILY, MARKS, checked, each_dtype, only_emulated
from fastattn import native
from kernel_device import DEVICE

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import allocations, device, launches

pytestmark = MARKS

CAUSAL = (-1, 0)
HEAD_DIMS = (32, 64, 96, 128, 192, 256)
GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks", "grad_slopes")
# Three tiles of rows and two of keys; the last of each is not full.
SHAPE = (1, 2, 1, 141, 101)


def run(
    case: Case, problem: Problem | None = None, *, deterministic: bool = False, **launching: Any
) -> dict[str, Tensor]:
    """Runs the raw ops, and returns output, lse and gradients."""
    with checked(**launching):
        return run_ops(torch.ops.fastattn, case, problem or make_problem(case), deterministic)


def check(case: Case, problem: Problem | None = None, measure: Case | None = None, **how: Any) -> dict[str, Tensor]:
    """Compares every gradient with the oracle. ``measure``: see `attention_cases.check`."""
    problem = problem or make_problem(case)
    found = run(case, problem, **how)
    wanted = {"query", "key", "value"} | ({"sinks"} if case.sinks else set())
    if problem.alibi_slopes is not None:
        wanted.add("slopes")
    if problem.bias is not None and problem.bias.is_floating_point():
        wanted.add("bias")
    measured = [name for name in GRADIENTS if name.removeprefix("grad_") in wanted]
    if "bias" in wanted and case.mask_shape[3] == 0:
        check_bias_of_whole_rows(case, problem, found)
        measured.remove("grad_bias")
    if "sinks" in wanted:
        check_sinks(case, problem, found)
        measured.remove("grad_sinks")
    compare(case, problem, found, measure, names=measured)
    for name in GRADIENTS[3:]:
        if name.removeprefix("grad_") not in wanted:
            assert found[name].shape == (0,)
    return found


def check_bias_of_whole_rows(case: Case, problem: Problem, found: dict[str, Tensor]) -> None:
    """Checks the gradient of a bias that is constant along the keys. Without a sink such a bias changes nothing: its
    gradient is a sum of terms that cancel, for which the composite gives no bound. What remains is the error that
    rounding O leaves in delta; five standard deviations of it are allowed."""
    assert problem.bias is not None
    exact = run_reference(case, problem, torch.float64, torch.float64)["grad_bias"]
    products = (problem.grad_out.double() * found["out"].double()).square().sum(-1, keepdim=True)
    deviation = torch.finfo(case.dtype).eps / math.sqrt(12) * products.sum_to_size(problem.bias.shape).sqrt()
    error = (found["grad_bias"].double() - exact).abs()
    worst = (error / deviation.clamp(min=1e-6)).max().item()
    assert worst <= 5, f"grad_bias is off by {worst:.1f} standard deviations"


def check_sinks(case: Case, problem: Problem, found: dict[str, Tensor]) -> None:
    """Checks the sinks' gradient: one number per head, a sum over all rows of terms with both signs. The composite's
    error of a few such numbers is down to luck, so the bound is the error that rounding O leaves in delta, as above."""
    assert problem.sinks is not None
    exact = run_reference(case, problem, torch.float64, torch.float64)["grad_sinks"]
    is_packed = problem.cu_seqlens_q is not None
    sinks = problem.sinks.double()[:, None] if is_packed else problem.sinks.double()[None, :, None]
    weight = (
        (sinks - found["lse"].double()).exp().nan_to_num(nan=0.0, posinf=0.0).square()
    )  # [B, H, S], packed [H, total]
    products = (problem.grad_out.double() * found["out"].double()).square().sum(-1)
    variance = (weight * (products.transpose(0, 1) if is_packed else products)).sum(-1)
    variance = variance if is_packed else variance.sum(0)
    error = (found["grad_sinks"].double() - exact).abs()
    rounded = exact.abs() * torch.finfo(found["grad_sinks"].dtype).eps
    deviation = torch.finfo(case.dtype).eps / math.sqrt(12) * variance.sqrt()
    if problem.grad_lse is not None:  # delta contains it too, in fp32
        deviation = deviation + 1e-6
    worst = ((error - rounded) / deviation.clamp(min=1e-6)).max().item()
    assert worst <= 5, f"grad_sinks is off by {worst:.1f} standard deviations"


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


# --- Options ----------------------------------------------------------------------------------------------------------

OPTIONS = [
    Case(shape=SHAPE),
    Case(window=CAUSAL, shape=(1, 2, 1, 70, 133)),
    Case(window=CAUSAL, shape=(1, 2, 1, 133, 70)),  # the first rows see no key
    Case(window=CAUSAL, first_row=0, shape=SHAPE),
    Case(window=(7, -1), shape=SHAPE),
    Case(window=(-1, 5), shape=SHAPE),
    Case(window=(40, 3), shape=(1, 2, 1, 101, 141)),
    Case(window=(20, 5), first_row=0, shape=SHAPE),
    Case(window=(0, 0), shape=(1, 2, 1, 140, 140), grad_lse=True),
    Case(window=(2**31 - 1, 2**31 - 1), shape=SHAPE),
    Case(softcap=2.0, window=CAUSAL, shape=SHAPE),
    Case(alibi="head", shape=SHAPE),
    Case(alibi="batch", shape=(2, 3, 1, 17, 140), window=CAUSAL),
    Case(sinks=True, shape=SHAPE),
    Case(sinks=True, window=CAUSAL, shape=(2, 2, 1, 90, 70), grad_lse=True),
    Case(dropout=0.3, shape=SHAPE),
    Case(dropout=0.7, window=CAUSAL, shape=(2, 2, 1, 30, 150)),
    Case(dropout=1.0, shape=SHAPE),
    Case(scale=0.0, softcap=1.0, shape=SHAPE),
    Case(scale=-0.4, sinks=True, shape=SHAPE),
    Case(grad_lse=True, shape=SHAPE),
    Case(shape=(2, 6, 3, 33, 77), window=(30, 30)),
    Case(shape=(1, 4, 4, 70, 77), sinks=True, window=CAUSAL),
    Case(mask="bool", mask_shape=(0, 0, 1, 1), shape=SHAPE),
    Case(mask="bool", mask_shape=(1, 1, 0, 1), shape=(2, 2, 2, 133, 47)),
    Case(mask="bool", mask_shape=(1, 0, 1, 0), shape=(2, 2, 1, 33, 77)),  # whole rows masked
    Case(mask="float", mask_shape=(1, 1, 1, 1), shape=(2, 4, 2, 33, 77)),
    Case(mask="float", mask_shape=(0, 1, 1, 1), shape=(2, 2, 1, 70, 90), dropout=0.2),
    Case(mask="float", mask_shape=(1, 0, 1, 1), shape=(2, 3, 1, 20, 95), window=CAUSAL),
    Case(mask="float", mask_shape=(0, 0, 0, 1), shape=(2, 2, 1, 33, 47)),
    Case(mask="float", mask_shape=(0, 1, 1, 0), shape=(2, 2, 1, 33, 47)),
    Case(mask="float", mask_shape=(0, 0, 0, 0), shape=(2, 2, 1, 33, 47), softcap=3.0),
    Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=SHAPE),
    Case(mask="inf", mask_shape=(1, 1, 1, 0), sinks=True),
    Case(mask="min", mask_shape=(1, 0, 0, 1), shape=(2, 2, 1, 33, 77)),
]


@pytest.mark.parametrize("index", range(len(OPTIONS)), ids=[str(case) or "none" for case in OPTIONS])
def test_each_option(index: int) -> None:
    """Dtypes alternate; dQ is summed in any order for two cases, then in one fixed order for two."""
    case = replace(OPTIONS[index], dtype=DTYPES[index % 2])
    check(case, deterministic=index % 4 >= 2, seed=index)


@each_dtype
@pytest.mark.parametrize(
    "head_dims", [*((dim, dim) for dim in HEAD_DIMS), (8, 24), (40, 16), (72, 96), (192, 128), (64, 256)], ids=str
)
@pytest.mark.parametrize("softcap", [0.0, 15.0], ids=["plain", "options"])
def test_head_dims(head_dims: tuple[int, int], softcap: float, dtype: torch.dtype) -> None:
    """Each kernel runs at its own head dim and below, with values narrower and wider than queries."""
    case = Case(head_dims=head_dims, dtype=dtype, window=(50, 4), softcap=softcap, shape=(1, 2, 2, 81, 70))
    check(case, seed=head_dims[0])


def combination(index: int) -> Case:
    """Returns a case with many options at once."""
    masks = ("", "bool", "float", "inf")
    return Case(
        shape=(2, 4, (1, 2, 4)[index % 3], 75 - 20 * (index % 2), 60 + 17 * (index % 3)),
        head_dims=((32, 32), (64, 48), (24, 64), (128, 128))[index % 4],
        dtype=DTYPES[index % 2],
        window=((-1, -1), CAUSAL, (33, 7))[index % 3],
        softcap=(0.0, 15.0)[index // 2 % 2],
        alibi="" if index % 4 else "batch",
        mask=masks[index % 4],
        mask_shape=(1, 1, 1, 1),
        sinks=index % 3 != 0,
        dropout=(0.2, 0.0, 0.4)[index % 3],
        layout=("bhsd", "bshd", "sliced", "misaligned")[index // 3 % 4],
        grad_lse=index % 2 == 0,
        seed=index,
    )


@pytest.mark.parametrize("index", range(12))
def test_combinations(index: int) -> None:
    check(combination(index), deterministic=index % 2 == 0, seed=index)


# --- Shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(-1, -1), CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("lengths", "head_dim"),
    [
        *(((rows, keys), 64) for rows, keys in [(1, 1), (1, 97), (97, 1), (63, 65), (64, 64), (65, 63), (129, 128)]),
        *(((rows, keys), 256) for rows, keys in [(1, 33), (31, 32), (33, 31), (65, 64)]),
    ],
    ids=str,
)
def test_lengths_around_tiles(lengths: tuple[int, int], head_dim: int, window: tuple[int, int]) -> None:
    # A row with a single key has gradient exactly 0 except through lse. The composite finds exactly 0, while dP - delta
    # rounds, so the lse has a gradient here.
    case = Case(shape=(1, 2, 1, *lengths), head_dims=(head_dim, head_dim), window=window, grad_lse=True)
    check(replace(case, dtype=DTYPES[lengths[0] % 2]), deterministic=True, seed=lengths[1])


# --- Packed sequences -------------------------------------------------------------------------------------------------

PACKED = ((5, 0, 133, 1, 17), (40, 7, 0, 1, 70))
PACKED_CASES = [
    Case(lengths=PACKED),
    Case(lengths=PACKED, window=CAUSAL, shape=(1, 4, 2, 0, 0), sinks=True),
    Case(lengths=PACKED, window=(9, 2), softcap=2.0, head_dims=(40, 24), grad_lse=True),
    Case(lengths=PACKED, alibi="batch", dropout=0.4, window=CAUSAL),
    Case(lengths=((65, 64, 63), (70, 20, 129)), window=CAUSAL, head_dims=(64, 64)),
    Case(lengths=((0, 0), (3, 4))),
    Case(lengths=((3, 4), (0, 0)), sinks=True, grad_lse=True),
    Case(lengths=((), ())),
]


@each_dtype
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype), deterministic=dtype == torch.float16)


# --- Layouts ----------------------------------------------------------------------------------------------------------


def test_interleaved_heads_in_a_buffer_whose_rest_is_nan() -> None:
    case = Case(shape=(2, 6, 3, 70, 90), window=CAUSAL)
    problem, expected = make_problem(case), run(case, deterministic=True)
    for name in ("query", "key", "value", "grad_out"):
        tensor = getattr(problem, name)
        batch, heads, rows, head_dim = tensor.shape
        buffer = torch.full((batch, rows, heads + 1, head_dim), torch.nan, dtype=tensor.dtype, device=tensor.device)
        buffer[:, :, :heads] = tensor.transpose(1, 2)
        setattr(problem, name, buffer[:, :, :heads].transpose(1, 2))
    assert_equal(run(case, problem, deterministic=True), expected)


# --- Order ------------------------------------------------------------------------------------------------------------

ORDERED = Case(window=(90, 30), shape=(1, 4, 2, 200, 150), dropout=0.2, mask="float", mask_shape=(0, 0, 1, 1))
ORDERED_PLAIN = Case(window=(90, 130), shape=(1, 4, 2, 200, 300), head_dims=(128, 128))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        replace(ORDERED, dtype=torch.bfloat16),
        ORDERED_PLAIN,
        Case(window=CAUSAL, shape=(2, 2, 1, 200, 150), head_dims=(64, 64)),
        Case(lengths=PACKED, shape=(1, 4, 4, 0, 0), sinks=True, grad_lse=True),
    ],
    ids=str,
)
def test_deterministic_gradients_have_the_same_bits(case: Case) -> None:
    """They are equal in any order of CTAs, warps and copies, and on GPUs of any size."""
    problem = make_problem(case)
    first = check(case, problem, deterministic=True)
    assert_equal(run(case, problem, deterministic=True, **({"seed": 1} if EMULATED else {})), first)
    for num_sms in (1, 2, 7) if EMULATED else ():
        with device.emulated(80, num_sms=num_sms):
            assert_equal(run(case, problem, deterministic=True, seed=num_sms, workers=1), first)


@pytest.mark.parametrize("case", [ORDERED, ORDERED_PLAIN], ids=["options", "plain"])
def test_gradients_in_any_order_are_as_good(case: Case) -> None:
    """dQ is summed in any order. One CTA computes each element of the other gradients, so these have the same bits."""
    case = replace(case, dtype=torch.bfloat16)
    found, expected = check(case, seed=1), run(case, deterministic=True)
    del found["grad_query"], expected["grad_query"]
    assert_equal(found, expected)


# --- GPUs whose CTAs have at most 99 KB of shared memory --------------------------------------------------------------


@only_emulated
@each_dtype
@pytest.mark.parametrize("head_dim", [head_dim for head_dim in HEAD_DIMS if head_dim <= 128])
def test_little_shared_memory(head_dim: int, dtype: torch.dtype) -> None:
    """Up to 64 dims the large tiles of keys fit into 99 KB; above, the kernel with small tiles runs instead."""
    with device.emulated(80, shared_memory_bytes=99 * 1024):
        for window in ((-1, -1), CAUSAL):
            case = Case(head_dims=(head_dim, head_dim), dtype=dtype, window=window, shape=(1, 4, 2, 150, 200))
            with launches.recorded() as found:
                check(case)
            (launched,) = (each for each in found if "attention_backward_key_value" in each.report.kernel)
            assert ("_large_" in launched.report.kernel) == (head_dim <= 64)
            assert launched.report.shared_bytes <= 99 * 1024


# --- What a launch does -----------------------------------------------------------------------------------------------


def recorded(case: Case, kernel: str) -> Any:
    """Runs a backward pass, and returns its one launch of ``kernel``."""
    with launches.recorded() as found:
        run(case)
    (launched,) = (
        each for each in found if re.search(rf"attention_backward_{kernel}(_large)?_sm80", each.report.kernel)
    )
    return launched


@only_emulated
@each_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("softcap", [0.0, 15.0], ids=["plain", "options"])
def test_shared_memory_without_conflicts_and_global_memory_in_whole_sectors(
    head_dim: int, softcap: float, dtype: torch.dtype
) -> None:
    case = Case(head_dims=(head_dim, head_dim), dtype=dtype, window=CAUSAL, softcap=softcap, shape=(1, 1, 1, 128, 128))
    report = recorded(case, "key_value").report
    assert report.bank_conflicts == 0
    wasteful = [
        row
        for row in report.rows
        if row.global_bytes and 32 * row.global_sectors > max(row.global_bytes, 32 * row.warps)
    ]
    assert not wasteful


@only_emulated
def test_tiles_that_no_row_sees_are_not_visited() -> None:
    """With a window of 8 keys of 1000, the tensor cores work on the tiles at the diagonal only."""
    case = Case(window=(8, 0), shape=(1, 1, 1, 1000, 1000), head_dims=(64, 64))
    (work,) = recorded(case, "key_value").report.tensor_core.values()
    tile = native.KERNELS["attention_backward_key_value_large_sm80<64, bfloat16>"]
    num_tiles = -(-1000 // tile["block_n"])
    rows = tile["block_n"] + tile["block_m"]  # rows of the row tiles that see a tile of keys
    assert work.multiply_adds <= 5 * num_tiles * rows * tile["block_n"] * 64


@only_emulated
def test_memory_grows_with_tokens_not_with_pairs() -> None:
    most: list[int] = []

    def measure(launched: Any) -> None:
        most[-1] = max(most[-1], sum(size for _, size, _ in allocations.live()))

    for tokens in (512, 1024):
        case = Case(shape=(1, 1, 1, tokens, tokens), window=(16, 0))
        problem = make_problem(case)
        gc.collect()  # otherwise garbage of earlier tests is freed while this test counts
        before = sum(size for _, size, _ in allocations.live())
        most.append(0)
        with launches.told(measure):
            run(case, problem, deterministic=True)
        most[-1] -= before
    # The rest does not grow: a workspace for each CTA that the GPU runs at a time.
    assert 0 < most[1] - most[0] < 512 * 512 and most[1] <= 2 * most[0]


# --- The public functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(12))
def test_public_functions(index: int) -> None:
    """Runs the combinations above and the drop-in; the record shows that no other backend ran."""
    case = combination(index)
    if index % 4 == 3:
        case = replace(case, lengths=PACKED, mask="", layout="bhsd")
    elif index % 4 == 1:
        window = CAUSAL if case.window == CAUSAL else (-1, -1)
        case = replace(
            case, first_row=0, window=window, softcap=0.0, dropout=0.0, sinks=False, alibi="", grad_lse=False
        )
    problem = make_problem(case)
    with checked(), fastattn.record() as calls:
        found = run_public(case, problem, "cuda")
    assert [(call.op, call.backend) for call in calls] == [("attention", "cuda"), ("attention backward", "cuda")]
    assert set(calls[1].kernel.split(" + ")) <= set(native.KERNELS)  # kernel names contain commas
    names = [name for name in found if name not in ("out", "lse")]
    if "grad_sinks" in names and "lse" in found:
        check_sinks(case, problem, found)
        names.remove("grad_sinks")
    compare(case, problem, found, names=names)


@each_dtype
def test_the_dispatcher_chooses_it_for_training(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 20, 64, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3))
    explained = fastattn.explain(fastattn.attention, query, key, value, causal=True)
    name = f"attention_forward_sm{FAMILY}<64, {str(dtype).removeprefix('torch.')}>"
    assert (explained.backend, explained.kernel) == ("cuda", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"softcap": 3.0, "window": (1, 1), "bias": True, "sinks": True}],
    ids=["causal", "softcap, window, bias, sinks"],
)
def test_finite_differences(options: dict[str, Any]) -> None:
    """Steps are 1/16 from inputs that float16 holds exactly: rounding the output changes far less than a step does."""
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator).mul(16).round().div(16).clamp(-1.5, 1.5)
        return drawn.double().to(DEVICE).requires_grad_()

    names = [name for name in ("bias", "sinks") if name in options]
    shapes = {"bias": (1, 1, 2, 3), "sinks": (2,)}
    leaves = [leaf(1, 2, 2, 8), leaf(1, 1, 3, 8), leaf(1, 1, 3, 8), *(leaf(*shapes[name]) for name in names)]

    def attend(*tensors: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *rest = (tensor.half() for tensor in tensors)
        result = fastattn.attention(
            query, key, value, return_lse=True, deterministic=True, **{**options, **dict(zip(names, rest, strict=True))}
        )
        return tuple(part.double() for part in result)

    with fastattn.use_backend("cuda"):
        assert torch.autograd.gradcheck(attend, leaves, eps=1 / 16, atol=0.012, rtol=0.02, nondet_tol=0.0)


def test_second_derivatives_are_refused() -> None:
    query = torch.randn(1, 1, 5, 16, dtype=torch.float16, device=DEVICE, requires_grad=True)
    with fastattn.use_backend("cuda"):
        out = fastattn.attention(query, query, query)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivatives .*sdpa_kernel\(SDPBackend.MATH\):` "):
        gradient.sum().backward()
    with sdpa_kernel(SDPBackend.MATH):  # the message names this way
        out = fastattn.attention(query, query, query)
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    gradient.square().sum().backward()
    assert query.grad is not None and bool(query.grad.ne(0).any())


# --- The op -----------------------------------------------------------------------------------------------------------


def op_arguments(**changes: Any) -> dict[str, Any]:
    """Returns the arguments of the raw op by name."""
    case = Case(shape=(2, 4, 2, 5, 7), head_dims=(64, 64))
    problem = make_problem(case)
    out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    schema = torch.ops.fastattn.attention_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    arguments = backward_arguments(case, problem, out, lse)
    return {**dict(zip(names, (*arguments, problem.key_ranges), strict=True)), **changes}


def zeros(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


# name: (changed arguments, words of the message)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"query": zeros(4, 5, 64)}, "query must have 4 dimensions, got shape [4, 5, 64]"),
    "key": ({"key": zeros(1, 2, 7, 64)}, "key must have shape [2, 2, 7, 64], got [1, 2, 7, 64]"),
    "head dim": (
        {"value": zeros(2, 2, 7, 264)},
        "value must have a last dim (head dim) that is a multiple of 8 up to 256, got 264",
    ),
    "grad_out": ({"grad_out": zeros(2, 4, 5, 32)}, "grad_out must have shape [2, 4, 5, 64], got [2, 4, 5, 32]"),
    "grad_out dtype": (
        {"grad_out": zeros(2, 4, 5, 64, dtype=torch.float32)},
        "grad_out must have the dtype of query, float16, got float32",
    ),
    "out": ({"out": zeros(4, 5, 64)}, "out must have shape [2, 4, 5, 64], got [4, 5, 64]"),
    "out dtype": (
        {"out": zeros(2, 4, 5, 64, dtype=torch.bfloat16)},
        "out must have the dtype of query, float16, got bfloat16",
    ),
    "lse": ({"lse": zeros(2, 5, 4, dtype=torch.float32)}, "lse must have shape [2, 4, 5], got [2, 5, 4]"),
    "lse dtype": ({"lse": zeros(2, 4, 5)}, "lse must be float32, got float16"),
    "grad_lse": (
        {"grad_lse": zeros(2, 4, dtype=torch.float32)},
        "grad_lse must have shape [2, 4, 5], got [2, 4]",
    ),
    "grad_lse dtype": (
        {"grad_lse": zeros(2, 4, 5, dtype=torch.float64)},
        "grad_lse must be float32, got float64",
    ),
    "bias": ({"bias": zeros(1, 1, 5, 6)}, "bias must have size 7 or 1 in dim 3, got shape [1, 1, 5, 6]"),
    "gradient of a bool mask": (
        {"bias": zeros(1, 1, 5, 7, dtype=torch.bool), "bias_grad": True},
        "bias must be floating if bias_grad is true, got bool",
    ),
    "sinks": ({"sinks": zeros(3, dtype=torch.float32)}, "sinks must have shape [4], got [3]"),
    "no seed": (
        {"dropout_p": 0.5, "dropout_seed": None},
        "dropout_seed must be an int64 tensor of one element if dropout_p > 0, got None",
    ),
    "one of the offsets": (
        {"cu_seqlens_k": zeros(3, dtype=torch.int32)},
        "cu_seqlens_q and cu_seqlens_k must both be given, or neither",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_the_op(name: str) -> None:
    changed, words = BAD[name]
    with pytest.raises(RuntimeError, match=re.escape(f"fastattn.attention_backward: {words}")):
        torch.ops.fastattn.attention_backward(**op_arguments(**changed))


def test_a_negative_bound_is_refused() -> None:
    case = Case(lengths=((3,), (4,)))
    problem = make_problem(case)
    problem.max_seqlens = (-1, 4)
    with pytest.raises(RuntimeError, match="attention_forward: max_seqlen_q must not be negative, got -1"):
        torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))


def test_a_bias_gradient_nobody_asked_for_is_not_computed() -> None:
    found = dict(
        zip(GRADIENTS, torch.ops.fastattn.attention_backward(**op_arguments(bias=zeros(1, 1, 5, 7))), strict=True)
    )
    assert found["grad_bias"].shape == (0,)


@pytest.mark.parametrize("index", range(3))
def test_opcheck(index: int) -> None:
    case = [Case(shape=(2, 4, 2, 20, 30)), combination(2), replace(PACKED_CASES[1], sinks=False)][index]
    problem = make_problem(case)
    out, lse, _ = torch.ops.fastattn.attention_forward(*forward_arguments(case, problem))
    with checked():
        torch.library.opcheck(
            torch.ops.fastattn.attention_backward.default, backward_arguments(case, problem, out, lse)
        )


def test_every_instance_is_launched() -> None:
    """The tables above have exactly the compiled head dims and dtypes, with and without options."""
    axes: dict[str, list[Any]] = {
        "backward_ranges_sm80": [],
        "backward_rows_sm80": [instances.DTYPES],
        "backward_query_sm80": [HEAD_DIMS, instances.DTYPES],
        "backward_bias_sm80": [instances.DTYPES],
        "backward_sinks_sm80": [],
        "backward_slopes_sm80": [instances.DTYPES],
        "backward_slope_sums_sm80": [],
    }
    listed = {name for name in instances.kernels_of("attention") if name.startswith("backward") and "sm80" in name}
    assert listed == {*axes, "backward_key_value_sm80", "backward_key_value_large_sm80"}
    for name, values in axes.items():
        assert instances.rows_of(f"attention/instances/{name}.cu") == sorted(itertools.product(*values)), name
    # Kernels without options: large tiles of keys up to 128 dims. Small tiles too where large ones take over 99 KB.
    large = [(head_dim, dtype) for head_dim in HEAD_DIMS if head_dim <= 128 for dtype in instances.DTYPES]
    plain = [(head_dim, False, dtype) for head_dim in HEAD_DIMS if head_dim > 64 for dtype in instances.DTYPES]
    options = [(head_dim, True, dtype) for head_dim in HEAD_DIMS for dtype in instances.DTYPES]
    assert instances.rows_of("attention/instances/backward_key_value_large_sm80.cu") == sorted(large)
    assert instances.rows_of("attention/instances/backward_key_value_sm80.cu") == sorted(plain + options)
