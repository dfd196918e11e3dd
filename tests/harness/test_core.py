"""Checks how ``make test`` chooses its cases, and that a kernel or an option that stays unproven fails the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import fastattn
import proof
from covering import core_of, covering, facts_of, few_of, pairs_of
from cuda_kernels import EMULATED, HAS_KERNELS
from oracle import check_against_oracle

TRITON = Path(__file__).parents[2] / "triton_kernels"
CASES = [{"dims": dims, "dtype": dtype, "seed": seed} for dims in (8, 64, 96) for dtype in "hb" for seed in (0, 1)]
PLACES = {"dims": 0, "dtype": 0, "seed": 0}


def test_every_value_is_kept_and_for_instances_every_pair() -> None:
    values = covering(CASES, [facts_of(case, PLACES) for case in CASES])
    pairs = covering(CASES, [pairs_of(case, PLACES, []) for case in CASES])
    for kept, expected in ((values, 3), (pairs, 6)):
        assert {case["dims"] for case in kept} == {8, 64, 96} and {case["dtype"] for case in kept} == {"h", "b"}
        assert {case["seed"] for case in kept} == {0}
        assert len(kept) == len({(case["dims"], case["dtype"]) for case in kept}) == expected


def test_values_that_do_not_compare_are_told_apart_by_their_place() -> None:
    facts = [facts_of({"case": object()}, {"case": place}) for place in range(4)]
    assert covering(range(4), facts) == [0, 1, 2, 3]


def test_values_of_instances_that_were_given_together_are_one() -> None:
    cases = [{"m": m, "dtype": dtype} for m in (16, 32) for dtype in "hb"]
    places = {"m": 0, "dtype": 0}
    assert len(covering(cases, [facts_of(case, places) for case in cases])) == 2
    assert len(covering(cases, [pairs_of(case, places, [("m", "dtype")]) for case in cases])) == 4


@dataclasses.dataclass(frozen=True)
class Options:
    dropout: float = 0.0
    window: int = -1
    seed: int = 0


@pytest.mark.parametrize("make", [Options, dict], ids=["dataclass", "dict"])
def test_entries_of_a_value_are_values_of_their_own(make: Callable[..., Any]) -> None:
    """In tests of instances, the whole dataclass or dict is one value."""
    cases = [{"case": make(dropout=dropout, window=window)} for dropout in (0.0, 0.5) for window in (-1, 8)]
    places = [{"case": place} for place in range(4)]
    assert len(covering(cases, [facts_of(*each) for each in zip(cases, places, strict=True)])) == 2
    assert len(covering(cases, [pairs_of(*each, []) for each in zip(cases, places, strict=True)])) == 4


def test_a_seed_within_a_value_is_no_fact() -> None:
    assert facts_of({"case": Options(seed=1)}, {"case": 0}) == facts_of({"case": Options()}, {"case": 1})


def item(function: str, path: str = "tests/decode/test_any.py", mark: str = "", **params: Any) -> SimpleNamespace:
    """Returns a stand-in for a pytest item, with what `core_of` reads."""
    spec = SimpleNamespace(params=params, indices=dict.fromkeys(params, 0))
    return SimpleNamespace(
        originalname=function,
        parent=SimpleNamespace(nodeid=path),
        path=Path(path),
        callspec=spec,
        get_closest_marker=lambda name: "marker" if name == mark else None,
        iter_markers=lambda name: [],
    )


def test_the_core_leaves_out_slow_tests_and_those_of_triton_that_others_run_too() -> None:
    kept = [
        item("test_both", backend="cuda"),
        item("test_triton_alone", backend="triton"),
        *(item("test_both", "tests/all_kernels/test_any.py", backend=backend) for backend in ("cuda", "triton")),
    ]
    kept += [item("test_dims", backend="cuda", dim=dim) for dim in (64, 96)]
    left_out = [item("test_both", backend="triton"), item("test_slow", mark="slow")]
    left_out += [item("test_dims", backend="triton", dim=96)]
    items = [*kept, *left_out]
    assert [each for each in items if each in core_of(items)] == kept
    assert [each for each in items if each in few_of(items)] == items


def test_of_a_slow_test_few_cases_are_taken_where_each_costs_much() -> None:
    dear, compiled, cheap = (
        [item("test_dims", f"tests/{path}.py", mark="slow", dim=dim) for dim in range(9)]
        for path in ("decode/test_any", "machine_code/test_triton_compile", "machine_code/test_any")
    )
    assert few_of([*dear, *compiled, *cheap]) == [dear[0], compiled[0], *cheap]


def test_the_core_takes_few_cases_of_what_runs_kernels() -> None:
    dear, quick, proofs = (
        [item("test_dims", path, mark=mark, dim=dim) for dim in range(9)]
        for path, mark in (
            ("tests/decode/test_any.py", ""),
            ("tests/cache/test_any.py", "quick"),
            ("tests/all_kernels/test_any.py", ""),
        )
    )
    instances = [item("test_each_instance", dim=dim) for dim in range(9)]
    items = [*dear, *quick, *proofs, *instances]
    assert core_of(items) == [*dear[:2], *items[9:]]
    assert few_of(items) == [*dear[:4], *items[9:]]


class Config:
    """A stand-in for pytest's configuration, with what the gate reads."""

    args: ClassVar = ["tests"]

    def __init__(self, **options: Any) -> None:
        self.options = options

    def getini(self, name: str) -> list[str]:
        return ["tests"]

    def getoption(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)


def run_test(gate: proof.Gate, body: Callable[[], None]) -> None:
    """Runs ``body`` as the gate's test."""
    around = gate.pytest_runtest_call()
    next(around)
    body()
    with pytest.raises(StopIteration):
        around.send(None)


@pytest.mark.skipif(not EMULATED or not HAS_KERNELS, reason="counts launches on the emulator")
@pytest.mark.usefixtures("emulated_gpu")
def test_a_kernel_or_an_option_without_a_proof_ends_the_run() -> None:
    gate = proof.Gate(Config(), TRITON)  # type: ignore[arg-type]
    kernel, option = "attention_forward_options_sm80<64, float16>", "attention with softcap (cuda)"
    gate.wanted = {kernel, option}
    x = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(0)).half()

    def call() -> None:
        with fastattn.use_backend("cuda"):
            fastattn.attention(x, x, x, softcap=3.0)

    def call_and_compare() -> None:
        call()
        check_against_oracle("x", x, x.double(), x)

    run_test(gate, call)
    assert gate.missing() == sorted([kernel, option])
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    gate.pytest_sessionfinish(session)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    gate.wanted = {kernel, option}
    run_test(gate, call_and_compare)
    assert gate.missing() == []
    gate.wanted.add("another")
    assert gate.missing() == ["another"]
    narrowed = proof.Gate(Config(keyword="softcap"), TRITON)  # type: ignore[arg-type]
    narrowed.wanted = {"another"}
    assert narrowed.missing() == []


def test_what_is_wanted() -> None:
    """The gate wants all kernels of both languages, and each option of each operation on each backend that takes it."""
    found = proof.wanted(TRITON)
    assert "triton attention_forward_kernel" in found and "decode with fp8 cache (triton)" in found
    assert "int8_matmul with int8 activations (triton)" not in found
    if HAS_KERNELS:
        assert {"int8_matmul_sm90<64, bfloat16, groups>", "attention with paged (cuda)"} <= found
