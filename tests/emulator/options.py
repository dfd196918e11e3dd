"""How launches run that come from Triton or from a native library: for the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LaunchOptions:
    """As the parameters of `Module.launch` that have these names."""

    seed: int = 0
    checks: bool = True
    races: bool | None = None
    uninitialised: bool = False
    unawaited: bool = False
    log_writes: bool = False
    ordered_sums: bool = False
    strict_proxy_reads: bool = False
    wgmma_waits_by_warp: bool = False
    instruction_limit: int = 1 << 28
    workers: int = 2
    tracked: bool = False

    def of_launch(self) -> dict[str, Any]:
        """Keyword arguments of `Module.launch`."""
        return asdict(self)


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
