"""The options of launches: of one `Module.launch`, or of all launches of Triton and of native libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LaunchOptions:
    """How a launch runs, and which mistakes are errors. A C++ struct of the same name has the same fields.

    ``seed`` determines the order of CTAs and warps and the moments of asynchronous operations. A warp that executes
    more than ``instruction_limit`` instructions is an error. ``workers`` is the number of host threads.
    ``starved_warp``: in each CTA, the warp of this index runs rarely while others can run; -1: none.

    ``checks``: accesses outside the allocations that a launch knows are errors; with ``tracked`` it also knows those
    that `allocations` tracks. ``races`` (None: as ``checks``): conflicting accesses to shared or global memory that
    nothing orders are errors, in whatever order they occurred. ``ordered_sums``: so are atomics and bulk reductions
    that add floating-point numbers to the same bytes in no fixed order. ``strict_proxy_reads``: so is a copy of the
    async proxy that overwrites what threads have read without a proxy fence. ``wgmma_waits_by_warp``: a wait for wgmma
    covers only the waiting warp's part, not the warpgroup's. ``uninitialised``: reading shared memory that nothing
    wrote is an error. ``unawaited``: it is an error, not only a warning in the report, if a CTA ends with arrivals at a
    barrier that nobody waited for. ``log_writes``: the report lists the writes of threads to global memory.
    """

    seed: int = 0
    checks: bool = True
    tracked: bool = False
    races: bool | None = None
    ordered_sums: bool = False
    strict_proxy_reads: bool = False
    wgmma_waits_by_warp: bool = False
    uninitialised: bool = False
    unawaited: bool = False
    log_writes: bool = False
    starved_warp: int = -1
    instruction_limit: int = 1 << 28
    workers: int = 2

    def resolved(self) -> dict[str, Any]:
        """Returns the fields for the C++ library, where ``races`` is not None."""
        return {**asdict(self), "races": self.checks if self.races is None else self.races}


# Checks that our kernels and Triton's pass, but CUTLASS's pipelines do not.
STRICT = {"strict_proxy_reads": True, "wgmma_waits_by_warp": True}

_current = LaunchOptions()
_listeners: list[Callable[[LaunchOptions], None]] = []


def current() -> LaunchOptions:
    """Returns the options that are in force."""
    return _current


def when_changed(tell: Callable[[LaunchOptions], None]) -> None:
    """Calls ``tell`` with the options in force, now and after every change."""
    _listeners.append(tell)
    tell(_current)


def _set(options: LaunchOptions) -> None:
    global _current
    _current = options
    for tell in _listeners:
        tell(options)


def start(**changes: Any) -> None:
    """Changes these fields of `LaunchOptions` for the rest of the process."""
    _set(replace(_current, **changes))


@contextlib.contextmanager
def launching(**changes: Any) -> Iterator[None]:
    """Changes these fields of `LaunchOptions` for the launches of all threads within the block."""
    before = _current
    _set(replace(before, **changes))
    try:
        yield
    finally:
        _set(before)
