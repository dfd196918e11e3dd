"""Records which kernels ran: ``fastattn.record()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class RecordedCall(NamedTuple):
    """Names the kernel that ran a call; ``fastattn.record()`` lists these."""

    op: str
    backend: str
    kernel: str


_recorders: list[list[RecordedCall]] = []


@contextlib.contextmanager
def record() -> Iterator[list[RecordedCall]]:
    """Collects ``(op, backend, kernel)`` of every fastattn call in the block, including backward passes, from all
    threads (autograd runs backward in threads of its own).

    An entry appears when the call has succeeded. A backward pass that runs several kernels names all of them,
    joined by " + ". Calls inside a compiled graph do not pass through Python and are not seen.
    """
    calls: list[RecordedCall] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # Compare by identity, because another recording's list may be equal.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not calls]


def is_recording() -> bool:
    """Returns whether a ``record()`` is active; False while torch.compile traces, because no kernel runs then."""
    return not torch.compiler.is_compiling() and bool(_recorders)


def note(op: str, backend: str, kernel: str) -> None:
    """Tells every ``record()`` what has run; call it after the kernel has run."""
    if not torch.compiler.is_compiling():
        for recorder in _recorders:
            recorder.append(RecordedCall(op, backend, kernel))
