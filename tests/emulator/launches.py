"""Reports every launch of the emulator to listeners, such as profiles and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from emulator.report import Report


@dataclass(frozen=True)
class Launched:
    """A launch and its report. ``ptx`` is the text of its module; ``grid`` is in CTAs, ``block`` in threads."""

    report: Report
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


_listeners: list[Callable[[Launched], None]] = []
_switches: list[Callable[[bool], None]] = []


def when_heard(switch: Callable[[bool], None]) -> None:
    """Calls ``switch`` with the value of `is_heard`, now and after every change. The C++ library then creates reports,
    which have thousands of rows, only while somebody listens."""
    _switches.append(switch)
    switch(is_heard())


def is_heard() -> bool:
    """Returns True if there is a listener."""
    return bool(_listeners)


def _tell_switches() -> None:
    for switch in _switches:
        switch(is_heard())


def note(launched: Launched) -> None:
    """Tells the listeners of a launch that has ended. All ways to launch a kernel call this."""
    for tell in _listeners:
        tell(launched)


@contextlib.contextmanager
def told(tell: Callable[[Launched], None]) -> Iterator[None]:
    """Calls ``tell`` after each launch of any thread within the block, also between the runs of a replayed launch.
    May be nested.
    """
    _listeners.append(tell)
    _tell_switches()
    try:
        yield
    finally:
        _listeners.remove(tell)
        _tell_switches()


_left_out: list[str] = []


def leave_out(part: str) -> None:
    """Makes `recorded` leave out kernels whose names contain ``part``."""
    _left_out.append(part)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """Yields a list that collects the launches of all threads that end within the block. May be nested."""
    found: list[Launched] = []

    def add(launched: Launched) -> None:
        if not any(part in launched.report.kernel for part in _left_out):
            found.append(launched)

    with told(add):
        yield found
