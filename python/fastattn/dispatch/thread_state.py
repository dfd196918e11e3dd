"""Keeps what the current thread asks of the dispatcher: a certain backend, or an explanation instead of a result."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from fastattn.checks import check_choice
from fastattn.dispatch.request import Choice
from fastattn.dispatch.support import BACKENDS
from fastattn.dispatch.users_line import warn_at_users_line

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Explained(BaseException):
    """Carries the choice out of a call about which ``explain`` was asked, in place of the call's result.

    ``explain`` takes any function that calls fastattn somewhere inside, such as a module. Only an exception can leave
    it before a kernel runs or a tensor changes.
    """

    def __init__(self, choice: Choice) -> None:
        self.choice = choice


class Asked(NamedTuple):
    """Holds the user's wishes: a forced backend, and whether ``torch.nn.attention.sdpa_kernel`` selects PyTorch."""

    forced: str | None
    sdpa: bool


class _ThreadState(threading.local):
    def __init__(self) -> None:  # not class attributes: torch 2.11's dynamo would read those instead
        self.forced: str | None = None
        self.sdpa: bool | None = None  # None: torch's own switches decide
        self.explaining = False


thread = _ThreadState()


class use_backend:
    """A context manager that forces ``"cuda"``, ``"triton"`` or ``"torch"`` for this thread's calls inside the block.

    It can decorate a function too. Without ``with`` it has no effect, and warns. A call that the backend cannot run
    raises ``InputError`` with the reason. A backward pass uses the backend of its forward pass, wherever it runs. A
    checkpoint runs the forward pass again, on a GPU in autograd's own thread. To force the backend there too, pass it
    ``context_fn=lambda: (use_backend(backend), use_backend(backend))``.
    """

    def __init__(self, backend: str) -> None:
        check_choice("backend", backend, BACKENDS)
        self._backend, self._is_unused = backend, True
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        self._is_unused = False
        self._before.append(thread.forced)
        thread.forced = self._backend

    def __exit__(self, *error: object) -> None:
        thread.forced = self._before.pop()

    def __call__(self, function: _Function) -> _Function:
        self._is_unused = False

        @functools.wraps(function)
        def forced(*args: Any, **kwargs: Any) -> Any:
            with use_backend(self._backend):  # a new one for each call, as several threads may call
                return function(*args, **kwargs)

        return forced  # type: ignore[return-value]

    def __del__(self) -> None:
        if getattr(self, "_is_unused", False) and not sys.is_finalizing():
            call = f'use_backend("{self._backend}")'
            warn_at_users_line(f"{call} has no effect without a block: write `with {call}:` around calls", UserWarning)


def asked() -> Asked:
    """Returns this thread's current wishes.

    A backward pass that chooses again applies them by ``as_asked``: it runs in another thread, or after the block.
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
