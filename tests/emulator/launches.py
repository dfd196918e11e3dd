"""Every launch that the emulator runs, for those who listen: profiles, tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from emulator.report import Report


@dataclass(frozen=True)
class Launched:
    """One launch and what it counted. ``ptx`` is the text of its module."""

    report: Report
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


_listeners: list[Callable[[Launched], None]] = []
_switches: list[Callable[[bool], None]] = []


def when_heard(switch: Callable[[bool], None]) -> None:
    """Have ``switch`` called with whether anyone listens, now and after every change: what a launch counted is
    thousands of rows, which nobody need make of it otherwise."""
    _switches.append(switch)
    switch(is_heard())


def is_heard() -> bool:
    """Whether anyone listens."""
    return bool(_listeners)


def _tell_switches() -> None:
    for switch in _switches:
        switch(is_heard())


def note(launched: Launched) -> None:
    """A launch has ended, whichever way it came."""
    for tell in _listeners:
        tell(launched)


@contextlib.contextmanager
def told(tell: Callable[[Launched], None]) -> Iterator[None]:
    """Within, ``tell`` is called after each launch, of all threads, and before the next run of one that is replayed.
    May be nested.
    """
    _listeners.append(tell)
    _tell_switches()
    try:
        yield
    finally:
        _listeners.remove(tell)
        _tell_switches()


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """``with recorded() as found:`` lists the launches that end within, of all threads. May be nested."""
    found: list[Launched] = []
    with told(found.append):
        yield found
