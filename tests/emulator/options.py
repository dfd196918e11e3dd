"""How launches run, and what they are checked for: one of `Module.launch`, or all of Triton and of native libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LaunchOptions:
    """How a launch runs, and which of its mistakes are errors. The emulator's C++ has a struct of the same fields.

    ``seed`` decides in which order CTAs and warps run, and when asynchronous operations take place. A warp that
    executes more than ``instruction_limit`` instructions is an error. ``workers`` is the number of the host's threads.

    ``checks``: accesses outside the allocations that a launch knows are errors; with ``tracked`` it also knows those
    that `allocations` tracks. ``races`` (None: as ``checks``): conflicting accesses to shared or global memory that
    nothing orders are errors, whatever order they came in. With ``ordered_sums``, so are atomics and bulk reductions
    that add floating numbers to the same bytes in no certain order; with ``strict_proxy_reads``, so is a copy of the
    async proxy over what threads have read without a proxy fence. ``uninitialised``: reading shared memory that
    nothing wrote is an error. ``unawaited``: a CTA that ends with threads arrived at a barrier that nobody waited for
    is an error; otherwise the report warns of it. ``wgmma_waits_by_warp``: a warp that has waited for wgmma knows that
    its own part is over, not that of the warpgroup. ``log_writes``: the report lists the writes of threads to global
    memory. ``starved_warp``: a warp of each CTA that seldom runs but where nothing else can.
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
        """Returns the fields as the emulator's C++ takes them."""
        return {**asdict(self), "races": self.checks if self.races is None else self.races}


# What CUTLASS's pipelines do not hold, but our kernels and Triton's.
STRICT = {"strict_proxy_reads": True, "wgmma_waits_by_warp": True}

_current = LaunchOptions()
_listeners: list[Callable[[LaunchOptions], None]] = []


def current() -> LaunchOptions:
    """What is in force."""
    return _current


def when_changed(tell: Callable[[LaunchOptions], None]) -> None:
    """Have ``tell`` called with the options in force, now and after every change."""
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
    """Within, launches run with these fields of `LaunchOptions` changed, in every thread."""
    before = _current
    _set(replace(before, **changes))
    try:
        yield
    finally:
        _set(before)
