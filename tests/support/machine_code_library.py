"""Finds a native library with machine code, for tests that disassemble it: the installed one if it has some.

Otherwise it is the library for the usual GPUs, which the first test that needs it builds (`make library` shows the
progress). Without nvcc it is the installed library, which then has no kernels.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import installed_library
from native_build.cuda import CudaToolkit, find_nvcc
from native_build.errors import BuildError
from native_build.instances import all_instances
from native_build.library import ROOT, NativeBuild
from native_build.tools import find_cxx, find_torch


def _configure() -> NativeBuild | None:
    nvcc = None if installed_library.BUILD["archs"] else find_nvcc()
    try:
        found = CudaToolkit.of(nvcc) if nvcc else None
    except BuildError:
        found = None
    if found is None:
        return None
    return NativeBuild(
        source=ROOT / "csrc",
        output=ROOT / "build" / "native",
        version=installed_library.BUILD["version"],
        cxx=find_cxx(os.environ),
        torch=find_torch(),
        toolkit=found,
        instances=all_instances(ROOT / "csrc"),
    )


_build = _configure()
BUILD: dict[str, Any] = _build.description() if _build else installed_library.BUILD


@functools.cache
def library_path() -> Path:
    """Returns the library's path; builds the library first if need be."""
    return _build.run(quiet=True) if _build else installed_library.LIBRARY_PATH


@functools.cache
def _tile_of() -> dict[str, Any]:
    """Returns the library's `native.KERNELS`, read in another process: this one has seldom loaded the library."""
    code = "import json; from fastattn import native; print(json.dumps(native.KERNELS))"
    environment = {**os.environ, "FASTATTN_LIBRARY": str(library_path())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@functools.cache
def tiles() -> dict[str, Any]:
    """Returns its tiles: kernel → head dim ("192, 128" where the values' head dim differs), or block_m → tile."""
    found: dict[str, Any] = {}
    for name, tile in _tile_of().items():
        kernel, _, arguments = name.rstrip(">").partition("<")
        sizes = [text for text in arguments.split(", ") if text[:1].isdigit()]
        for variant in {"options", "int8", "fp8", "groups"} & set(arguments.split(", ")):
            kernel = kernel.replace("_sm", f"_{variant}_sm")
        if tile is not None:
            found.setdefault(kernel, {})[", ".join(sizes)] = tile
    return found


def kernels() -> set[str]:
    """Returns the names of all kernels in the library."""
    return set(_tile_of())
