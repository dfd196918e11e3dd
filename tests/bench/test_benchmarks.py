"""Tests the benchmarks' arithmetic: work, roofline, timing, JSON, tables, plots, and the page."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_cases import CPU, DECODE_CASES, LIMITS, document, row_of, synthetic_documents
from benchmarks import __main__ as commands
from benchmarks.measure import page as write_performance_page
from benchmarks.measure import plots, results, timing
from benchmarks.measure.cases.attention import AttentionCase
from benchmarks.measure.cases.decode import DecodeCase
from benchmarks.measure.cases.int8 import Int8Case
from benchmarks.measure.cases.masks import MASKS, mask_mod, ranges_of
from benchmarks.measure.timing import Call, Timing
from fastattn import masks
from fastattn.profiler import work
from fastattn.profiler.roofline import COMPUTE, LAUNCH, MEMORY, bound
from fastattn.profiler.work import Work

# --- work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [None, 0, 3, -4, 30, -30])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (3, 0), (3, 2), (-1, 4), (2, -1), (50, 50)])
@pytest.mark.parametrize("lengths", [(7, 7), (5, 11), (11, 5), (1, 9), (9, 1), (0, 4), (4, 0)])
def test_visible_pairs_are_those_of_the_mask(
    lengths: tuple[int, int], window: tuple[int, int], offset: int | None
) -> None:
    num_q, num_k = lengths
    left, right = (math.inf if side < 0 else side for side in window)
    at = num_k - num_q if offset is None else offset
    counted = sum(-left <= j - (i + at) <= right for i in range(num_q) for j in range(num_k))
    if window == (-1, 0) and at == 0 and num_q == num_k:
        counted = num_q * num_k // 2  # the convention of the FlashAttention papers
    assert work.visible_pairs(num_q, num_k, *window, offset=offset) == counted


def test_attention_work_by_hand() -> None:
    case = AttentionCase(head_dim=64, seqlen=100, batch=2, heads=6, kv_heads=3, causal=True)
    query, key = 2 * 6 * 100 * 64, 2 * 3 * 100 * 64
    pairs = 2 * 6 * 100 * 100 / 2
    assert case.forward_work() == Work(int(4 * pairs * 64), 2 * (2 * query + 2 * key) + 4 * 2 * 6 * 100)
    backward = case.backward_work()
    assert backward.flops == 2.5 * case.forward_work().flops
    assert backward.bytes == 2 * (4 * query + 4 * key) + 4 * 2 * 6 * 100
    full = dataclasses.replace(case, causal=False)
    assert full.forward_work().flops == 2 * case.forward_work().flops
    assert dataclasses.replace(full, bias=True).forward_work().bytes - full.forward_work().bytes == 2 * 6 * 100 * 100


def test_varlen_work_counts_the_actual_lengths() -> None:
    case = AttentionCase(head_dim=64, seqlen=128, batch=5, heads=2, kv_heads=2, varlen=True)
    assert len(case.lengths) == 5 and case.lengths[0] == 128 and all(16 <= n <= 128 for n in case.lengths)
    assert case.lengths == dataclasses.replace(case, causal=True).lengths  # every call draws the same lengths
    assert case.forward_work().flops == 4 * 64 * 2 * sum(n * n for n in case.lengths)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seqlen", [150, 1024])
def test_masks_as_ranges_and_as_functions_are_the_same(mask: str, seqlen: int) -> None:
    found = masks.to_bool(ranges_of(mask, seqlen), seqlen)[0, 0]
    row, column = torch.arange(seqlen)[:, None], torch.arange(seqlen)
    assert torch.equal(found, mask_mod(mask, seqlen, torch.device("cpu"))(0, 0, row, column))
    case = AttentionCase(head_dim=64, seqlen=seqlen, batch=2, heads=6, kv_heads=3, mask=mask)
    assert case.pairs == 2 * 6 * found.sum()


def test_work_with_fewer_queries_than_keys() -> None:
    """The mask is aligned to the last keys: the last query sees all of them."""
    case = AttentionCase(head_dim=64, seqlen=100, batch=2, heads=6, kv_heads=3, causal=True, queries=10)
    query, key = 2 * 6 * 10 * 64, 2 * 3 * 100 * 64
    pairs = 2 * 6 * sum(range(91, 101))
    assert case.forward_work() == Work(4 * pairs * 64, 2 * (2 * query + 2 * key) + 4 * 2 * 6 * 10)
    assert case.query_shape == (2, 6, 10, 64) and case.key_shape == (2, 3, 100, 64)
    biased = dataclasses.replace(case, bias=True)
    assert biased.forward_work().bytes - case.forward_work().bytes == 2 * 6 * 10 * 100
    packed = dataclasses.replace(case, varlen=True, batch=4, queries=80)
    lengths = [(min(80, length), length) for length in packed.lengths]
    assert min(packed.lengths) < 80 and packed.query_lengths == tuple(queries for queries, _ in lengths)
    pairs = 6 * sum(work.visible_pairs(*each, -1, 0) for each in lengths)
    assert packed.forward_work().flops == 4 * pairs * 64


def test_decode_and_int8_work_by_hand() -> None:
    decode = DecodeCase(batch=3, context=1000, heads=32, ragged=True)
    tokens = sum(decode.lengths)
    assert decode.work() == Work(4 * 32 * tokens * 128, 2 * 2 * 8 * tokens * 128 + 2 * 2 * 3 * 32 * 128 + 4 * 3 * 32)
    assert decode.work() == dataclasses.replace(decode, page_size=16).work()
    channel = Int8Case("x", m=5, n=64, k=256)
    assert channel.work() == Work(2 * 5 * 64 * 256, 2 * 5 * (64 + 256) + 64 * 256 + 4 * 64)
    assert dataclasses.replace(channel, granularity="128").work().bytes - channel.work().bytes == 4 * 64


# --- roofline ------------------------------------------------------------------------------------------------------


def test_the_binding_resource_is_that_of_the_arithmetic_intensity() -> None:
    compute = bound(Work(flops=int(8e12), bytes=int(1e10)), LIMITS, "bfloat16", 5e-6)
    assert compute.resource == COMPUTE and compute.least_s == pytest.approx(10e-3)
    memory = bound(Work(flops=int(8e11), bytes=int(1e10)), LIMITS, "bfloat16", 5e-6)
    assert memory.resource == MEMORY and memory.least_s == pytest.approx(2.5e-3)
    assert memory.fraction(5e-3) == pytest.approx(0.5)
    assert bound(Work(flops=int(2e12), bytes=int(1e10)), LIMITS, "bfloat16", 5e-6).resource == COMPUTE  # a tie


def test_work_shorter_than_a_launch_is_bound_by_it() -> None:
    small = Work(flops=1000, bytes=int(4e6))  # a microsecond of memory traffic
    assert bound(small, LIMITS, "bfloat16", 5e-6) == (LAUNCH, 5e-6)
    assert bound(small, LIMITS, "bfloat16", 0.5e-6).resource == MEMORY
    with pytest.raises(KeyError):
        bound(small, LIMITS, "float32", 5e-6)


def test_intensity_without_bytes() -> None:
    assert Work(10, 0).intensity == math.inf and Work(0, 0).intensity == 0.0 and Work(10, 5).intensity == 2.0


# --- timing --------------------------------------------------------------------------------------------------------


def test_summary_is_median_and_quartiles_in_any_order() -> None:
    assert timing.summarize([5.0, 1.0, 4.0, 2.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert timing.summarize([1.0, 2.0, 3.0, 1000.0]).median_s == 2.5  # an outlier does not move the median
    for bad in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="positive times"):
            timing.summarize(bad)


def test_number_of_samples_follows_the_budget() -> None:
    assert timing.num_samples(1e-3, 0.1) == 100
    assert timing.num_samples(1.0, 0.1) == timing.FEWEST_SAMPLES
    assert timing.num_samples(1e-6, 0.1) == timing.MOST_SAMPLES


def test_input_sets_exceed_the_l2_twice_and_fit_into_memory() -> None:
    mb = 1 << 20
    assert timing.num_input_sets(10 * mb, 50 * mb, 1000 * mb) == 10
    assert timing.num_input_sets(33 * mb, 50 * mb, 1000 * mb) == 4  # rounded up
    assert timing.num_input_sets(500 * mb, 50 * mb, 10_000 * mb) == 2
    assert timing.num_input_sets(600 * mb, 50 * mb, 1000 * mb) == 1
    assert timing.num_input_sets(1, 50 * mb, 1000 * mb) == timing.MOST_SETS


class FakeDevice:
    """A stand-in for ``torch.cuda``: a GPU whose clock a call advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.allocated, self.peak = 0.0, 1000, 1000
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = device.now_s

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.at_s - self.at_s) * 1e3  # torch returns milliseconds

        class Stream:
            def wait_stream(self, other: Any) -> None: ...

        class Graph:
            def replay(self) -> None:
                device.now_s += self.seconds

        @contextlib.contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            before = device.now_s
            yield
            graph.seconds = device.now_s - before

        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": lambda stream: contextlib.nullcontext(),
            "current_stream": Stream,
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: setattr(device, "peak", device.allocated),
            "memory_allocated": lambda: device.allocated,
            "max_memory_allocated": lambda: device.peak,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def call(self, seconds: float, allocates: int = 0) -> Call:
        def run() -> None:
            self.now_s += seconds
            self.peak = max(self.peak, self.allocated + allocates)

        return run


def test_the_cuda_timer_times_single_calls_and_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch)
    timer = timing.CudaTimer(budget_s=0.1)
    calls = [device.call(1e-3), device.call(2e-3), device.call(3e-3)]
    eager = timer.eager(calls)
    assert eager.samples in (49, 50) and eager.median_s == pytest.approx(2e-3)
    assert (eager.lower_s, eager.upper_s) == pytest.approx((1e-3, 3e-3))
    graph = timer.graph(calls)
    assert graph.median_s == pytest.approx(2e-3) and graph.samples in (16, 17)
    assert timer.peak_bytes(device.call(1e-3, allocates=345)) == 345


def test_limits_come_from_the_work_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.profiler import limits

    device = FakeDevice(monkeypatch)
    assert limits.median_seconds(device.call(7e-3)) == pytest.approx(7e-3)
    with pytest.raises(ValueError, match="expected a CUDA device"):
        limits.measure_limits(CPU, [torch.bfloat16])


# --- results -------------------------------------------------------------------------------------------------------


def test_ratios_compare_like_with_like_within_a_case() -> None:
    case, other = DECODE_CASES[0], DECODE_CASES[1]
    least = case.work()
    rows = results.with_ratios(
        [
            row_of(case, "fastattn cuda", False, 20e-6, 8e-6, least),
            row_of(case, "fastattn triton", False, 30e-6, None, least),
            row_of(case, "a", True, 10e-6, None, least),
            row_of(case, "b", True, 40e-6, 4e-6, least),
            row_of(other, "fastattn cuda", False, 1e-6, 1e-6, other.work()),
        ]
    )
    ratios = [row["ratio_to_best_peer"] for row in rows]
    assert ratios[0] == pytest.approx(0.5)  # graphs: 4 / 8
    assert ratios[1] == pytest.approx(1 / 3)  # eager: 10 / 30
    assert ratios[2] == pytest.approx(4.0)  # a peer's best peer is another peer
    assert ratios[4] is None


def test_the_schema_names_what_is_wrong(tmp_path: Path) -> None:
    case = DECODE_CASES[0]
    sound = document("decode", [row_of(case, "fastattn cuda", False, 1e-5, None, case.work())])
    results.validate(sound)

    def broken(change: Callable[[Any], Any], message: str) -> None:
        copy = json.loads(json.dumps(sound))
        change(copy)
        with pytest.raises(results.BadResult, match=message):
            results.validate(copy)

    broken(lambda d: d.pop("commit"), r"document: missing \['commit'\]")
    broken(lambda d: d.update(benchmark="other"), "document.benchmark")
    broken(lambda d: d.update(schema=2), "document.schema")
    broken(lambda d: d["environment"].update(num_sms="132"), "environment.num_sms")
    broken(lambda d: d["limits"].update(bytes_per_s=True), "limits.bytes_per_s")
    broken(lambda d: d["rows"][0].update(status="fine"), r"rows\[0\].status")
    broken(lambda d: d["rows"][0].update(status="wrong"), r"rows\[0\]: status wrong")
    broken(lambda d: d["rows"][0].update(eager=None), r"rows\[0\]: status ok")
    broken(lambda d: d["rows"][0]["eager"].pop("samples"), r"rows\[0\].eager")
    broken(lambda d: d["rows"][0].update(resource="magic"), r"rows\[0\].resource")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(results.BadResult, match=r"bad\.json"):
        results.read(tmp_path / "bad.json")
    assert results.folder_name("NVIDIA H200") == "nvidia-h200"


# --- plots and the page ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_plot_is_drawn(tmp_path: Path) -> None:
    from matplotlib.image import imread

    for name, synthetic in synthetic_documents().items():
        paths = plots.draw(results.validate(synthetic), tmp_path)
        assert [path.name for path in paths] == [f"{name}.png", f"{name}_roofline.png"]
        for path in paths:
            pixels = imread(path)
            assert pixels.shape[0] > 300 and pixels.std() > 0.05, f"{path}: next to nothing is drawn"
    assert plots.draw(document("decode", []), tmp_path) == []


def test_the_committed_page_is_what_the_results_give(capsys: pytest.CaptureFixture[str]) -> None:
    write_performance_page.main(["--check"])


def test_the_page_tells_when_where_and_what_was_never_measured(tmp_path: Path) -> None:
    page_path = tmp_path / "docs" / "PERFORMANCE.md"
    empty = write_performance_page.page(tmp_path / "results", page_path)
    assert "## Never measured" in empty and "- Attention, forward" in empty and "|" not in empty
    folder = tmp_path / "results" / "synthetic-gpu"
    folder.mkdir(parents=True)
    decode = synthetic_documents()["decode"]
    decode["rows"][1].update(status="failed", reason="RuntimeError: broken", eager=None, graph=None, error=None)
    results.write(decode, folder)
    (folder / "decode.png").touch()
    page = write_performance_page.page(tmp_path / "results", page_path)
    assert "## SYNTHETIC GPU" in page and "2000-01-01T00:00:00+00:00, commit 0123456789abcdef" in page
    assert "- Decoding over a KV cache" not in page and "- Attention, forward" in page
    assert "![decode.png](../results/synthetic-gpu/decode.png)" in page and "decode_roofline.png" not in page
    assert "- fastattn triton (synthetic), 1 case: failed, RuntimeError: broken" in page
    assert "batch 16, context 16384, 32/8 heads, d 128, pages of 64, ragged, bf16" in page


def test_every_command_is_there_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 0
    listed = capsys.readouterr().out
    for name, (module, summary) in commands.COMMANDS.items():
        assert f"  {name} " in listed and summary in listed
        assert importlib.util.find_spec(f"benchmarks.{module}") is not None
    assert commands.main(["deocde"]) == 2
    assert "there is no command 'deocde'" in capsys.readouterr().err


def test_a_command_gets_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["page", "--help"])
    assert "usage: python -m benchmarks page" in capsys.readouterr().out
