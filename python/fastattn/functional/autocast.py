"""Applies autocast as torch's own attention and linear layers do: casts floating inputs to the autocast dtype."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import torch
from torch import Tensor

# The device types that have autocast. For other types, such as "meta", `torch.is_autocast_enabled` raises. The list is
# made at import, because torch.compile cannot trace `is_autocast_available` before torch 2.12.
_WITH_AUTOCAST = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "maia")
    if torch.amp.is_autocast_available(kind)
)


Argument = TypeVar("Argument")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of the active autocast for this device type, or None if autocast is off."""
    if device_type not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(dtype: torch.dtype, tensor: Argument) -> Argument:
    """Returns ``tensor`` in ``dtype``. As in torch, tensors that are float64 or not floating are returned as they are.

    None and arguments that are not tensors are returned as they are, too. Later checks raise an error for them.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)  # type: ignore[return-value]  # the cast of a subclass can be of another class


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which PyTorch's operators keep their inputs' dtype, so that float32 stays float32."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
