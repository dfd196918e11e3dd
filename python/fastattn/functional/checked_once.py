"""Checks a call's arguments once per signature, not once per call, and keeps the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fastattn.checks import mapped_size, needs_gradient

Checked = TypeVar("Checked")

_MOST_KEPT = 4096  # results; a server that sees ever new lengths must not grow for ever


class CheckedOnce(Generic[Checked]):
    """Keeps the results of ``check(tensors, options)``, by everything that the host knows about the arguments.

    ``check`` raises where the arguments are wrong; errors are not kept. Under ``torch.compile`` it is traced each time,
    and the compiled graph keeps the result.
    """

    def __init__(self, check: Callable[[Any, Any], Checked]) -> None:
        self._check = check
        self._kept: dict[Any, Checked] = {}

    def get(self, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Checked:
        """Returns the result of ``check`` for these arguments."""
        if torch.compiler.is_compiling():
            return self._check(tensors, options)
        # The options' types count too: 0 equals False but is not a bool.
        signature: tuple[Any, ...] = (*map(_signature, tensors), options, *map(type, options), torch.is_grad_enabled())
        if torch._C._are_functorch_transforms_active():  # `requires_grad` and `shape` do not tell all then
            signature += tuple(isinstance(tensor, Tensor) and needs_gradient(tensor) for tensor in tensors)
            signature += tuple(mapped_size(tensor) for tensor in tensors)
        try:
            found = self._kept.get(signature)
        except TypeError:  # an option that cannot be hashed is a wrong one: the checks say what is wrong with it
            return self._check(tensors, options)
        if found is None:
            found = self._check(tensors, options)
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[signature] = found
        return found


def _signature(tensor: Any) -> Any:
    """Returns what a check looks at: of a tensor also the type, since subclasses go to PyTorch, else only the type."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        return type(tensor)
    shape = None if tensor.is_nested else tensor.shape  # a strided nested tensor has none
    return shape, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)
