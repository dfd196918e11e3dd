"""Tests the benchmark harness on the CPU: what it checks, what it reports, and its grids."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark_cases import ATTENTION, ATTENTION_CASES, CPU, DECODE_CASES, INT8_CASES, LIMITS, document, name_of
from benchmarks.measure import accuracy, benchmarks, environment, harness, results
from benchmarks.measure import tables as table
from benchmarks.measure.cases import attention as case_attention
from benchmarks.measure.cases import decode as case_decode
from benchmarks.measure.cases import int8 as case_int8
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.implementations import (
    CUBLAS,
    Implementation,
    Prepare,
    Prepared,
    Unsupported,
    own_implementations,
)
from benchmarks.measure.peers import attention as peers_attention
from benchmarks.measure.peers import decode as peers_decode
from benchmarks.measure.peers import int8 as peers_int8
from benchmarks.measure.timing import Call, Timing
from fastattn import reference
from fastattn.profiler.roofline import LAUNCH

# --- correctness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=name_of)
def test_attention_is_checked_against_the_whole_computation(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slice that is checked, computed in chunks of a few rows, equals float64 over everything, gradients too."""
    monkeypatch.setattr(case_attention, "MAX_CHUNK_ELEMENTS", 10 * 2 * 48)
    inputs = case_attention.make_inputs(case, CPU, seed=3)
    leaves = [t.double().requires_grad_() for t in inputs[:3]]
    window = (case.window, 0 if case.window >= 0 else -1)
    if case.varlen:
        offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        assert [each.tolist()[-1] for each in offsets if each is not None] == [len(t) for t in inputs[:2]]
        out, _ = reference.attention_varlen(
            *leaves, *offsets, case.longest_queries, case.seqlen, causal=case.causal, window=window
        )
    else:
        bias = None if inputs.bias is None else inputs.bias.double()
        ranges = inputs.key_ranges
        out, _ = reference.attention(*leaves, causal=case.causal, window=window, bias=bias, key_ranges=ranges)
    gradients = torch.autograd.grad(out, leaves, inputs.grad_out.double())
    for expected, whole in (
        (case_attention.expected_forward(case, inputs), (out,)),
        (case_attention.expected_backward(case, inputs), gradients),
    ):
        assert len(expected.oracle) == len(whole)
        for oracle, limit, tensor in zip(expected.oracle, expected.bounds, whole, strict=True):
            assert accuracy.worst_difference(case_attention.checked_slice(case, tensor), oracle) < 1e-12
            assert 0 < limit < 0.1


def test_verdicts() -> None:
    oracle = torch.tensor([1.0, -4.0], dtype=torch.float64)
    expected = accuracy.Expected((oracle,), (0.01,))
    good = accuracy.judge([oracle.float() + 0.008], expected, is_peer=False)
    assert good.reason is None and good.error == pytest.approx(0.002, rel=1e-3)
    off = oracle.float() + torch.tensor([0.0, 0.1])
    bad = accuracy.judge([off], expected, is_peer=False)
    assert bad.reason is not None and "output 0: worst error 1.000e-01 exceeds 1.000e-02" in bad.reason
    assert accuracy.judge([off], expected, is_peer=True).reason is None
    assert accuracy.judge([oracle + 0.3], expected, is_peer=True).reason is not None
    assert accuracy.judge([oracle * math.nan], expected, is_peer=True).error == math.inf
    assert accuracy.judge([oracle[:1]], expected, is_peer=True).error == math.inf


# --- the harness ---------------------------------------------------------------------------------------------------


class StubTimer:
    """A timer that runs each call once and returns the times that it was given."""

    def __init__(self, eager_s: float = 100e-6, graph_s: float = 80e-6) -> None:
        self.eager_s, self.graph_s = eager_s, graph_s

    def eager(self, calls: Sequence[Call]) -> Timing:
        for call in calls:
            call()
        return Timing(self.eager_s, 0.9 * self.eager_s, 1.1 * self.eager_s, 11)

    def graph(self, calls: Sequence[Call]) -> Timing:
        return Timing(self.graph_s, self.graph_s, self.graph_s, 11)

    def peak_bytes(self, call: Call) -> int:
        call()
        return 4096


def on_cpu(name: str, own: Prepare, *peers: Implementation) -> harness.Benchmark:
    """Returns a benchmark with fastattn's PyTorch path in place of its kernels, which need a GPU."""
    make, _ = benchmarks.BENCHMARKS[name]
    benchmark = make(benchmarks.options_of(name, []))
    return dataclasses.replace(benchmark, implementations=[*own_implementations(own, ["torch"]), *peers])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "own", "peers", "cases"),
    [
        ("attention_forward", case_attention.prepare_forward, peers_attention.forward_peers, ATTENTION_CASES),
        ("attention_backward", case_attention.prepare_backward, peers_attention.backward_peers, ATTENTION_CASES),
        ("decode", case_decode.prepare, peers_decode.peers, DECODE_CASES),
        ("int8_matmul", case_int8.prepare, peers_int8.peers, INT8_CASES),
    ],
    ids=["forward", "backward", "decode", "int8"],
)
def test_every_benchmark_measures_its_cases(
    name: str, own: Prepare, peers: Callable[[], list[Implementation]], cases: list[Any], tmp_path: Path
) -> None:
    (peer,) = (peer for peer in peers() if peer.name in ("torch SDPA math", CUBLAS))
    benchmark = on_cpu(name, own, peer)
    rows: list[results.Row] = []
    for case in cases:
        measured = list(harness.measure_case(benchmark, case, CPU, StubTimer(), LIMITS, num_sets=2))
        assert [row["implementation"] for row in measured] == ["fastattn torch", peer.name]
        assert measured[0]["status"] == "ok", measured[0]["reason"]
        assert measured[0]["error"] < 0.02
        allowed = (
            "no packed",
            "no window",
            "no paged",
            "no sequences",
            "no causal mask that ends",
            "no mask of ranges",
        )
        assert measured[1]["status"] == "ok" or measured[1]["reason"].startswith(allowed), measured[1]["reason"]
        rows += results.with_ratios(measured)
    assert any(row["ratio_to_best_peer"] == 1.0 for row in rows)
    path = results.write(document(benchmark.name, rows), tmp_path)
    assert path.name == f"{benchmark.name}.json"
    text = table.as_text(results.read(path))
    assert all(name_of(case) in text for case in cases)
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def failing(name: str, error: BaseException) -> Implementation:
    def prepare(case: Any, inputs: Any) -> Prepared:
        raise error

    return Implementation(name, "1", prepare)


def test_who_is_wrong_or_fails_gets_no_figures_and_the_reason() -> None:
    def half_of(case: Any, inputs: Any) -> Prepared:
        right = case_attention.prepare_forward(case, inputs)
        return Prepared(lambda: right.call() * 0.5, right.outputs)

    benchmark = on_cpu(
        "attention_forward",
        case_attention.prepare_forward,
        Implementation("wrong", "1", half_of),
        failing("raises", RuntimeError("no such kernel\nand a long story")),
        failing("refuses", Unsupported("no such option")),
    )
    rows = list(harness.measure_case(benchmark, ATTENTION, CPU, StubTimer(), LIMITS, num_sets=1))
    assert [row["status"] for row in rows] == ["ok", "wrong", "failed", "unsupported"]
    assert rows[1]["eager"] is None and rows[1]["error"] == pytest.approx(0.5, rel=0.01)
    assert rows[2]["reason"] == "RuntimeError: no such kernel"
    assert rows[3]["reason"] == "no such option"
    results.validate(document("attention_forward", rows))


def test_our_kernels_are_unsupported_where_the_dispatcher_says_so() -> None:
    benchmark = on_cpu("attention_forward", case_attention.prepare_forward)
    own = own_implementations(case_attention.prepare_forward, ["cuda"])
    benchmark = dataclasses.replace(benchmark, implementations=own)
    (row,) = harness.measure_case(benchmark, ATTENTION, CPU, StubTimer(), LIMITS, num_sets=1)
    assert row["status"] == "unsupported" and 'use_backend("cuda") cannot run this call' in row["reason"]


def test_graphs_are_timed_where_a_launch_can_be_seen() -> None:
    benchmark = on_cpu("decode", case_decode.prepare)
    (short,) = harness.measure_case(benchmark, DECODE_CASES[0], CPU, StubTimer(), LIMITS, num_sets=1)
    assert short["graph"]["median_s"] == 80e-6
    assert short["resource"] == LAUNCH and short["fraction"] == pytest.approx(1e-6 / 80e-6)
    (long,) = harness.measure_case(benchmark, DECODE_CASES[0], CPU, StubTimer(eager_s=1.0), LIMITS, num_sets=1)
    assert long["graph"] is None and long["fraction"] == pytest.approx(5e-6)


def test_a_call_that_cannot_be_captured_keeps_its_eager_time() -> None:
    class NoCapture(StubTimer):
        def graph(self, calls: Sequence[Call]) -> Timing:
            raise RuntimeError("operation not permitted when stream is capturing")

    benchmark = on_cpu("decode", case_decode.prepare)
    (row,) = harness.measure_case(benchmark, DECODE_CASES[0], CPU, NoCapture(), LIMITS, num_sets=1)
    assert row["status"] == "ok" and row["graph"] is None and row["reason"].startswith("no CUDA graph: RuntimeError")


@pytest.mark.parametrize("name", benchmarks.BENCHMARKS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_script_says_so_and_lists_the_least_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    benchmarks.main(name, ["--full"])
    printed = capsys.readouterr().out
    assert "no NVIDIA GPU here, so nothing is measured or written" in printed and "FLOP/byte" in printed


def test_grids_are_those_that_are_promised_and_options_narrow_them() -> None:
    full = case_attention.full_cases()
    assert {case.head_dim for case in full} == {64, 128, 256} and {case.seqlen for case in full} >= {512, 32768}
    assert {case.heads // case.kv_heads for case in full} == {1, 8}
    assert {case.dtype for case in full} == {"bfloat16", "float16"}
    assert all(case.batch * case.seqlen in (16384, 32768) for case in full)
    chunks = case_attention.full_chunks()
    assert set(case_attention.quick_chunks()) <= set(chunks) and len(set(chunks)) == len(chunks)
    assert {(case.queries, case.seqlen) for case in chunks if not case.varlen} == {
        (queries, seqlen) for queries in (64, 256, 512, 2048) for seqlen in (8192, 32768)
    }
    assert all(case.causal and (case.heads, case.kv_heads, case.head_dim) == (32, 8, 128) for case in chunks)
    options = benchmarks.options_of("attention_forward", ["--full"])
    assert set(case_attention.forward_cases(options)) - set(case_attention.backward_cases(options)) == set(chunks)
    decode = case_decode.full_cases()
    assert {case.heads // case.kv_heads for case in decode} == {1, 4, 8, 16}
    assert max(case.context for case in decode) == 262144 and max(case.batch for case in decode) == 128
    int8 = case_int8.full_cases()
    assert {case.m for case in int8} >= {1, 8192} and any(case.gradient for case in int8)
    for module in (case_attention, case_decode, case_int8):
        whole, quick = module.full_cases(), module.quick_cases()
        assert len(set(whole)) == len(whole) and len(set(quick)) == len(quick)
    options = benchmarks.options_of(
        "attention_forward", ["--full", "--head-dim", "64", "--seqlen", "1024", "--mask", "causal"]
    )
    kept = case_attention.forward_cases(options)
    assert kept and all((case.head_dim, case.seqlen, case.causal) == (64, 1024, True) for case in kept)
    assert all(case.page_size for case in case_decode.chosen(benchmarks.options_of("decode", ["--cache", "paged"])))
    assert {case.m for case in case_int8.chosen(benchmarks.options_of("int8_matmul", ["--m", "1"]))} == {1}
    peers = [failing("flash-attn 2", RuntimeError()), failing("torch SDPA cuDNN", RuntimeError())]
    assert harness.chosen_peers(peers, None) == peers
    assert harness.chosen_peers(peers, ["cudnn"]) == peers[1:] and harness.chosen_peers(peers, ["none"]) == []


# --- a whole run, on a CPU that passes for a GPU ---------------------------------------------------------------------


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Answers what a run asks of CUDA, kernels aside; returns the folder that ``--save`` writes to."""
    properties = SimpleNamespace(L2_cache_size=1 << 20)
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (1 << 30, 1 << 30),
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "device", lambda *args: CPU)
    monkeypatch.setattr(harness, "measure_limits", lambda device, dtypes: LIMITS)
    monkeypatch.setattr(harness, "CudaTimer", lambda budget_s: StubTimer())
    monkeypatch.setattr(environment, "describe_gpu", lambda device: document("decode", [])["environment"])
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    return tmp_path / "results" / "synthetic-gpu"


@pytest.mark.slow
def test_a_run_writes_what_it_measured(pretended_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = dataclasses.replace(on_cpu("decode", case_decode.prepare), cases=DECODE_CASES)
    harness.report(benchmark, benchmarks.options_of("decode", ["--save"]))
    saved = results.read(pretended_gpu / "decode.json")
    assert saved["complete"] and len(saved["rows"]) == len(DECODE_CASES)
    assert (pretended_gpu / "decode.png").exists() and (pretended_gpu / "decode_roofline.png").exists()
    printed = capsys.readouterr().out
    assert "Limits measured in the same run: copy 4000 GB/s" in printed and name_of(DECODE_CASES[0]) in printed


@pytest.mark.usefixtures("pretended_gpu")
def test_a_run_ends_in_time_and_keeps_what_it_has() -> None:
    benchmark = dataclasses.replace(on_cpu("decode", case_decode.prepare), cases=DECODE_CASES)
    stopped = results.validate(harness.run(benchmark, CPU, minutes=0.0, seconds_per_figure=0.1))
    assert not stopped["complete"] and stopped["rows"] == []


@pytest.mark.usefixtures("pretended_gpu")
def test_a_run_that_loses_the_device_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise harness.DeviceLost("an illegal memory access was encountered")

    monkeypatch.setattr(harness, "_release", lost)
    peer = failing("broken", RuntimeError("illegal memory access"))
    benchmark = dataclasses.replace(on_cpu("decode", case_decode.prepare, peer), cases=DECODE_CASES)
    stopped = results.validate(harness.run(benchmark, CPU, minutes=1.0, seconds_per_figure=0.1))
    assert not stopped["complete"]
    assert [row["status"] for row in stopped["rows"]] == ["ok", "failed"]


def test_a_run_that_is_asked_to_end_writes_what_it_has(pretended_gpu: Path) -> None:
    def ask(case: Any, inputs: Any) -> Prepared:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the run went on")

    before = signal.getsignal(signal.SIGTERM)
    peer = Implementation("asks", "1", ask)
    benchmark = dataclasses.replace(on_cpu("decode", case_decode.prepare, peer), cases=DECODE_CASES)
    harness.report(benchmark, benchmarks.options_of("decode", ["--save"]))
    saved = results.read(pretended_gpu / "decode.json")
    assert not saved["complete"] and [row["status"] for row in saved["rows"]] == ["ok"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "narrowed"),
    [
        ("attention_forward", ["--head-dim", "64", "--seqlen", "1024", "--peer", "SDPA"]),
        ("attention_backward", ["--head-dim", "64", "--seqlen", "1024", "--peer", "SDPA"]),
        ("decode", ["--context", "1024", "4096", "--peer", "SDPA"]),
        ("int8_matmul", ["--m", "1", "--layer", "7B", "--peer", "cuBLAS"]),
    ],
)
def test_on_a_gpu_figures_stand_beside_peers_and_limits(name: str, narrowed: list[str], tmp_path: Path) -> None:
    benchmarks.main(name, [*narrowed, "--seconds-per-figure", "0.02", "--json", str(tmp_path), "--plot", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    measured = results.read(path)
    assert measured["complete"] and len(list(tmp_path.glob("*.png"))) == 2
    own = [row for row in measured["rows"] if row["implementation"] == "fastattn triton"]
    assert own and all(row["status"] == "ok" and 0 < row["fraction"] < 1.5 for row in own), own
    assert any(row["ratio_to_best_peer"] for row in own)
