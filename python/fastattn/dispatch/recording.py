"""Which kernels ran: ``fastattn.record()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class RecordedCall(NamedTuple):
    """One entry of ``fastattn.record()``."""

    op: str
    backend: str
    kernel: str


_recorders: list[list[RecordedCall]] = []


@contextlib.contextmanager
def record() -> Iterator[list[RecordedCall]]:
    """Collect ``(op, backend, kernel)`` of every fastattn call in the block, backward passes included, from all
    threads (autograd runs backward in threads of its own).

    An entry appears when the call has succeeded. A backward pass that runs several kernels names all of them,
    joined by " + ". Calls inside a compiled graph do not pass through Python and are not seen.
    """
    calls: list[RecordedCall] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        # By identity: two recordings that hold equal lists are still two.
        _recorders[:] = [recorder for recorder in _recorders if recorder is not calls]


def is_recording() -> bool:
    """Whether a ``record()`` wants to know what runs. Never while torch.compile traces: nothing runs then."""
    return not torch.compiler.is_compiling() and bool(_recorders)


def note(op: str, backend: str, kernel: str) -> None:
    """Tell every ``record()`` what has run: to be called after it did."""
    if not torch.compiler.is_compiling():
        for recorder in _recorders:
            recorder.append(RecordedCall(op, backend, kernel))
