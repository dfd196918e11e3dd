"""Says what each kernel of a profile cost, and how near it came to the machine's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastattn.profiler.kernel_names import is_fastattn_kernel, short_name
from fastattn.profiler.kernel_work import kernel_work
from fastattn.profiler.roofline import Limits, bound
from fastattn.profiler.trace import KernelLaunch


@dataclass(frozen=True)
class KernelProfile:
    """Holds the figures of one kernel, summed over all its launches by one operator.

    Args:
        name: the kernel, with its template arguments.
        operator: the name of the fastattn operator that launched the kernel; ``""`` for a kernel of fastattn in the
            replay of a CUDA graph, None for kernels that are not fastattn's.
        launches: the number of launches.
        seconds: the time that all launches took on the GPU.
        share: ``seconds`` as a fraction of the time of all kernels.
        flops, bytes: the work of all launches (see ``fastattn.profiler.work``), or None if it is unknown.
        is_upper_bound: whether lengths that only the device knows were counted at their largest.
        fraction: the least time that the machine's limits allow, divided by ``seconds``; None without limits or work.
        resource: the limit that binds: ``"compute"``, ``"memory"`` or ``"launch overhead"``.
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


def profile_kernels(launches: Sequence[KernelLaunch], limits: Limits | None) -> list[KernelProfile]:
    """Returns one entry for each kernel and operator, longest first."""
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
    needed = {dtype for work, dtype in zip(known, dtypes, strict=True) if work.flops}
    if limits is not None and needed <= limits.flops_per_s.keys():
        # A kernel's time excludes its launch, so its lower limit is the time of an empty kernel inside a graph.
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
