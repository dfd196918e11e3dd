"""Reads kernels, the operators that launched them, CPU times and memory from a Chrome trace of ``torch.profiler``.

The format is that of ``profile.export_chrome_trace`` with ``record_shapes`` and ``profile_memory``: complete events
(``"ph": "X"``) of the categories ``cpu_op``, ``user_annotation``, ``cuda_runtime``, ``cuda_driver`` and ``kernel``,
with times in microseconds, and instant events ``[memory]``.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastattn.profiler.operator_calls import OperatorCall, operator_call

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_DEVICES = {0: "cpu", 1: "cuda"}


class KernelLaunch(NamedTuple):
    """Describes a kernel that ran. ``call`` is the fastattn operator that launched it, or None if none is known."""

    name: str
    seconds: float
    call: OperatorCall | None


class CpuOperator(NamedTuple):
    """Holds the calls of one operator on the CPU; ``self_seconds`` leaves out the operators that it called."""

    name: str
    calls: int
    self_seconds: float


class MemoryPoint(NamedTuple):
    """Holds the bytes that are allocated on ``device`` from ``time_s`` on, and their change at that time.

    On a GPU, ``allocated`` counts all bytes that torch has allocated. On the CPU, it counts only bytes allocated since
    the profile began.
    """

    time_s: float
    device: str
    allocated: int
    change: int


@dataclass(frozen=True)
class Region:
    """Holds the memory of one device over a region, in bytes: at the start, at the peak, and end minus start."""

    name: str
    device: str
    allocated: int
    peak: int
    delta: int


def kernel_launches(events: Sequence[dict[str, Any]]) -> list[KernelLaunch]:
    """Returns every kernel, copy and fill of the trace, in the order of the trace."""
    calls = _OperatorCalls(events)
    launched = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCHES and "correlation" in e["args"]}
    by_external_id = {e["args"]["External id"]: e for e in _complete(events, "cpu_op") if "External id" in e["args"]}
    result = []
    for event in events:
        if event.get("cat") not in _DEVICE_WORK or event.get("ph") != "X":
            continue
        ids = event["args"]
        # Take the operator around the launch. If the trace lacks the launch, take the one that the profiler noted.
        causes = (launched.get(ids.get("correlation")), by_external_id.get(ids.get("External id")))
        call = next((found for cause in causes if cause and (found := calls.around(cause))), None)
        result.append(KernelLaunch(event["name"], event["dur"] * 1e-6, call))
    return result


class _OperatorCalls:
    """Finds the fastattn operator that was running on an event's thread when the event happened."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self._by_thread: dict[Any, list[tuple[float, float, OperatorCall]]] = defaultdict(list)
        for event in _complete(events, "cpu_op"):
            args = event["args"]
            call = operator_call(
                event["name"], args.get("Input Dims", ()), args.get("Input type", ()), args.get("Concrete Inputs", ())
            )
            if call is not None:
                self._by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"], call))
        for calls in self._by_thread.values():
            calls.sort(key=lambda each: each[0])

    def around(self, event: dict[str, Any]) -> OperatorCall | None:
        calls = self._by_thread.get(event["tid"], [])
        index = bisect.bisect_right(calls, event["ts"], key=lambda each: each[0]) - 1
        return calls[index][2] if index >= 0 and event["ts"] <= calls[index][1] else None


def cpu_operators(events: Sequence[dict[str, Any]]) -> list[CpuOperator]:
    """Returns the operators that ran on the CPU, longest self time first."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    by_thread = defaultdict(list)
    for event in _complete(events, "cpu_op"):
        by_thread[event["tid"]].append(event)
    for events_of_thread in by_thread.values():
        inside: list[dict[str, Any]] = []  # the operators around the current one
        for event in sorted(events_of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while inside and event["ts"] >= inside[-1]["ts"] + inside[-1]["dur"]:
                inside.pop()
            if inside:
                seconds[inside[-1]["name"]] -= event["dur"] * 1e-6
            calls[event["name"]] += 1
            seconds[event["name"]] += event["dur"] * 1e-6
            inside.append(event)
    found = [CpuOperator(name, calls[name], seconds[name]) for name in calls]
    return sorted(found, key=lambda each: -each.self_seconds)


def memory_timeline(events: Sequence[dict[str, Any]]) -> list[MemoryPoint]:
    """Returns the allocated bytes of each device after each allocation and release, in the order of time."""
    points = [
        MemoryPoint(e["ts"] * 1e-6, _DEVICES[args["Device Type"]], args["Total Allocated"], args["Bytes"])
        for e in events
        if e.get("name") == "[memory]" and (args := e["args"]).get("Device Type") in _DEVICES
    ]
    return sorted(points, key=lambda point: point.time_s)


def memory_regions(events: Sequence[dict[str, Any]], prefix: str) -> list[Region]:
    """Returns the regions that ``record_function(prefix + name)`` marks, for every device that allocated anything."""
    by_device: dict[str, list[MemoryPoint]] = defaultdict(list)
    for point in memory_timeline(events):
        by_device[point.device].append(point)
    result = []
    for event in sorted(_complete(events, "user_annotation"), key=lambda e: e["ts"]):
        if not event["name"].startswith(prefix):
            continue
        start, end = event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6
        for device, timeline in sorted(by_device.items()):
            before = [point.allocated for point in timeline if point.time_s < start]
            during = [point.allocated for point in timeline if start <= point.time_s <= end]
            first = before[-1] if before else timeline[0].allocated - timeline[0].change
            last = during[-1] if during else first
            name = event["name"].removeprefix(prefix)
            result.append(Region(name, device, first, max([first, *during]), last - first))
    return result


def _complete(events: Iterable[dict[str, Any]], category: str) -> Iterator[dict[str, Any]]:
    return (event for event in events if event.get("cat") == category and event.get("ph") == "X")
