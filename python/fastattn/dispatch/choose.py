"""Chooses the backend and the kernel for a call that an operation has described as a ``Request``."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.autograd import forward_ad

from fastattn import native
from fastattn.checks import check_choice
from fastattn.dispatch import reasons
from fastattn.dispatch.device import facts, when_emulation_changes
from fastattn.dispatch.reasons import lacking_for_cuda, reason_against
from fastattn.dispatch.recording import is_recording
from fastattn.dispatch.request import Choice, Request
from fastattn.dispatch.support import KERNEL_BACKENDS, SUPPORT
from fastattn.dispatch.thread_state import Explained, asked, thread
from fastattn.dispatch.users_line import warn_at_users_line
from fastattn.errors import InputError

_choices: dict[Any, Choice] = {}
_MOST_CHOICES_KEPT = 4096
_warned: set[str] = set()


@when_emulation_changes
def _forget_choices() -> None:
    _choices.clear()


native.when_forced.append(_forget_choices)


def choose(request: Request) -> Choice:
    """Returns the backend and the kernel for ``request``.

    Warns if a call on a GPU runs in PyTorch unasked, or in Triton because this build or the driver lacks the CUDA C++
    kernel. Raises ``InputError`` if a forced backend cannot run the call, or if FASTATTN_FALLBACK=error forbids
    PyTorch. Inside of ``explaining()`` it raises ``Explained`` instead of returning.
    """
    if forward_ad._current_level >= 0 and request.only_torch is None:  # a kernel would drop the tangents silently
        request = request._replace(only_torch=reasons.FORWARD_MODE)
    key = (request, thread.forced, request.op.has_torch_sdpa and asked().sdpa)
    if torch.compiler.is_compiling():  # no cache: the compiled graph keeps the choice
        decided = _decide(*key)
        if decided.detour is not None:
            _announce(decided.detour)
        return decided
    is_hashable = True
    try:
        choice = _choices.get(key)
    except TypeError:  # a tracer's symbolic sizes cannot be hashed
        choice, is_hashable = None, False
    if choice is None:
        choice = _decide(*key)
        if len(_choices) >= _MOST_CHOICES_KEPT:
            _choices.clear()
        if is_hashable:
            _choices[key] = choice
    if thread.explaining:
        raise Explained(choice)
    if choice.detour is not None:
        _announce(choice.detour)
    if choice.lacking is not None and _fallback_mode() != "silent":
        _warn_once(f"fastattn runs Triton kernels here instead of its CUDA C++ ones: {choice.lacking}")
    return choice


def _fallback_mode() -> str:
    mode = os.environ.get("FASTATTN_FALLBACK", "warn")
    check_choice("FASTATTN_FALLBACK", mode, ("silent", "warn", "error"))
    return mode


def _announce(reason: str) -> None:
    """Raises or warns, as FASTATTN_FALLBACK says, because a call runs in PyTorch. A compiled graph does not warn."""
    mode = _fallback_mode()
    if mode == "error":
        raise InputError(f"this call would run in PyTorch, and FASTATTN_FALLBACK=error forbids that: {reason}")
    if mode == "warn" and not torch.compiler.is_compiling():
        _warn_once(f"fastattn runs this call in PyTorch: {reason}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warn_at_users_line(message, RuntimeWarning)


def _decide(request: Request, forced: str | None, torch_asked_for: bool) -> Choice:
    device_facts = facts(request.device)
    rejected: dict[str, str] = {}
    chosen = "torch"
    for backend in KERNEL_BACKENDS:
        reason = reason_against(backend, request, device_facts)
        if reason is None and forced is not None and forced != backend:
            reason = reasons.another_is_forced(forced)
        if reason is None and forced is None and torch_asked_for:
            reason = reasons.SDPA_KERNEL
        if reason is None and chosen != "torch":
            reason = reasons.another_comes_first(chosen, backend)
        if reason is None:
            chosen = backend
        else:
            rejected[backend] = reason
    if forced is not None and forced != chosen:
        forced_elsewhere = reasons.another_is_forced(forced)
        other = next(
            (f' use_backend("{name}") can.' for name, reason in rejected.items() if reason == forced_elsewhere), ""
        )
        raise InputError(f'use_backend("{forced}") cannot run this call: {rejected[forced]}{other}')
    if chosen == "torch":
        detour = None
        if device_facts is not None and forced is None and not torch_asked_for:
            found = reasons.each_once(rejected)
            detour = " ".join(f"{names}: {reason}" if len(found) > 1 else reason for names, reason in found.items())
        return Choice("torch", "PyTorch", request.op, rejected=rejected, detour=detour)
    assert device_facts is not None
    rejected["torch"] = reasons.A_KERNEL_RUNS
    seen = _with_kernel_dims(request, chosen)
    instead = request.op.instead(seen)
    if instead is not None and reason_against(chosen, instead, device_facts) is None:
        seen = instead
    kernel, tile = seen.op.name, None
    if not torch.compiler.is_compiling():  # a graph needs neither; choosing one would add guards on sizes
        kernel, tile = seen.op.kernel(chosen, seen, device_facts)
    dims = seen.head_dim, seen.value_dim
    padded = dims if dims != (request.head_dim, request.value_dim) else None
    lacking = lacking_for_cuda(request, device_facts) if chosen == "triton" and forced is None else None
    return Choice(chosen, kernel, seen.op, tile, rejected, None, padded, lacking)


def _with_kernel_dims(request: Request, backend: str) -> Request:
    """Returns the request with its head dims rounded up to those that the backend's kernels take."""
    support = SUPPORT[request.op.name][backend]
    head_dim, value_dim = (support.kernel_head_dim(dim) for dim in (request.head_dim, request.value_dim))
    assert head_dim is not None and value_dim is not None
    return request._replace(head_dim=head_dim, value_dim=value_dim)


def is_watched() -> bool:
    """Returns whether every call must pass ``choose``: a backend is forced, or ``explain`` or ``record`` is active."""
    return thread.forced is not None or thread.explaining or is_recording()
