"""Loads the kernels of cuda/ as modules of the emulator. Not a test module."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from emulator import Module
from emulator.nvcc_compile import compile_ptx, nvcc

ARCHS = ("compute_80", "compute_90a")
needs_nvcc = pytest.mark.skipif(nvcc() is None, reason="no nvcc: see setup.py")


@functools.cache
def load(name: str, arch: str) -> Module:
    """Returns the module of a source, compiled for ``arch``."""
    return Module(compile_ptx(Path(__file__).parent / "cuda" / f"{name}.cu", arch))
