"""Tests the Triton attention kernels, forward and every gradient, against the oracle in float64."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch

from attention_cases import DEVICE, DTYPES, SEED, Case, check, make_problem, run_kernels
from fastattn import reference
from fastattn.triton_kernels import attention_backward as backward_module
from fastattn.triton_kernels import attention_forward as forward_module
from triton_compilations import num_compiled
from turns import in_turn

pytestmark = pytest.mark.usefixtures("emulated_gpu")

CAUSAL = (-1, 0)

OPTIONS = [
    Case(),
    Case(window=CAUSAL),
    Case(window=CAUSAL, shape=(1, 2, 1, 47, 33)),  # the first rows see no key
    Case(window=CAUSAL, first_row=0),
    Case(window=CAUSAL, first_row=0, shape=(1, 2, 1, 47, 33)),
    Case(window=(7, -1)),
    Case(window=(-1, 5)),
    Case(window=(20, 3)),
    Case(window=(0, 0), shape=(1, 2, 1, 40, 40), grad_lse=True),
    Case(window=(2**31 - 1, 2**31 - 1)),
    Case(window=(40, 0), shape=(1, 2, 1, 100, 100)),
    Case(softcap=2.0, window=CAUSAL),
    Case(alibi="head"),
    Case(alibi="batch", shape=(2, 3, 1, 17, 40), window=CAUSAL),
    Case(sinks=True),
    Case(sinks=True, window=CAUSAL, shape=(1, 2, 1, 47, 33), grad_lse=True),
    Case(dropout=0.3),
    Case(dropout=0.7, window=CAUSAL, shape=(2, 2, 1, 30, 50)),
    Case(dropout=1.0),
    Case(scale=0.0),
    Case(scale=-0.4, window=CAUSAL),
    Case(grad_lse=True),
    Case(shape=(2, 6, 3, 33, 47), window=CAUSAL),
    Case(shape=(1, 4, 4, 33, 47)),
    Case(mask="bool", mask_shape=(0, 0, 1, 1)),
    Case(mask="bool", mask_shape=(1, 1, 0, 1), shape=(2, 2, 2, 33, 47)),
    Case(mask="bool", mask_shape=(1, 0, 1, 0), shape=(2, 2, 1, 33, 47)),  # whole rows masked
    Case(mask="float", mask_shape=(1, 1, 1, 1), shape=(2, 4, 2, 33, 47)),
    Case(mask="float", mask_shape=(0, 1, 1, 1), shape=(2, 2, 1, 33, 47), dropout=0.2),
    Case(mask="float", mask_shape=(1, 0, 1, 1), shape=(2, 3, 1, 20, 35), window=CAUSAL),
    Case(mask="float", mask_shape=(0, 0, 0, 1), shape=(2, 2, 1, 33, 47)),
    Case(mask="float", mask_shape=(0, 1, 1, 0), shape=(2, 2, 1, 33, 47)),
    Case(mask="float", mask_shape=(0, 0, 0, 0), shape=(2, 2, 1, 33, 47), softcap=3.0),
    Case(mask="inf", mask_shape=(0, 1, 1, 1), shape=(2, 2, 1, 33, 47)),
    Case(mask="inf", mask_shape=(1, 1, 1, 0), sinks=True),
    Case(mask="min", mask_shape=(1, 0, 0, 1), shape=(2, 2, 1, 33, 47)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_each_option(case: Case, monkeypatch: Any) -> None:
    check(case, monkeypatch)


HEAD_DIMS = [
    (16, 16),
    (24, 40),
    (40, 24),
    (64, 64),
    (64, 128),
    (72, 72),
    (96, 16),
    (128, 64),
    (128, 128),
    (136, 256),
    (256, 136),
]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(HEAD_DIMS)), ids=[str(dims) for dims in HEAD_DIMS])
def test_head_dims_with_their_own_tiles(index: int, monkeypatch: Any) -> None:
    """Dtypes alternate to save time: the code compiled for them differs only in a suffix."""
    check(Case(head_dims=HEAD_DIMS[index], dtype=DTYPES[index % 2], window=CAUSAL, small_tile=False), monkeypatch)


LENGTHS = [(1, 1), (1, 97), (97, 1), (15, 17), (16, 31), (17, 33), (31, 32), (64, 65)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "window"), in_turn([(lengths,) for lengths in LENGTHS], [(-1, -1), CAUSAL]), ids=str
)
def test_lengths_around_tiles(lengths: tuple[int, int], window: tuple[int, int], monkeypatch: Any) -> None:
    # A row with a single key has gradient exactly 0 except through lse. The composite finds exactly 0, while dP - delta
    # rounds, so the lse has a gradient here.
    check(Case(shape=(1, 2, 1, *lengths), window=window, grad_lse=True), monkeypatch)


PACKED = ((5, 0, 33, 1, 17), (40, 7, 0, 1, 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(lengths=PACKED),
        Case(lengths=PACKED, window=CAUSAL, shape=(1, 4, 2, 0, 0), sinks=True),
        Case(lengths=PACKED, window=(9, 2), softcap=2.0, head_dims=(40, 24), grad_lse=True),
        Case(lengths=PACKED, alibi="batch", dropout=0.4, window=CAUSAL),
        Case(lengths=((0, 0), (3, 4))),
    ],
    ids=str,
)
def test_packed(case: Case, monkeypatch: Any) -> None:
    check(case, monkeypatch)


def test_packed_offsets_that_are_a_view(monkeypatch: Any) -> None:
    problem = make_problem(case := Case(lengths=PACKED))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        offsets = getattr(problem, name)
        setattr(problem, name, torch.stack([offsets, torch.full_like(offsets, 2)], 1)[:, 0])
    check(case, monkeypatch, problem)


@pytest.mark.slow
def test_packed_bounds_larger_than_the_tensors(monkeypatch: Any) -> None:
    """Such bounds launch no further programs, and sums of positions and window sides stay within 32 bits."""
    case = Case(lengths=((9, 24), (40, 7)), window=(2**31 - 2, 3))
    problem = make_problem(case)
    expected = run_kernels(case, problem, monkeypatch)
    problem.max_seqlens = (2**31 - 1, 2**31 - 1)
    grids: list[int] = []
    for module in (forward_module, backward_module):
        launch = module.launch

        def counted(kernel: Any, num_programs: int, *rest: Any, launch: Any = launch) -> None:
            grids.append(num_programs)
            assert num_programs < 1000
            launch(kernel, num_programs, *rest)

        monkeypatch.setattr(module, "launch", counted)
    actual = run_kernels(case, problem, monkeypatch)
    assert len(grids) == 4
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name


NAMES = ("rows", "query", "key_value", "slopes")


def test_training_compiles_once(monkeypatch: Any) -> None:
    """Lengths, batches and heads change from batch to batch, and must not compile another kernel.

    No other test has these head dims, so this test sees all kernels that are compiled for them.
    """
    kernels = (
        forward_module.attention_forward_kernel,
        *(getattr(backward_module, f"attention_backward_{name}_kernel") for name in NAMES),
    )
    counts = []
    for shape in ((1, 1, 1, 16, 32), (2, 4, 1, 17, 33), (3, 2, 1, 48, 1), (2, 16, 1, 5, 64)):
        case = Case(shape=shape, head_dims=(80, 48), alibi="batch")
        run_kernels(case, make_problem(case), monkeypatch)
        counts.append([num_compiled(kernel) for kernel in kernels])
    assert counts[-1] == counts[0] and min(counts[0]) >= 1, counts


@pytest.mark.slow
@pytest.mark.parametrize("window", [(-1, -1), CAUSAL], ids=str)
def test_visible_nan_in_a_value(window: tuple[int, int], monkeypatch: Any) -> None:
    """NaN reaches only its own column of the rows that see it, in masked and in unmasked tiles."""
    case = Case(window=window, shape=(1, 2, 1, 70, 70))
    problem = make_problem(case)
    problem.value[:, :, 21, 3] = torch.nan
    out = run_kernels(case, problem, monkeypatch)["out"]
    expected = torch.zeros_like(out, dtype=torch.bool)
    expected[:, :, 21 if window == CAUSAL else 0 :, 3] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.slow
def test_dropout_drops_what_the_reference_drops(monkeypatch: Any) -> None:
    """Uniform probabilities and one-hot values show the mask, bit for bit."""
    case = Case(shape=(2, 2, 1, 21, 48), head_dims=(16, 48), dropout=0.35)
    problem = make_problem(case)
    problem.query.zero_()
    problem.value[:] = torch.eye(48)
    actual = run_kernels(case, problem, monkeypatch)
    keep = reference.dropout_keep(SEED, 0.35, 2, 2, 21, 48, torch.device("cpu"))
    assert torch.equal(actual["out"].cpu() != 0, keep)
    problem.grad_out[:] = 0
    problem.grad_out[:, :, 5] = 1  # makes dV row 5 of the mask
    problem.value.zero_()
    actual = run_kernels(case, problem, monkeypatch)
    assert torch.equal(actual["grad_value"][..., 0].cpu() != 0, keep[:, :, 5])


def another_order() -> contextlib.AbstractContextManager[None]:
    if DEVICE == "cuda":
        return contextlib.nullcontext()
    from emulator import options

    return options.launching(seed=SEED, workers=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [OPTIONS[1], OPTIONS[30], *(pytest.param(OPTIONS[i], marks=pytest.mark.slow) for i in (17, 28))],
    ids=str,
)
def test_same_inputs_same_bits(case: Case, monkeypatch: Any) -> None:
    """The bits also agree in another order of CTAs, warps and copies, which on the emulator is another seed."""
    problem = make_problem(case)
    first = run_kernels(case, problem, monkeypatch)
    with another_order():
        second = run_kernels(case, problem, monkeypatch)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def random_case(seed: int) -> Case:
    """Draws a combination of options."""
    draw = random.Random(seed)
    batch, group = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 3])
    lengths = None
    if draw.random() < 0.3:
        lengths = tuple(tuple(draw.choice([0, 5, 16, 33, 40]) for _ in range(batch)) for _ in range(2))
    mask = "" if lengths else draw.choice(["", "", "bool", "float", "inf"])
    mask_shape = tuple(draw.choice([0, 1]) for _ in range(3))
    if mask in ("float", "inf"):
        # O's rounding enters delta, equally for a whole row, and a sum over broadcast dims adds it up: a 16-bit
        # composite gives no bound for that. OPTIONS has the broadcast biases.
        mask_shape = (1, 1, 1)
    side = [-1, -1, 0, 3, 16, 50]
    return Case(
        # test_lengths_around_tiles has single keys. With very few keys, the composite's worst error is down to luck.
        shape=(batch, group * draw.choice([1, 2]), group, draw.randint(1, 60), draw.randint(5, 60)),
        head_dims=(draw.choice([16, 24, 40, 64, 72]), draw.choice([16, 32, 48, 80])),
        dtype=draw.choice(DTYPES),
        window=(draw.choice(side), draw.choice(side)),
        first_row=0 if not lengths and draw.random() < 0.3 else None,
        softcap=draw.choice([0.0, 0.0, 1.5, 20.0]),
        alibi="" if mask else draw.choice(["", "", "head", "batch"]),
        mask=mask,
        # A bias that is constant along the keys changes nothing: its gradient is a 0 of thousands of cancelling terms.
        mask_shape=(*mask_shape, 1),  # type: ignore[arg-type]
        sinks=draw.random() < 0.3,
        dropout=draw.choice([0.0, 0.0, 0.1, 0.5]),
        scale=draw.choice([None, None, 1.0, -0.3, 0.0]),
        layout="bhsd" if lengths else draw.choice(["bhsd", "bshd", "sliced", "misaligned"]),
        lengths=lengths,  # type: ignore[arg-type]
        grad_lse=draw.random() < 0.3,
        small_tile=draw.random() < 0.7,
        seed=seed,
    )


def option_pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    """Returns the pairs of options in a case, among all options for which Triton compiles other code."""
    options = {
        "packed": case.lengths is not None,
        "grouped heads": case.shape[2] > 1,
        "left": case.window[0] >= 0,
        "right": case.window[1] >= 0,
        "softcap": case.softcap != 0,
        "dropout": case.dropout != 0,
    }
    same = ("dtype", "first_row", "alibi", "mask", "sinks", "layout", "grad_lse", "small_tile")
    options |= {name: getattr(case, name) for name in same}
    return set(itertools.combinations(options.items(), 2))


# These few seeds contain every pair of options that 1000 seeds do: compiling takes most of the time.
SEEDS = (0, 3, 5, 6, 9, 12, 16, 28, 43, 59, 95, 315, 366, 390, 489, 619, 729, 911, 1325, 1881, 1987, 2582)


def test_each_two_options_meet() -> None:
    met = set[Any]().union(*(option_pairs(random_case(seed)) for seed in SEEDS))
    assert met == set[Any]().union(*(option_pairs(random_case(seed)) for seed in range(1000)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_combinations(seed: int, monkeypatch: Any) -> None:
    check(random_case(seed), monkeypatch)
