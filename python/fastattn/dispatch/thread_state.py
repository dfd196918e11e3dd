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
    """Carries the choice out of a function that ``explain`` calls.

    The function may be any code that calls fastattn somewhere inside, such as a module. Only an exception can leave
    that code before a kernel runs or a tensor changes.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


class Asked(NamedTuple):
    """Holds the user's wishes: a forced backend, and whether ``torch.nn.attention.sdpa_kernel`` selects PyTorch."""

    forced: str | None
    sdpa: bool


class _ThreadState(threading.local):
    def __init__(self) -> None:  # not in the class: torch 2.11's dynamo would read the class attributes
        self.forced: str | None = None
        self.sdpa: bool | None = None  # None: torch's own switches decide
        self.explaining = False


thread = _ThreadState()


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Forces ``"cuda"``, ``"triton"`` or ``"torch"`` for the calls of this thread inside the block.

    ``use_backend`` can also decorate a function. A bare call, without ``with``, has no effect. A call that the backend
    cannot run raises ``InputError`` with the reason.

    A backward pass uses the backend of its forward pass, in any thread and also after the block. But
    ``torch.utils.checkpoint`` runs the forward pass again: on a GPU in autograd's own thread, where the block has no
    effect. To force the backend there too, pass ``context_fn=lambda: (use_backend(backend), use_backend(backend))`` to
    ``checkpoint``.
    """
    check_choice("backend", backend, BACKENDS)
    before = thread.forced
    thread.forced = backend
    try:
        yield
    finally:
        thread.forced = before


def asked() -> Asked:
    """Returns this thread's current wishes.

    A backward pass that chooses a backend itself applies its forward pass's wishes with ``as_asked``, because it runs
    in another thread or after the user's ``with`` block.
    """
    c = torch._C
    sdpa = not (c._get_flash_sdp_enabled() and c._get_mem_efficient_sdp_enabled() and c._get_math_sdp_enabled())
    return Asked(thread.forced, sdpa if thread.sdpa is None else thread.sdpa)


@contextlib.contextmanager
def as_asked(before: Asked) -> Iterator[None]:
    """Applies the wishes ``before``, which ``asked`` returned earlier, to this thread's calls inside the block."""
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
