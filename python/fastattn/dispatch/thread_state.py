"""Keeps what the current thread asks of the dispatcher: a certain backend, or an explanation instead of a result."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fastattn.checks import check_choice
from fastattn.dispatch.request import Choice
from fastattn.dispatch.support import BACKENDS


class Explained(BaseException):
    """Carries the choice out of a call that is only explained, not run.

    ``explain`` takes any function that leads to one of ours, as ``torch.vmap`` and modules do: nothing but an exception
    leaves it before it runs or changes something.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


class Asked(NamedTuple):
    """Holds what the user asks for at a call: a forced backend, and PyTorch by ``torch.nn.attention.sdpa_kernel``."""

    forced: str | None
    sdpa: bool


class _ThreadState(threading.local):
    def __init__(self) -> None:  # not class attributes, which torch 2.11's dynamo reads before those of the thread
        self.forced: str | None = None
        self.sdpa: bool | None = None  # None: torch's own switches say it
        self.explaining = False


thread = _ThreadState()


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Forces ``"cuda"``, ``"triton"`` or ``"torch"`` for the calls of this thread inside the block.

    A call that the backend cannot run raises ``InputError`` with the reason. A backward pass uses the backend of its
    forward pass, wherever it runs. A checkpoint calls the forward again, on a GPU from autograd's own thread: pass it
    ``context_fn=lambda: (use_backend(backend), use_backend(backend))`` to force the backend there, too.
    """
    check_choice("backend", backend, BACKENDS)
    before = thread.forced
    thread.forced = backend
    try:
        yield
    finally:
        thread.forced = before


def asked() -> Asked:
    """Returns what this thread asks for now.

    Backward passes that choose again need it, as they run in another thread or after the block.
    """
    c = torch._C
    sdpa = not (c._get_flash_sdp_enabled() and c._get_mem_efficient_sdp_enabled() and c._get_math_sdp_enabled())
    return Asked(thread.forced, sdpa if thread.sdpa is None else thread.sdpa)


@contextlib.contextmanager
def as_asked(before: Asked) -> Iterator[None]:
    """Applies what another thread asked for, ``before``, to this thread's calls inside the block."""
    own = thread.forced, thread.sdpa
    thread.forced, thread.sdpa = before
    try:
        yield
    finally:
        thread.forced, thread.sdpa = own


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Makes ``choose`` raise ``Explained`` inside the block instead of returning."""
    before = thread.explaining
    thread.explaining = True
    try:
        yield
    finally:
        thread.explaining = before
