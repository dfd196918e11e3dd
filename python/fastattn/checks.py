"""Checks of what the host knows about arguments. Each error names the argument, what was expected and what came."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattn.errors import InputError

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def expect(condition: bool, name: str, expected: str, came: object) -> None:
    """Raise an ``InputError`` of the house form unless ``condition`` holds."""
    if not condition:
        raise InputError(f"{name}: expected {expected}, got {came}")


def check_tensor(name: str, value: Any, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor{' or None' if optional else ''}, got {type(value).__name__}")


def check_rank(name: str, tensor: Tensor, layout: str) -> None:
    """``layout`` spells the dims, as in ``"[B, Hq, Sq, D]"``."""
    rank = layout.count(",") + 1 if layout != "[]" else 0
    expect(tensor.dim() == rank, name, f"{rank} dimensions {layout}", f"{tensor.dim()}: {list(tensor.shape)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], layout: str) -> None:
    expect(tuple(tensor.shape) == tuple(shape), name, f"shape {layout} = {list(shape)}", list(tensor.shape))


def check_dtype(name: str, tensor: Tensor, dtypes: Iterable[torch.dtype]) -> None:
    allowed = tuple(dtypes)
    expect(tensor.dtype in allowed, name, " or ".join(str(dtype) for dtype in allowed), tensor.dtype)


def check_same_device(name: str, tensor: Tensor, device: torch.device) -> None:
    expect(tensor.device == device, name, f"a tensor on {device} like the first argument", f"one on {tensor.device}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    expect(value in choices, name, "one of " + ", ".join(repr(choice) for choice in choices), repr(value))


def check_int(name: str, value: Any, minimum: int | None = None) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if minimum is not None:
        expect(value >= minimum, name, f"at least {minimum}", value)


def check_number(name: str, value: Any, low: float | None = None, high: float | None = None) -> None:
    """A finite int or float within ``[low, high]``."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    in_range = (low is None or value >= low) and (high is None or value <= high)
    finite = -float("inf") < value < float("inf")
    bounds = f" from {low} to {high}" if high is not None else f" of at least {low}" if low is not None else ""
    expect(finite and in_range, name, f"a finite number{bounds}", value)


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")


def device_checks_are_on() -> bool:
    """``FASTATTN_CHECK=1``: also check what lies in device memory, which synchronises. Not under compile or capture."""
    if torch.compiler.is_compiling() or os.environ.get("FASTATTN_CHECK", "0") != "1":
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
