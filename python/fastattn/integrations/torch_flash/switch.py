"""Switches fastattn's operators on and off through torch's registry of flash attention implementations."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from fastattn.integrations.torch_flash.operators import OPERATORS, Override
from fastattn.namespace import NAMESPACE

_NAME = NAMESPACE  # differs for each copy of the package
_OLDEST_TORCH = (2, 13)

_lock = threading.Lock()
_active_before: str | None = None


def enable() -> None:
    """Makes torch's flash attention on CUDA run fastattn's kernels, for the whole process. Repeated calls are allowed.

    Calls that no kernel takes go to torch's own kernels. Switch only between training steps: a backward pass with
    dropout must run in the same implementation as its forward pass.

    Raises:
        RuntimeError: torch is older than 2.13.
    """
    global _active_before
    registry = _registry()
    with _lock:
        active = registry.current_flash_attention_impl()
        if active != _NAME:
            registry.activate_flash_attention_impl(_NAME)
            _active_before = active


def disable() -> None:
    """Undoes ``enable()``. It does nothing if ``enable()`` was not called, or another implementation is active now."""
    global _active_before
    registry = _registry()
    with _lock:
        if registry.current_flash_attention_impl() == _NAME:
            registry.restore_flash_attention_impl()
            if _active_before is not None:
                registry.activate_flash_attention_impl(_active_before)
        _active_before = None


class Overrides:
    """Registers fastattn's functions under one dispatch key until ``remove()``. It is a handle of torch's registry."""

    def __init__(self, dispatch_key: str = "CUDA") -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL", dispatch_key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # we override them on purpose
            for name, operator in OPERATORS.items():
                override = Override(name, operator, dispatch_key)
                self._library.impl(name, override, dispatch_key, with_keyset=True)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _registry() -> Any:
    """Returns ``torch.nn.attention``, after registering this implementation there."""
    if not is_available():
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise RuntimeError(
            f"fastattn.integrations.torch_flash needs torch {oldest} or later, got {torch.__version__}; "
            "fastattn.install() replaces F.scaled_dot_product_attention in every version"
        )
    registry: Any = torch.nn.attention
    if _NAME not in registry.list_flash_attention_impls():
        registry.register_flash_attention_impl(_NAME, register_fn=Overrides)
    return registry


def is_available() -> bool:
    """Returns whether this torch has the registry that ``enable()`` needs."""
    return _version(torch.__version__) >= _OLDEST_TORCH


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


if is_available():
    _registry()
