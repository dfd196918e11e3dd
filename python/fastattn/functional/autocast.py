"""Autocast as torch's own attention and linear layers honour it: their floating inputs become the autocast dtype."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

# The kinds of device that have autocast; of others ("meta") `torch.is_autocast_enabled` raises. Asked here, once:
# torch.compile cannot trace the question before torch 2.12.
_WITH_AUTOCAST = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "maia")
    if torch.amp.is_autocast_available(kind)
)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype that autocast is in force with on this kind of device, or None."""
    if device_type not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """``tensor`` in ``dtype``; float64 and what is not floating stays as it is, as under torch's autocast.

    So does what is no tensor: the checks say what is wrong with it.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Inside, PyTorch's operators keep their inputs' dtype: what we compute in float32 stays in float32."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
