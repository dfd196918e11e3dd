"""Checks a call's arguments once per signature instead of once per call, and caches the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fastattn.checks import mapped_size, needs_gradient

Record = TypeVar("Record", bound=tuple[Any, ...])
Facts = TypeVar("Facts")

_MOST_KEPT = 4096  # limits the cache's memory, because servers keep getting new lengths


class CheckedOnce(Generic[Record, Facts]):
    """Calls ``check(call)`` and caches its result. The key is everything that ``check`` uses of the arguments.

    ``check`` returns the call with checked options, and facts about the call. ``check`` raises if an argument is wrong;
    errors are not cached. Under ``torch.compile``, ``check`` is traced each time, and the compiled graph keeps its
    result.

    Args:
        record: the type of the calls. Fields before ``first_option`` are tensors, fields from there up to ``end`` are
            options, and the rest are not checked.
    """

    def __init__(
        self,
        check: Callable[[Record], tuple[Record, Facts]],
        record: Any,
        first_option: str | None = None,
        end: str | None = None,
    ) -> None:
        self._check, self._record = check, record
        last = len(record._fields)
        first = last if first_option is None else record._fields.index(first_option)
        behind = last if end is None else record._fields.index(end)
        self._tensors, self._options, self._rest = slice(first), slice(first, behind), slice(behind, None)
        self._window = record._fields.index("window") if "window" in record._fields else None
        self._kept: dict[Any, tuple[Any, Facts]] = {}

    def __call__(self, call: Record) -> tuple[Record, Facts]:
        """Returns the call with checked options, and the facts."""
        if torch.compiler.is_compiling():
            return self._check(call)
        tensors, options = call[self._tensors], call[self._options]
        signatures = [None if tensor is None else _signature(tensor) for tensor in tensors]
        # The types of options and of a window's sides are part of the key, because 0 equals False but is not a bool.
        signature: tuple[Any, ...] = (*signatures, options, *map(type, options), torch.is_grad_enabled())
        if self._window is not None and isinstance(call[self._window], tuple):
            signature += tuple(map(type, call[self._window]))
        if torch._C._are_functorch_transforms_active():  # wrappers hide requires_grad and mapped sizes
            signature += tuple(isinstance(tensor, Tensor) and needs_gradient(tensor) for tensor in tensors)
            signature += tuple(mapped_size(tensor) for tensor in tensors)
        try:
            found = self._kept.get(signature)
        except TypeError:  # an unhashable option is wrong, so the check raises
            return self._check(call)
        if found is None:
            checked, facts = self._check(call)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[signature] = checked[self._options], facts
        options, facts = found
        return tuple.__new__(self._record, tensors + options + call[self._rest]), facts


def _signature(tensor: Any) -> Any:
    """Returns what checks use: of a tensor, its properties and type (PyTorch runs subclasses), otherwise the type."""
    if not isinstance(tensor, Tensor):
        return type(tensor)
    shape = None if tensor.is_nested else tensor.shape  # a strided nested tensor has no shape
    return shape, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
