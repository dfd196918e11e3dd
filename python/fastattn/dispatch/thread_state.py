"""What the current thread has asked of the dispatcher: a backend, or an explanation instead of a result."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fastattn.checks import check_choice
from fastattn.dispatch.call import Choice
from fastattn.dispatch.support import BACKENDS


class Explained(BaseException):
    """Carries the choice out of a call that only was to be explained."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


class NoKernel(Exception):
    """No kernel takes a call that came from an operator of torch's own: torch is to run what it ran before."""


class Asked(NamedTuple):
    """The user asks for this where a call is made: a backend, and PyTorch by ``torch.nn.attention.sdpa_kernel``."""

    forced: str | None
    sdpa: bool


class _ThreadState(threading.local):
    def __init__(self) -> None:  # of each thread; torch 2.11's dynamo reads an attribute of the class before a thread's
        self.forced: str | None = None
        self.sdpa: bool | None = None  # None: as torch's switches stand
        self.explaining = False
        self.serving_torch = False


thread = _ThreadState()


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Force ``"cuda"``, ``"triton"`` or ``"torch"`` for the calls of this thread inside the block.

    A call which that backend cannot run raises ``InputError`` with the reason. A backward pass uses what its forward
    chose, wherever it runs. A checkpoint calls the forward again, on a GPU from autograd's own thread: its
    ``context_fn=lambda: (use_backend(backend), use_backend(backend))`` forces the backend there, too.
    """
    check_choice("backend", backend, BACKENDS)
    before = thread.forced
    thread.forced = backend
    try:
        yield
    finally:
        thread.forced = before


def asked() -> Asked:
    """Returns what is asked for here and now.

    Backward passes that choose again need it, in another thread or behind the block.
    """
    c = torch._C
    sdpa = not (c._get_flash_sdp_enabled() and c._get_mem_efficient_sdp_enabled() and c._get_math_sdp_enabled())
    return Asked(thread.forced, sdpa if thread.sdpa is None else thread.sdpa)


@contextlib.contextmanager
def as_asked(before: Asked) -> Iterator[None]:
    """Inside, calls of this thread choose as one did where that was asked for."""
    own = thread.forced, thread.sdpa
    thread.forced, thread.sdpa = before
    try:
        yield
    finally:
        thread.forced, thread.sdpa = own


@contextlib.contextmanager
def explaining() -> Iterator[None]:
    """Inside, ``choose`` raises ``Explained`` instead of returning."""
    before = thread.explaining
    thread.explaining = True
    try:
        yield
    finally:
        thread.explaining = before


@contextlib.contextmanager
def serving_torch() -> Iterator[None]:
    """Inside, calls come from an operator of torch's own, which must not come back to itself.

    ``choose`` raises ``NoKernel`` where it would choose PyTorch. What ``torch.nn.attention.sdpa_kernel`` selects does
    not count: torch has looked at it already.
    """
    before = thread.serving_torch
    thread.serving_torch = True
    try:
        yield
    finally:
        thread.serving_torch = before


def is_explaining() -> bool:
    """Whether this call will raise ``Explained`` where it chooses: then nothing may be changed on the way there."""
    return thread.explaining
