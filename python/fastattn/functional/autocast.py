"""Honours autocast as torch's own attention and linear layers do: floating inputs become the autocast dtype."""

from __future__ import annotations

import contextlib
from typing import TypeVar

import torch
from torch import Tensor

# The kinds of device that have autocast; for others ("meta") `torch.is_autocast_enabled` raises. They are found once,
# here, because torch.compile cannot trace `is_autocast_available` before torch 2.12.
_WITH_AUTOCAST = frozenset(
    kind
    for kind in ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "maia")
    if torch.amp.is_autocast_available(kind)
)


Argument = TypeVar("Argument")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of the autocast in force on this kind of device, or None."""
    if device_type not in _WITH_AUTOCAST or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(dtype: torch.dtype, tensor: Argument) -> Argument:
    """Returns ``tensor`` in ``dtype``; float64 and tensors that are not floating stay as they are, as in torch.

    None and arguments that are no tensors stay too; later checks raise about these.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)  # type: ignore[return-value]  # a tensor subclass may become another


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which PyTorch's operators keep their inputs' dtype, so that float32 stays float32."""
    if autocast_dtype(device_type) is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
