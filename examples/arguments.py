"""Converts the arguments of the examples' command lines; argparse reports what these functions refuse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

import torch


def existing_file(name: str) -> Path:
    """Returns the path ``name``. Raises ArgumentTypeError if there is no such file."""
    path = Path(name)
    if not path.is_file():
        raise ArgumentTypeError(f"there is no file {name}")
    return path


def present_device(name: str) -> torch.device:
    """Returns the device ``name``. Raises ArgumentTypeError if this machine does not have it."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # a torch without CUDA raises AssertionError
        found = "cuda or cpu" if torch.cuda.is_available() else "cpu, since torch finds no GPU"
        raise ArgumentTypeError(f"expected {found}, got {name}") from None
    return device


def positive(text: str) -> int:
    """Returns the number in ``text``. Raises ArgumentTypeError unless it is a positive int."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"expected an int of at least 1, got {text}")
    return int(text)
