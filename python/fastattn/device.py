"""What the dispatcher and the launchers need to know of a device."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch


class DeviceFacts(NamedTuple):
    """``arch`` is the compute capability times ten (80, 90, 100); shared memory is the opt-in limit of one block.

    ``driver_cuda``: the CUDA version that the driver supports, as 1000 * major + 10 * minor.
    """

    arch: int
    num_sms: int
    shared_memory_bytes: int
    driver_cuda: int


# What Triton's interpreter pretends to be when it runs kernels on CPU tensors: an A100.
INTERPRETED_DEVICE = DeviceFacts(arch=80, num_sms=108, shared_memory_bytes=163 * 1024, driver_cuda=13000)


def triton_is_interpreted() -> bool:
    """True where ``TRITON_INTERPRET=1`` makes Triton run kernels on CPU tensors, in Python."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernel_facts(device: torch.device) -> DeviceFacts:
    """The facts of a device that the dispatcher sends to a kernel."""
    known = facts(device)
    assert known is not None, f"no kernel runs on {device}"
    return known


def is_interpreted(device: torch.device) -> bool:
    """True where Triton's interpreter would run a kernel on tensors of ``device``."""
    return device.type == "cpu" and triton_is_interpreted()


_known: dict[torch.device, DeviceFacts | None] = {}


def facts(device: torch.device) -> DeviceFacts | None:
    """The facts of ``device``, or None where no kernel of ours can run on it."""
    if device not in _known:
        numbers = _look_up(device)
        _known[device] = DeviceFacts(*numbers) if numbers is not None else None
    return _known[device]


@torch.compiler.assume_constant_result  # what it calls cannot be traced, and numbers can be kept in a graph
def _look_up(device: torch.device) -> tuple[int, int, int, int] | None:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return (
            properties.major * 10 + properties.minor,
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            torch._C._cuda_getDriverVersion(),  # type: ignore[attr-defined]
        )
    if is_interpreted(device):
        return INTERPRETED_DEVICE
    return None
