"""Tracking of what torch allocates on the CPU, with red zones, so that launches know what they may touch.

    with allocations.tracked():
        x = torch.randn(100)
        module.launch("kernel", args=[x.data_ptr(), …], tracked=True)

Within, the memory of every new tensor lies between two red zones, and fresh and freed memory is NaN. An access of a
launch with ``tracked=True`` outside of all live tensors is an error that names the nearest, also if it was freed.
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
    """Within, torch's CPU allocator tracks, in every thread. May be nested. Verifies at its end.

    Tensors made earlier stay as they are and are not known to launches: see `allow`. Tensors made within may outlive
    it, and are known for as long as they live. Memory that torch does not allocate (of numpy, of mapped files) is not
    known either. Enter and leave while no other thread runs torch operations.
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
    """Within, launches with ``tracked`` may touch the memory of a CPU tensor or numpy array that is not tracked."""
    from emulator.module import span

    serial = _tracked.allow(*span(array), name)
    try:
        yield
    finally:
        _tracked.disallow(serial)


def label(tensor: torch.Tensor, name: str) -> None:
    """Messages call the allocation of a tracked tensor so, not by its number."""
    if tensor.numel() > 0 and not _tracked.label(tensor.data_ptr(), name):
        raise ValueError(f"{name} is not tracked: it was made outside of tracked()")


def live() -> list[tuple[int, int, str]]:
    """(address, bytes, name) of each live allocation, to the byte as it was asked for."""
    found: list[tuple[int, int, str]] = _tracked.live()
    return found


def verify() -> None:
    """Raise if somebody (a kernel launched without checks, code of the host) has written to red zones or freed memory.

    Raises `EmulatorError` of the kind ``"out-of-bounds"``.
    """
    damages = _tracked.verify()
    if damages:
        raise EmulatorError("out-of-bounds", "memory was " + "; ".join(damages))
