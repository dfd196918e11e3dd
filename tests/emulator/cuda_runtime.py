"""Controls the emulated CUDA runtime, which uses `options` and `device` and reports its launches to `launches`.

`is_available` is False if the emulator was built without CUDA's headers.
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
    """Makes the runtime's GPU one with these facts within the block; the default is an A100. See `device.emulated`."""
    before = native.runtime.device()
    native.runtime.pretend(arch, num_sms, shared_memory_bytes)
    try:
        yield
    finally:
        native.runtime.pretend(*before)


@contextlib.contextmanager
def raising_faults() -> Iterator[None]:
    """Replaces an exception that reports a kernel's fault by an `EmulatorError` when it leaves the block.

    Host code raises it with the text of cudaGetErrorString, which contains the whole fault. Unlike on a real GPU, later
    launches still run.
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
    """Plants a fault: within the block, replaces each ``text`` in the PTX of modules by ``instead``. Not nestable.

    Only modules that contain ``kernel`` are changed. A launch from such a module without ``text`` fails with an error
    of kind ``"arguments"``.
    """
    native.runtime.replace_in_ptx(text, instead, kernel)
    try:
        yield
    finally:
        native.runtime.replace_in_ptx("", "", "")


@contextlib.contextmanager
def replaying(runs: int) -> Iterator[None]:
    """Runs each launch ``runs`` times with the same arguments and memory, like a replayed CUDA graph, within the block.
    `launches.recorded` lists every run. Not nestable."""
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
