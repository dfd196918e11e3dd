"""Tracks torch's CPU allocations and puts red zones around them, so that launches know which memory they may touch.

    with allocations.tracked():
        x = torch.randn(100)
        module.launch("kernel", args=[x.data_ptr(), …], tracked=True)

Within the block, the memory of every new tensor lies between two red zones, and fresh and freed memory is NaN. A launch
with ``tracked=True`` that accesses memory outside of live tensors fails; the error names the nearest one, even if
freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from emulator.build import load_torch_allocator
from emulator.errors import EmulatorError
from emulator.native import native

_tracked = native.allocations


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """Tracks torch's CPU allocations of all threads within the block, and calls `verify` at its end. May be nested.

    Launches do not know tensors made earlier, nor memory that torch does not allocate (numpy's, mapped files): see
    `allow`. Tensors made within the block may outlive it, and stay known until they are freed. No other thread may run
    torch operations while the block is entered or left.
    """
    library = load_torch_allocator()
    library.start_tracking(*_tracked.functions())
    try:
        yield
        verify()
    finally:
        library.stop_tracking()


@contextlib.contextmanager
def allow(array: Any, name: str) -> Iterator[None]:
    """Lets launches with ``tracked`` touch an untracked CPU tensor or numpy array within the block."""
    from emulator.module import span

    serial = _tracked.allow(*span(array), name)
    try:
        yield
    finally:
        _tracked.disallow(serial)


def label(tensor: torch.Tensor, name: str) -> None:
    """Names the allocation of a tracked tensor in messages. Raises ValueError if the tensor is not tracked."""
    if tensor.numel() > 0 and not _tracked.label(tensor.data_ptr(), name):
        raise ValueError(f"{name} is not tracked: it was made outside of tracked()")


def live() -> list[tuple[int, int, str]]:
    """Returns (address, bytes, name) of each live allocation; ``bytes`` is the size that was requested."""
    found: list[tuple[int, int, str]] = _tracked.live()
    return found


def verify() -> None:
    """Raises an `EmulatorError` of kind ``"out-of-bounds"`` if red zones or freed memory have been overwritten.

    Kernels launched without checks or host code can do that.
    """
    damages = _tracked.verify()
    if damages:
        raise EmulatorError("out-of-bounds", "memory was " + "; ".join(damages))
