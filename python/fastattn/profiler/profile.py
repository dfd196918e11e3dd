"""Defines ``fastattn.profile()``, which reports memory, kernels, and how near the kernels came to the GPU's limits."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastattn.checks import expect, type_name
from fastattn.profiler.kernels import KernelProfile, profile_kernels
from fastattn.profiler.limits import known_limits
from fastattn.profiler.roofline import Limits
from fastattn.profiler.tables import kernel_table, operator_table, region_table
from fastattn.profiler.trace import (
    CpuOperator,
    MemoryPoint,
    Region,
    cpu_operators,
    kernel_launches,
    memory_regions,
    memory_timeline,
)

_REGION = "fastattn.region: "
_NO_GPU = "No kernel ran on a GPU; operators on the CPU:"
_NO_KERNELS = "No kernel was recorded: none ran on a GPU, or CUPTI is missing; operators on the CPU:"
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def profile(trace: str | Path | None = None, *, limits: Limits | None = None) -> Profile:
    """Profiles the ``with`` block: memory, kernels, and how near the kernels came to the roofline.

    ::

        with fastattn.profile("trace.json") as profile:
            with profile.region("forward"):
                out = model(x)
        print(profile)

    Args:
        trace: where to write the Chrome trace (for chrome://tracing or https://ui.perfetto.dev); by default nowhere.
        limits: the GPU's limits, a ``fastattn.profiler.roofline.Limits``. By default fastattn measures the limits
            after the block, the first time that a device and its dtypes are profiled, which takes about a second.

    Returns:
        A ``Profile``. After the block ``str()`` of it is a table; ``kernels``, ``operators``, ``regions`` and
        ``memory`` hold the figures.

    Raises:
        InputError: the folder of ``trace`` does not exist.
        TypeError: ``limits`` is not a ``Limits``.

    FLOPs and bytes follow from the shapes of the operators' arguments. Kernels in the replay of a CUDA graph are named
    and timed, but their work is unknown, because the trace has no operator calls for them. Without a GPU, the profile
    times the operators on the CPU.
    """
    return Profile(trace, limits)


class Profile:
    """Holds the figures that ``profile()`` has gathered, with times in seconds and memory in bytes.

    ``kernels``    the kernels of a GPU, longest first
    ``operators``  the operators on the CPU, by their own time, longest first
    ``regions``    the memory of each region, on each device
    ``memory``     the allocated bytes after every allocation and release
    ``limits``     the limits to which ``fraction`` refers, or None if no kernel of known work ran
    """

    def __init__(self, trace: str | Path | None, limits: Limits | None) -> None:
        self._trace_path = None if trace is None else Path(trace)
        if self._trace_path is not None:
            has_folder = self._trace_path.parent.is_dir()
            came = f"{self._trace_path}; create {self._trace_path.parent} first"
            expect(has_folder, "trace", "a file in a folder that exists", came)
        if limits is not None and not isinstance(limits, Limits):
            came = f"{type_name(limits)}; fastattn.profiler.limits.measure_limits(device, dtypes) returns one"
            raise TypeError(f"limits: expected a fastattn.profiler.roofline.Limits, got {came}")
        self.limits = limits
        self.kernels: list[KernelProfile] = []
        self.operators: list[CpuOperator] = []
        self.regions: list[Region] = []
        self.memory: list[MemoryPoint] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)

    def __enter__(self) -> Profile:
        self._profiler.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.__exit__(kind, error, traceback)
        if error is None:
            self._read()

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Names a region of the block, whose memory is reported separately. Regions may be nested and repeated."""
        with torch.profiler.record_function(_REGION + name):
            yield

    def _read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = self._trace_path or Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        launches = kernel_launches(events)
        if self.limits is None and torch.cuda.is_available():
            used = {launch.call.dtype for launch in launches if launch.call is not None}
            dtypes = tuple(dtype for name, dtype in _TORCH_DTYPES.items() if name in used)
            if used:
                self.limits = known_limits(torch.device("cuda", torch.cuda.current_device()), dtypes)
        self.kernels = profile_kernels(launches, self.limits)
        self.operators = cpu_operators(events)
        self.regions = memory_regions(events, _REGION)
        self.memory = memory_timeline(events)

    def __str__(self) -> str:
        if self.kernels:
            parts = [kernel_table(self.kernels)]
        else:
            title = _NO_KERNELS if torch.cuda.is_available() else _NO_GPU
            parts = [f"{title}\n{operator_table(self.operators)}"]
        if self.regions:
            parts.append(region_table(self.regions))
        return "\n\n".join(parts)
