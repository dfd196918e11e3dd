"""``fastattn.profile()``: which kernels ran, what each cost, how near to the machine's limits it came, and memory."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from fastattn.checks import expect
from fastattn.profiler.kernel_work import is_fastattn_kernel, kernel_work, short_name
from fastattn.profiler.limits import known_limits
from fastattn.profiler.roofline import Limits, bound
from fastattn.profiler.trace import (
    CpuOperator,
    KernelLaunch,
    MemoryPoint,
    Region,
    cpu_operators,
    kernel_launches,
    memory_regions,
    memory_timeline,
)

_REGION = "fastattn.region: "
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
_ROWS_SHOWN = 20


@dataclass(frozen=True)
class KernelProfile:
    """All launches of one kernel by one operator.

    Args:
        name: the kernel, with its template arguments.
        operator: ``torch.ops.fastattn``'s operator that launched it; ``""`` for a kernel of fastattn in the replay of a
            CUDA graph, None for kernels that are not fastattn's.
        launches: how many there were; seconds: the time they took on the GPU; share: of the time of all kernels.
        flops, bytes: what they had to do, see ``fastattn.profiler.work``; None where that cannot be told.
        is_upper_bound: lengths that only the device knows were taken at their largest.
        fraction: the least time that the machine's limits allow, over the time taken.
        resource: which limit that is: ``"compute"``, ``"memory"`` or ``"launch overhead"``.
    """

    name: str
    operator: str | None
    launches: int
    seconds: float
    share: float
    flops: int | None = None
    bytes: int | None = None
    is_upper_bound: bool = False
    fraction: float | None = None
    resource: str | None = None


def profile(trace: str | Path | None = None, *, limits: Limits | None = None) -> Profile:
    """Profile the ``with`` block: kernels, their share of the roofline, and memory.

    ::

        with fastattn.profile("trace.json") as profile:
            with profile.region("forward"):
                out = model(x)
        print(profile)

    Args:
        trace: where to write the Chrome trace (for chrome://tracing or https://ui.perfetto.dev); by default nowhere.
        limits: what the GPU can do, a ``fastattn.profiler.roofline.Limits``. By default measured once, after the block,
            which takes about a second.

    Returns:
        A ``Profile``. After the block ``str()`` of it is a table; ``kernels``, ``operators``, ``regions`` and
        ``memory`` hold the figures.

    Raises:
        InputError, TypeError: an argument is wrong.

    FLOPs and bytes come from the shapes that the operators were called with. Kernels in the replay of a CUDA graph are
    named and timed, but no operator tells their shapes. Without a GPU the block's operators are timed on the CPU.
    """
    return Profile(trace, limits)


class Profile:
    """What ``profile()`` saw. Times in seconds, memory in bytes.

    ``kernels``    of a GPU, longest first
    ``operators``  on the CPU, by their own time, longest first
    ``regions``    the memory of each region, on each device
    ``memory``     what was allocated, after every allocation and release
    ``limits``     what ``fraction`` refers to; None where no kernel of known work ran
    """

    def __init__(self, trace: str | Path | None, limits: Limits | None) -> None:
        self._trace_path = None if trace is None else Path(trace)
        if self._trace_path is not None:
            has_folder = self._trace_path.parent.is_dir()
            expect(has_folder, "trace", "a file in a folder that exists", str(self._trace_path))
        if limits is not None and not isinstance(limits, Limits):
            raise TypeError(f"limits: expected a fastattn.profiler.roofline.Limits, got {type(limits).__name__}")
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profiler.__exit__(kind, error, place)
        if error is None:
            self._read()

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Name a part of the block, whose memory is told by itself. Regions may be nested and repeated."""
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
            dtypes = [dtype for name, dtype in _TORCH_DTYPES.items() if name in used]
            if dtypes:
                self.limits = known_limits(torch.device("cuda", torch.cuda.current_device()), dtypes)
        self.kernels = profile_kernels(launches, self.limits)
        self.operators = cpu_operators(events)
        self.regions = memory_regions(events, _REGION)
        self.memory = memory_timeline(events)

    def __str__(self) -> str:
        parts = [kernel_table(self.kernels) if self.kernels else operator_table(self.operators)]
        if self.regions:
            parts.append(region_table(self.regions))
        return "\n\n".join(parts)


def profile_kernels(launches: Sequence[KernelLaunch], limits: Limits | None) -> list[KernelProfile]:
    """One entry for each kernel and operator, longest first."""
    groups: dict[tuple[str, str | None], list[KernelLaunch]] = {}
    for launch in launches:
        operator = launch.call.name if launch.call else "" if is_fastattn_kernel(launch.name) else None
        groups.setdefault((short_name(launch.name), operator), []).append(launch)
    total = sum(launch.seconds for launch in launches)
    found = [_kernel_profile(name, operator, group, total, limits) for (name, operator), group in groups.items()]
    return sorted(found, key=lambda each: -each.seconds)


def _kernel_profile(
    name: str, operator: str | None, launches: Sequence[KernelLaunch], total_s: float, limits: Limits | None
) -> KernelProfile:
    seconds = sum(launch.seconds for launch in launches)
    share = seconds / total_s if total_s else 0.0
    works = [None if launch.call is None else kernel_work(launch.name, launch.call) for launch in launches]
    known = [work for work in works if work is not None]
    if not known or len(known) < len(works):
        return KernelProfile(name, operator, len(launches), seconds, share)
    fraction = resource = None
    dtypes = [launch.call.dtype for launch in launches if launch.call is not None]
    if limits is not None and all(dtype in limits.flops_per_s for dtype in dtypes):
        # The kernel's own time has no launch in it: what is short is held against the least that a kernel takes.
        bounds = [bound(work, limits, dtype, limits.graph_launch_s) for work, dtype in zip(known, dtypes, strict=True)]
        fraction = sum(each.least_s for each in bounds) / seconds if seconds else None
        resource = max(bounds, key=lambda each: each.least_s).resource
    return KernelProfile(
        name,
        operator,
        len(launches),
        seconds,
        share,
        sum(work.flops for work in known),
        sum(work.bytes for work in known),
        any(work.is_upper_bound for work in known),
        fraction,
        resource,
    )


def kernel_table(kernels: Sequence[KernelProfile]) -> str:
    """The kernels as text; ``≤`` marks work that is an upper bound, ``–`` what cannot be told."""
    rows = [("kernel", "operator", "launches", "ms", "share", "GFLOP", "MB", "TFLOP/s", "GB/s", "of limit", "bound by")]
    for each in kernels[:_ROWS_SHOWN]:
        rows.append(
            (
                _shortened(each.name),
                {None: "(not fastattn)", "": "(CUDA graph)"}.get(each.operator, each.operator or ""),
                str(each.launches),
                f"{each.seconds * 1e3:.3f}",
                f"{each.share:.1%}",
                _number(each.flops, 1e9, each.is_upper_bound),
                _number(each.bytes, 1e6, each.is_upper_bound),
                _number(each.flops, 1e12 * each.seconds, each.is_upper_bound),
                _number(each.bytes, 1e9 * each.seconds, each.is_upper_bound),
                _number(each.fraction, 0.01, each.is_upper_bound, "%"),
                each.resource or "–",
            )
        )
    rest = kernels[_ROWS_SHOWN:]
    table = _aligned(rows)
    if rest:
        table += f"\n… and {len(rest)} more kernels, {sum(each.share for each in rest):.1%} of the time"
    return table


def operator_table(operators: Sequence[CpuOperator]) -> str:
    """Operators on the CPU as text."""
    total = sum(each.self_seconds for each in operators) or 1.0
    rows = [("operator", "calls", "own CPU ms", "share")]
    for each in operators[:_ROWS_SHOWN]:
        share = f"{each.self_seconds / total:.1%}"
        rows.append((_shortened(each.name), str(each.calls), f"{each.self_seconds * 1e3:.3f}", share))
    return "No kernel ran on a GPU; operators on the CPU:\n" + _aligned(rows)


def region_table(regions: Sequence[Region]) -> str:
    """The regions' memory as text, in MB (10^6 bytes)."""
    rows = [("region", "device", "allocated MB", "peak MB", "delta MB")]
    for each in regions:
        numbers = (f"{each.allocated / 1e6:.3f}", f"{each.peak / 1e6:.3f}", f"{each.delta / 1e6:+.3f}")
        rows.append((each.name, each.device, *numbers))
    return _aligned(rows)


def _number(value: float | None, unit: float, is_upper_bound: bool, suffix: str = "") -> str:
    if value is None or not unit:
        return "–"
    return f"{'≤' if is_upper_bound else ''}{value / unit:.1f}{suffix}"


def _shortened(name: str, width: int = 60) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"


_TEXT_COLUMNS = ("kernel", "operator", "region", "device", "bound by")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Text to the left, numbers to the right; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if title in _TEXT_COLUMNS else cell.rjust(width)
            for title, cell, width in zip(rows[0], row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
