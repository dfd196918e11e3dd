"""The emulated CUDA runtime of `native_library`: it follows `options` and `device`, and notes its `launches`.

There is none (`is_available`) where CUDA's headers were not found when the emulator was built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from emulator import launches, options
from emulator.errors import EmulatorError
from emulator.native import native
from emulator.report import Report

is_available = hasattr(native, "runtime")


@contextlib.contextmanager
def pretend(arch: int, num_sms: int, shared_memory_bytes: int) -> Iterator[None]:
    """Within, the runtime has a GPU with these facts; outside it has an A100. `device.emulated` enters this."""
    before = native.runtime.device()
    native.runtime.pretend(arch, num_sms, shared_memory_bytes)
    try:
        yield
    finally:
        native.runtime.pretend(*before)


@contextlib.contextmanager
def raising_faults() -> Iterator[None]:
    """Raises `EmulatorError` where an exception that tells of a kernel's fault leaves the block.

    Host code has made it of the launch's error code and cudaGetErrorString, which names every place. The GPU itself
    is none the worse: later launches run.
    """
    try:
        yield
    except Exception as error:
        if is_available:
            try:
                native.runtime.raise_fault_told_in(str(error))
            except native.Fault as fault:
                raise EmulatorError.of(fault) from error
        raise


@contextlib.contextmanager
def replaced(text: str, instead: str, kernel: str = "") -> Iterator[None]:
    """Within, each ``text`` in the PTX of kernels is ``instead``: a planted fault. Not nestable.

    Launching a kernel whose PTX does not have it is an error of the kind ``"arguments"``. Kernels that do not have
    ``kernel`` in their names stay as they are.
    """
    native.runtime.replace_in_ptx(text, instead, kernel)
    try:
        yield
    finally:
        native.runtime.replace_in_ptx("", "", "")


@contextlib.contextmanager
def replaying(runs: int) -> Iterator[None]:
    """Within, each launch runs so often, with the same arguments and in the same memory, as in a CUDA graph that is
    replayed. `launches.recorded` lists every run. Not nestable.
    """
    native.runtime.set_runs_of_a_launch(runs)
    try:
        yield
    finally:
        native.runtime.set_runs_of_a_launch(1)


def _follow(changed: options.LaunchOptions) -> None:
    native.runtime.set_options(changed.resolved())


def _note(
    kernel: str, counted: dict[str, Any], ptx: str, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    launches.note(launches.Launched(Report.of(kernel, counted), ptx, grid, block))


if is_available:
    options.when_changed(_follow)
    launches.when_heard(lambda heard: native.runtime.listen(_note if heard else None))
