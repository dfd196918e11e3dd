"""Every launch that the emulator runs, for those who listen: profiles, tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from emulator.report import Report


@dataclass(frozen=True)
class Launched:
    """One launch and what it counted. ``ptx`` is the text of its module."""

    report: Report
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


_listeners: list[list[Launched]] = []


def note(launched: Launched) -> None:
    """A launch has ended, whichever way it came."""
    for found in _listeners:
        found.append(launched)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """``with recorded() as found:`` lists the launches that end within, of all threads. May be nested."""
    found: list[Launched] = []
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners[:] = [other for other in _listeners if other is not found]
