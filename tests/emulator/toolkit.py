"""Finds the CUDA toolkit in the same way as the package's own build (csrc/native_build)."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "csrc"))
from native_build.cuda import CudaToolkit, find_nvcc
from native_build.errors import BuildError

ROOT = Path(__file__).parents[2]


@functools.cache
def toolkit() -> CudaToolkit | None:
    """Returns the toolkit that the package itself would be built with, or None if there is no complete one."""
    compiler = find_nvcc()
    try:
        return CudaToolkit.of(compiler) if compiler else None
    except BuildError:
        return None


def nvcc() -> Path | None:
    """Returns the path of nvcc, or None if there is no complete toolkit."""
    found = toolkit()
    return found.nvcc if found else None
