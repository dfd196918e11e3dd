"""What the dispatcher and the launchers need to know of a device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """``arch`` is the compute capability times ten (80, 90, 100); shared memory is the opt-in limit of one block."""

    arch: int
    num_sms: int
    shared_memory_bytes: int


# What Triton's interpreter pretends to be when it runs kernels on CPU tensors: an A100.
INTERPRETED_DEVICE = DeviceFacts(arch=80, num_sms=108, shared_memory_bytes=163 * 1024)


def triton_is_interpreted() -> bool:
    """True where ``TRITON_INTERPRET=1`` makes Triton run kernels on CPU tensors, in Python."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


_known: dict[torch.device, DeviceFacts | None] = {}


def facts(device: torch.device) -> DeviceFacts | None:
    """The facts of ``device``, or None where no kernel of ours can run on it."""
    if device not in _known:
        _known[device] = _look_up(device)
    return _known[device]


def _look_up(device: torch.device) -> DeviceFacts | None:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return DeviceFacts(
            arch=properties.major * 10 + properties.minor,
            num_sms=properties.multi_processor_count,
            shared_memory_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        )
    if device.type == "cpu" and triton_is_interpreted():
        return INTERPRETED_DEVICE
    return None
