"""Builds and imports fastattn's native library for the emulator, with kernels as PTX and ops that take CPU tensors.

It is made of the package's own object files and linked to the emulated CUDA runtime: `emulator.native` must be loaded
first. A process has this library or the real one, because both define ``torch.ops.fastattn``.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from emulator.build import build as build_emulator
from emulator.toolkit import ROOT, toolkit
from native_build.errors import BuildError
from native_build.instances import Instance, all_instances
from native_build.library import NativeBuild
from native_build.tools import find_cxx, find_torch

OUTPUT = ROOT / "build" / "native"
FOR_CUDA_TENSORS = "emulated_cuda"
VARIABLE = "FASTATTN_LIBRARY"  # names the library that fastattn.native loads
_is_imported = False  # True: fastattn was imported with this library


def kernels_named(patterns: Sequence[str]) -> list[Instance]:
    """Returns the instances with a kernel that matches a pattern; without patterns, all instances.

    A kernel's name is its source and its template values: ``forward_options_sm80.HEAD_DIM_32.PAGED_false``. A pattern
    is such a name, whole or up to a dot, and may contain ``*``. Raises ValueError if one matches no kernel.
    """
    every = all_instances(ROOT / "csrc")
    found: dict[Instance, None] = {}
    for pattern in patterns or ["*"]:
        named = [each for each in every if fnmatch.filter([f"{name}." for name in each.kernel_names], f"{pattern}.*")]
        if not named:
            raise ValueError(f"no kernel is named {pattern}; csrc/instances.json has the names and values")
        found.update(dict.fromkeys(named))
    return list(found)


def configure(cudart: Path | None = None, kernels: Sequence[str] = ()) -> NativeBuild | None:
    """Returns the build of the library, or None if there is no nvcc.

    Its ops take CPU tensors or, with ``cudart`` (the library that replaces libcudart), the CUDA tensors of a torch that
    has loaded ``cudart``. ``kernels`` are patterns of `kernels_named` for the kernels to include.
    """
    found = toolkit()
    if found is None:
        return None
    instances = kernels_named(kernels)
    variant = FOR_CUDA_TENSORS if cudart else "emulated"
    if kernels:
        names = "\n".join(sorted(each.name for each in instances))
        variant += "_" + hashlib.sha256(names.encode()).hexdigest()[:10]
    return NativeBuild(
        source=ROOT / "csrc",
        output=OUTPUT,
        version="0+emulated",
        cxx=find_cxx(os.environ),
        torch=find_torch(),
        toolkit=found,
        instances=instances,
        emulated_runtime=cudart or build_emulator()[0],
        takes_cuda_tensors=cudart is not None,
        variant=variant,
    )


def build(cudart: Path | None = None, kernels: Sequence[str] = (), quiet: bool = True) -> Path | None:
    """Brings the library of `configure` up to date and returns its path, or None if there is no nvcc.

    Other processes that build it at the same time wait. Raises RuntimeError if the build fails, with the compiler's
    output if ``quiet``; otherwise the output has been shown.
    """
    native = configure(cudart, kernels)
    if native is None:
        return None
    try:
        return native.run(quiet=quiet)
    except BuildError as error:  # a SystemExit, which would end a test session
        raise RuntimeError(str(error)) from None


def import_fastattn(kernels: Sequence[str] = ()) -> bool:
    """Imports fastattn with this library for the rest of the process, but not for its subprocesses.

    Returns False, without importing, if fastattn is not installed or if there is no nvcc. If fastattn has this library
    already, it keeps its kernels. Raises RuntimeError if fastattn was imported with another library.
    """
    global _is_imported
    if _is_imported:
        return True
    if importlib.util.find_spec("fastattn") is None:
        return False
    library = build(kernels=kernels)
    if library is None:
        return False
    if "fastattn" in sys.modules:
        raise RuntimeError("fastattn was imported before, with the library that it found")
    import emulator.cuda_runtime  # noqa: F401  (loads what the library is linked to)

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(library)
    try:
        import fastattn  # noqa: F401
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
    _is_imported = True
    return True
