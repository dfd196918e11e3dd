"""Runs the Hopper kernels of the int8 matmul with the tile that a test asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cuda_kernels import EMULATED
from fastattn import native

if EMULATED:  # on a machine with a GPU, the emulator is not built
    from emulator import cuda_runtime, device, launches, options

SEED = 7


@contextlib.contextmanager
def running(
    kernel: str, tokens: int, num_sms: int = 2, before: tuple[str, ...] = (), **changes: Any
) -> Iterator[list[Any]]:
    """Makes int8 matmuls run on Hopper's ``kernel`` with tiles of ``tokens`` tokens and the emulator's checks; yields
    the launches. Each call must launch the kernels ``before`` first. ``changes`` are other options of launches."""
    if not EMULATED:
        with native.forced_int8_tile(90, tokens):
            yield []
        return
    checks = options.launching(**{"tracked": True, "uninitialised": True, "seed": SEED, **changes})
    gpu = device.emulated(90, num_sms=num_sms)
    with native.forced_int8_tile(90, tokens), gpu, cuda_runtime.raising_faults(), checks, launches.recorded() as found:
        yield found
    kernels = (*before, f"{kernel}ILi{tokens}E")
    assert found and len(found) % len(kernels) == 0
    assert all(kernels[i % len(kernels)] in launched.report.kernel for i, launched in enumerate(found))
