"""The package's native library for the emulator: kernels as PTX, ops on CPU tensors.

Its objects are those of the package's own build. Its CUDA runtime is the emulated one, so that it can only be loaded
where `emulator.native` is. A process has this library or the real one, never both: both define ``torch.ops.fastattn``.
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
VARIABLE = "FASTATTN_LIBRARY"  # that fastattn.native reads
_is_imported = False  # fastattn, with this library


def kernels_named(patterns: Sequence[str]) -> list[Instance]:
    """Returns the instances with a kernel that one of the patterns names; all of them where there is no pattern.

    A kernel's name is its source's and its values: ``forward_options_sm80.HEAD_DIM_32.PAGED_false``. A pattern is the
    beginning of a name up to a dot, or a whole one, and may hold ``*``. Raises ValueError where one names no kernel.
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
    """Returns the build for CPU tensors, or None where there is no nvcc.

    With ``cudart``, the library in CUDA's place, it is for the CUDA tensors of a torch that has loaded that.
    ``kernels`` are patterns of `kernels_named`, of those that the library shall have.
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
    """Brings the library of `configure` up to date and returns its path; None where there is no nvcc.

    Processes that want it at the same time wait for the first. Raises RuntimeError with the compiler's words, which are
    on the screen instead where it is not ``quiet``.
    """
    native = configure(cudart, kernels)
    if native is None:
        return None
    try:
        return native.run(quiet=quiet)
    except BuildError as error:  # a SystemExit, which a test session would not survive
        raise RuntimeError(str(error)) from None


def import_fastattn(kernels: Sequence[str] = ()) -> bool:
    """Imports fastattn with this library, for the rest of the process, but not for those that it starts.

    False: fastattn is not installed, or there is no nvcc; then the first import of it is the usual one. Where fastattn
    has this library already, it keeps the kernels that it has. Raises RuntimeError where fastattn has another library.
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
    import emulator.cuda_runtime  # noqa: F401  (what the library is linked against)

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
