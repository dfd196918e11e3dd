"""Runs the PTX of nvcc and Triton on the CPU, see README.md.

The names here build and import the C++ library. The modules `build`, `toolkit` and `static_facts` work without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emulator import allocations
    from emulator.errors import EmulatorError
    from emulator.module import Module
    from emulator.report import InstructionCounts, Report
    from emulator.tensor_map import TensorMap

__all__ = ["EmulatorError", "InstructionCounts", "Module", "Report", "TensorMap", "allocations"]

_HOMES = {
    "EmulatorError": "errors",
    "InstructionCounts": "report",
    "Module": "module",
    "Report": "report",
    "TensorMap": "tensor_map",
}


def __getattr__(name: str) -> Any:
    if name == "allocations":
        return importlib.import_module("emulator.allocations")
    if name in _HOMES:
        return getattr(importlib.import_module(f"emulator.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'emulator' has no attribute {name!r}")
