"""Times calls on a GPU: chooses the numbers of samples and of input sets, and summarises the samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]

WARM_UP_S = 0.05
FEWEST_SAMPLES, MOST_SAMPLES = 11, 201
MOST_SETS = 128


class Timing(NamedTuple):
    """Holds the median of ``samples`` measurements and their quartiles."""

    median_s: float
    lower_s: float
    upper_s: float
    samples: int


def summarize(seconds: Sequence[float]) -> Timing:
    """Returns the interpolated median and quartiles. Raises ``ValueError`` without times or if one is not positive."""
    if not seconds or min(seconds) <= 0:
        raise ValueError(f"expected positive times, got {list(seconds)}")
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median, lower, upper, len(seconds))


def num_samples(estimate_s: float, budget_s: float) -> int:
    """Returns how many calls of about ``estimate_s`` to time so that they take about ``budget_s``: 11 to 201."""
    return min(max(int(budget_s / estimate_s), FEWEST_SAMPLES), MOST_SAMPLES)


def num_input_sets(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Returns how many sets of inputs to alternate between, so that no set is still in the L2 from its last use.

    Together the sets take at least twice the L2, but at most half of the free memory: at least 2 sets if they fit, and
    at most 128.
    """
    wanted = max(math.ceil(2 * l2_bytes / max(set_bytes, 1)), 2)
    fitting = max(free_bytes // (2 * max(set_bytes, 1)), 1)
    return min(wanted, fitting, MOST_SETS)


class CudaTimer:
    """Times calls on the current CUDA device; one figure may take about ``budget_s`` seconds."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s

    def eager(self, calls: Sequence[Call]) -> Timing:
        """Times single calls, each with its launch, alternating between ``calls``."""
        estimate_s = self._warm_up(calls)
        samples = num_samples(estimate_s, self.budget_s)
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
        for index, (start, end) in enumerate(events):
            call = calls[index % len(calls)]
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return summarize([start.elapsed_time(end) * 1e-3 for start, end in events])

    def graph(self, calls: Sequence[Call]) -> Timing:
        """Times a call as part of a CUDA graph of all ``calls``: without the cost of a launch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # first runs may allocate or compile, which must not happen in the capture
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        whole = self.eager([graph.replay])
        count = len(calls)
        return Timing(whole.median_s / count, whole.lower_s / count, whole.upper_s / count, whole.samples)

    def peak_bytes(self, call: Call) -> int:
        """Returns the peak number of bytes that a call allocates, its result included."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del kept
        return peak

    def _warm_up(self, calls: Sequence[Call]) -> float:
        """Runs every call once, then all of them until clocks and caches have settled; returns one call's time."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        done, spent_s = 0, 0.0
        while spent_s < WARM_UP_S:
            start.record()
            for call in calls:
                call()
            end.record()
            end.synchronize()
            done += len(calls)
            spent_s += start.elapsed_time(end) * 1e-3
        return spent_s / done
