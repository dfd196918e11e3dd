"""Runs a benchmark: checks, times, classifies and reports every implementation on every case."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import fastattn
from benchmarks.measure import environment, plots, results
from benchmarks.measure import tables as table
from benchmarks.measure.accuracy import Expected, judge
from benchmarks.measure.implementations import Implementation, Prepare, Unsupported, broken, own_implementations
from benchmarks.measure.results import Document, Row
from benchmarks.measure.timing import CudaTimer, num_input_sets
from fastattn.profiler.limits import measure_limits
from fastattn.profiler.roofline import Limits, bound
from fastattn.profiler.work import Work

# Only calls shorter than this are also timed in CUDA graphs: in longer calls, a launch is too small a part to matter.
GRAPH_BELOW_S = 500e-6


@dataclass(frozen=True)
class Benchmark:
    """Says what a benchmark measures, and how to run and check it.

    A case is a frozen dataclass, whose fields become a row's ``case``.

    Args:
        name: one of ``results.BENCHMARKS``.
        cases: the cases of a run, the most informative first.
        implementations: fastattn's implementations, then the peers.
        make_inputs: makes random inputs of a case on a device, from a seed.
        work: returns the least work of a call.
        expected: returns the right results of the checked part, in float64.
        checked: returns the part of an output that is checked.
        differentiates: returns whether autograd runs in a case's calls. Such calls are not timed in CUDA graphs.
    """

    name: str
    cases: Sequence[Any]
    implementations: Sequence[Implementation]
    make_inputs: Callable[[Any, torch.device, int], Any]
    work: Callable[[Any], Work]
    expected: Callable[[Any, Any], Expected]
    checked: Callable[[Any, Tensor], Tensor]
    differentiates: Callable[[Any], bool] = lambda case: False

    @property
    def title(self) -> str:
        """Returns the name that is shown to people."""
        return self.name.replace("_", " ")


class DeviceLost(RuntimeError):
    """Raised when a kernel has left the device in a state in which nothing more runs on it."""


class Asked(BaseException):
    """Raised when SIGTERM asks the run to end. It is not an Exception, which `measure_case` would catch."""


@contextlib.contextmanager
def _ends_when_asked() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise Asked("the run was asked to end (SIGTERM)")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure_case(
    benchmark: Benchmark, case: Any, device: torch.device, timer: CudaTimer, limits: Limits, num_sets: int
) -> Iterator[Row]:
    """Yields one row for each implementation. Raises ``DeviceLost`` after the row of a call that lost the device."""
    sets = [benchmark.make_inputs(case, device, seed) for seed in range(num_sets)]
    expected = benchmark.expected(case, sets[0])
    for implementation in benchmark.implementations:
        row = _empty_row(benchmark, case, implementation)
        try:
            with torch.set_grad_enabled(benchmark.differentiates(case)), implementation.context():
                row.update(_measure(benchmark, case, implementation, sets, expected, timer, limits))
        except Exception as error:  # the row then has the error as its reason
            is_missing = isinstance(error, (Unsupported, NotImplementedError, fastattn.InputError))
            row.update(status="unsupported" if is_missing else "failed", reason=_reason(error))
        yield row
        if row["status"] != "ok":
            _release(device)


def _measure(
    benchmark: Benchmark,
    case: Any,
    implementation: Implementation,
    sets: Sequence[Any],
    expected: Expected,
    timer: CudaTimer,
    limits: Limits,
) -> Row:
    prepared = [implementation.prepare(case, inputs) for inputs in sets]
    outputs = prepared[0].outputs(prepared[0].call())
    verdict = judge([benchmark.checked(case, output) for output in outputs], expected, implementation.is_peer)
    del outputs
    if verdict.reason is not None:
        error = verdict.error if math.isfinite(verdict.error) else None  # JSON has no infinity
        return {"status": "wrong", "reason": verdict.reason, "error": error}
    calls = [each.call for each in prepared]
    peak_bytes = timer.peak_bytes(calls[0])
    eager = timer.eager(calls)
    graph, reason = None, None
    if not benchmark.differentiates(case) and eager.median_s < GRAPH_BELOW_S:
        try:
            graph = timer.graph(calls)
        except Exception as error:  # an implementation that synchronises cannot be captured
            reason = f"no CUDA graph: {_reason(error)}"
    launch_s = limits.eager_launch_s if graph is None else limits.graph_launch_s
    binding = bound(benchmark.work(case), limits, case.dtype, launch_s)
    return {
        "status": "ok",
        "reason": reason,
        "error": verdict.error,
        "eager": eager._asdict(),
        "graph": None if graph is None else graph._asdict(),
        "peak_bytes": peak_bytes,
        "resource": binding.resource,
        "fraction": binding.fraction((graph or eager).median_s),
    }


def _empty_row(benchmark: Benchmark, case: Any, implementation: Implementation) -> Row:
    work = benchmark.work(case)
    missing = ("reason", "error", "eager", "graph", "peak_bytes", "resource", "fraction", "ratio_to_best_peer")
    return {
        "case": dataclasses.asdict(case),
        "implementation": implementation.name,
        "version": implementation.version,
        "is_peer": implementation.is_peer,
        "status": "failed",
        "flops": work.flops,
        "bytes": work.bytes,
        **dict.fromkeys(missing),
    }


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"[:300]


def _release(device: torch.device) -> None:
    """Frees the memory that a failed call left behind. Raises ``DeviceLost`` if the device no longer works."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLost(_reason(error)) from error


def run(benchmark: Benchmark, device: torch.device, minutes: float, seconds_per_figure: float) -> Document:
    """Measures the limits, then one case after the other until all cases are done or ``minutes`` have passed."""
    deadline = time.monotonic() + 60 * minutes
    dtypes = dict.fromkeys(getattr(torch, case.dtype) for case in benchmark.cases)
    limits = measure_limits(device, dtypes)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    timer = CudaTimer(seconds_per_figure)
    rows: list[Row] = []
    complete = True
    with tqdm(benchmark.cases, desc=benchmark.title, unit="case") as progress:
        for case in progress:
            if time.monotonic() > deadline:
                complete = False
                progress.write(f"{minutes:g} minutes have passed: the remaining cases are left out (--minutes)")
                break
            gc.collect()
            torch.cuda.empty_cache()
            num_sets = num_input_sets(benchmark.work(case).bytes, l2_bytes, torch.cuda.mem_get_info(device)[0])
            of_case: list[Row] = []
            try:
                for row in measure_case(benchmark, case, device, timer, limits, num_sets):
                    of_case.append(row)
                    progress.set_postfix_str(row["implementation"])
            except torch.cuda.OutOfMemoryError as error:
                complete = False
                progress.write(f"left out, does not fit into memory: {case} ({_reason(error)})")
            except DeviceLost as error:
                complete = False
                progress.write(f"the device is lost, the remaining cases are left out: {error}")
                break
            except Asked as error:
                complete = False
                progress.write(f"{error}: the remaining cases are left out")
                break
            finally:
                rows += results.with_ratios(of_case)
    return {
        "schema": results.SCHEMA,
        "benchmark": benchmark.name,
        "date": environment.now(),
        "commit": environment.commit(),
        "complete": complete,
        "environment": environment.describe_gpu(device),
        "limits": dataclasses.asdict(limits),
        "rows": rows,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all benchmarks share."""
    parser.add_argument("--full", action="store_true", help="the whole grid instead of the quick one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file, or into this folder")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the figures into this folder")
    parser.add_argument("--save", action="store_true", help="--json and --plot into benchmarks/results/<gpu>")
    parser.add_argument("--backend", choices=("cuda", "triton"), action="append", help="by default both")
    parser.add_argument("--peer", action="append", metavar="TEXT", help="peers with this in their name, or 'none'")
    parser.add_argument("--minutes", type=float, help="start no case after this time; by default 1.5, with --full 60")
    parser.add_argument("--seconds-per-figure", type=float, default=0.1, help="time over which a median is taken")


def chosen_peers(peers: Sequence[Implementation], wanted: Sequence[str] | None) -> list[Implementation]:
    """Returns the peers whose names contain one of ``wanted``, or all if it is None. No name contains "none"."""
    if wanted is None:
        return list(peers)
    return [peer for peer in peers if any(text.lower() in peer.name.lower() for text in wanted)]


def chosen_implementations(
    options: argparse.Namespace, prepare: Prepare, peers: Sequence[Implementation]
) -> list[Implementation]:
    """Returns the chosen implementations of fastattn, with ``prepare``, and the peers that the options keep."""
    own = own_implementations(prepare, options.backend or ("cuda", "triton"))
    return [*own, *chosen_peers(peers, options.peer)]


def report(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Runs the benchmark with these options, and shows and writes its results.

    Without a GPU it only prints the least work of each case.
    """
    if not benchmark.cases:
        raise SystemExit(
            f"{benchmark.title}: no case fits these options; leave out the options that choose cases, see --help"
        )
    if not torch.cuda.is_available():
        print(
            f"{benchmark.title}: no NVIDIA GPU here, so nothing is measured or written. The least work of each case:\n"
        )
        print(table.work_table(benchmark.cases, benchmark.work))
        return
    device = torch.device("cuda", torch.cuda.current_device())
    minutes = options.minutes if options.minutes is not None else 60.0 if options.full else 1.5
    with _ends_when_asked():
        document = run(benchmark, device, minutes, options.seconds_per_figure)
    print(table.as_text(document))
    for module, reason in broken.items():
        print(f"{module} is installed but cannot be imported, and so was not compared: {reason}")
    saved = results.FOLDER / results.folder_name(document["environment"]["gpu"])
    for folder in filter(None, (options.json, saved if options.save else None)):
        print(f"figures: {results.write(document, folder)}")
    for folder in filter(None, (options.plot, saved if options.save else None)):
        for path in plots.draw(document, folder):
            print(f"plot: {path}")
    if options.save:
        print("`python -m benchmarks page` brings the figures into docs/PERFORMANCE.md")
