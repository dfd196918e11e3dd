"""Looks up the facts about a device that the dispatcher and the launchers need."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from fastattn.after_import import after_import


class DeviceFacts(NamedTuple):
    """Holds the facts about one GPU.

    ``arch`` is the compute capability times ten (80, 90, 100). ``shared_memory_bytes`` is the opt-in limit of one CTA.
    ``driver_cuda`` is the CUDA version that the driver supports, as 1000 * major + 10 * minor, or None if unknown.
    """

    arch: int
    num_sms: int
    shared_memory_bytes: int
    driver_cuda: int | None


def kernel_facts(device: torch.device) -> DeviceFacts:
    """Returns the facts of a device for which the dispatcher has chosen a kernel."""
    known = facts(device)
    assert known is not None, f"no kernel runs on {device}"
    return known


_known: dict[torch.device, DeviceFacts | None] = {}


def facts(device: torch.device) -> DeviceFacts | None:
    """Returns the facts of ``device``, or None if no kernel of fastattn can run on it."""
    if device.type == "cpu":
        return _emulated
    if torch.compiler.is_dynamo_compiling():  # a graph that reads _known is compiled again when _known changes
        return _named(_look_up(device))
    if device not in _known:
        _known[device] = _named(_look_up(device))
    return _known[device]


def _named(numbers: tuple[int, int, int, int | None] | None) -> DeviceFacts | None:
    return None if numbers is None else DeviceFacts(*numbers)


def _driver_cuda() -> int | None:
    """Asks the driver which CUDA version it supports, or returns None. PyTorch has no public function for that."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        failed = driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def _look_up(device: torch.device) -> tuple[int, int, int, int | None] | None:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return (
            properties.major * 10 + properties.minor,
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            _driver_cuda(),
        )
    return None


# Compiled graphs keep the result of ``_look_up`` as a constant, because dynamo cannot trace the calls inside it. The
# decorator imports torch._dynamo, which takes a second. Apply it only after other code has imported that module.
after_import("torch._dynamo", lambda: torch.compiler.assume_constant_result(_look_up))


_emulated: DeviceFacts | None = None
_when_emulation_changes: list[Callable[[], None]] = []


def emulate_on_cpu(device_facts: DeviceFacts | None) -> DeviceFacts | None:
    """Makes CPU tensors count as tensors of a GPU with these facts, for the whole process; None ends the emulation.

    Tests and tools call this function to run compiled kernels in the host's memory. The caller must make sure that
    Triton can launch kernels on the CPU. Returns the facts that were in force before.
    """
    global _emulated
    before, _emulated = _emulated, device_facts
    for tell in _when_emulation_changes:
        tell()
    return before


def is_emulated() -> bool:
    """Returns whether `emulate_on_cpu` is in force."""
    return _emulated is not None


def when_emulation_changes(tell: Callable[[], None]) -> Callable[[], None]:
    """Registers ``tell`` to be called after every `emulate_on_cpu`; usable as a decorator."""
    _when_emulation_changes.append(tell)
    return tell
