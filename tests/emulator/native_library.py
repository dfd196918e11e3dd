"""The package's native library, built a second time for the emulator: kernels as PTX, ops on CPU tensors.

Its CUDA runtime is the emulated one, so that it can only be loaded where `emulator.native` is. A process has this
library or the real one, never both: both define ``torch.ops.fastattn``.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
from pathlib import Path

from emulator.build import BUILD
from emulator.build import build as build_emulator
from emulator.toolkit import ROOT, toolkit
from native_build.errors import BuildError
from native_build.instances import all_instances
from native_build.library import NativeBuild
from native_build.tools import find_cxx, find_torch

FOLDER = BUILD / "native"
VARIABLE = "FASTATTN_LIBRARY"  # that fastattn.native reads


def configure(cudart: Path | None = None) -> NativeBuild | None:
    """Returns the build for CPU tensors, or None where there is no nvcc.

    With ``cudart``, the library in CUDA's place, it is for the CUDA tensors of a torch that has loaded that.
    """
    found = toolkit()
    if found is None:
        return None
    return NativeBuild(
        source=ROOT / "csrc",
        output=FOLDER,
        version="0+emulated",
        cxx=find_cxx(os.environ),
        torch=find_torch(),
        toolkit=found,
        instances=all_instances(ROOT / "csrc"),
        emulated_runtime=cudart or build_emulator()[0],
        takes_cuda_tensors=cudart is not None,
    )


def build(cudart: Path | None = None) -> Path | None:
    """Brings the library of `configure` up to date and returns its path; None where there is no nvcc.

    Processes that want it at the same time wait for the first. Raises RuntimeError with the compiler's words.
    """
    native = configure(cudart)
    if native is None:
        return None
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "native.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return native.run(quiet=True)
        except BuildError as error:  # a SystemExit, which a test session would not survive
            raise RuntimeError(str(error)) from None


def import_fastattn() -> bool:
    """Imports fastattn with this library, for the rest of the process, but not for those that it starts.

    False: fastattn is not installed, or there is no nvcc; then the first import of it is the usual one. Raises
    RuntimeError where it was imported before.
    """
    if importlib.util.find_spec("fastattn") is None:
        return False
    library = build()
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
    return True
