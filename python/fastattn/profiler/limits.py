"""Measures the limits of a GPU, with which the profiler compares each kernel."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable

import torch

from fastattn.errors import InputError
from fastattn.profiler.roofline import Limits

_COPY_BYTES = 1 << 30
_MATMUL_SIZE = 8192
_LAUNCHES_PER_GRAPH = 100


def median_seconds(call: Callable[[], object], samples: int = 20) -> float:
    """Returns the median time between CUDA events before and after ``call`` on the current stream."""
    for _ in range(5):  # warm up
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e-3


def measure_limits(device: torch.device, dtypes: Iterable[torch.dtype]) -> Limits:
    """Measures copy bandwidth, matmul throughput in each of ``dtypes`` and launch times of a CUDA device, in about a
    second.

    The copy moves 1 GiB (less if memory is short) and counts reads and writes. The matmul is 8192 x 8192 x 8192 on
    random numbers, because a GPU computes zeros faster than real data. Raises ``InputError`` for a device that is not
    CUDA.
    """
    if device.type != "cuda":
        raise InputError(f'device: expected a CUDA device, such as torch.device("cuda"), got {device}')
    with torch.cuda.device(device), torch.no_grad():
        free, _ = torch.cuda.mem_get_info()
        source = torch.empty(min(_COPY_BYTES, free // 8), dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        copy_s = median_seconds(lambda: target.copy_(source))
        bytes_per_s = 2 * source.nbytes / copy_s
        flops_per_s = {str(dtype).removeprefix("torch."): _matmul_flops_per_s(device, dtype) for dtype in dtypes}
        eager_launch_s, graph_launch_s = _launch_seconds(device)
    return Limits(bytes_per_s, flops_per_s, eager_launch_s, graph_launch_s)


known_limits = functools.cache(measure_limits)  # measured once per device and tuple of dtypes


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    if dtype == torch.int8:
        a, b = (torch.randint(-127, 128, (_MATMUL_SIZE,) * 2, device=device, dtype=dtype) for _ in range(2))
        sums = torch.empty_like(a, dtype=torch.int32)
        return 2 * _MATMUL_SIZE**3 / median_seconds(lambda: torch._int_mm(a, b.t(), out=sums))
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _MATMUL_SIZE**3 / median_seconds(lambda: torch.mm(a, b, out=out))


def _launch_seconds(device: torch.device) -> tuple[float, float]:
    """Returns the seconds that a minimal kernel takes: launched by itself, and as one of many in a CUDA graph."""
    counter = torch.zeros(1, device=device)
    eager_s = median_seconds(lambda: counter.add_(1), samples=100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES_PER_GRAPH):
            counter.add_(1)
    return eager_s, median_seconds(graph.replay) / _LAUNCHES_PER_GRAPH
