"""What of the package's own build the emulator uses: setup.py, and the CUDA toolkit that it finds."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(ROOT))
try:
    import setup
finally:
    sys.path.pop(0)


@functools.cache
def toolkit() -> setup.CudaToolkit | None:
    """The compiler and the headers that the package itself would be built with; None if there is no complete one."""
    compiler = setup.find_nvcc()
    try:
        return setup.CudaToolkit.of(compiler) if compiler else None
    except setup.BuildError:
        return None


def nvcc() -> Path | None:
    """The compiler alone."""
    found = toolkit()
    return found.nvcc if found else None
