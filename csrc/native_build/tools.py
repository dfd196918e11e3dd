"""Finds the other tools of a build: the C++ compiler, ninja and torch's headers."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from native_build.errors import BuildError


def find_cxx(environ: Mapping[str, str]) -> list[str]:
    """Returns the command of the C++ compiler, as a list: ``CXX`` may hold a launcher such as ccache before it."""
    if environ.get("CXX"):
        return shlex.split(environ["CXX"])
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name, path=environ.get("PATH")):
            return [path]
    raise BuildError("no C++ compiler found. Install one (for example the package g++), or set CXX to its command.")


@functools.cache
def version_of(*command: str) -> str:
    """Returns the first line of the compiler's --version, or an empty text if it does not start."""
    try:
        said = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    except OSError:  # the build will report it
        return ""
    return said.partition("\n")[0]


def host_compiler(cxx: Sequence[str]) -> str:
    """Returns the compiler in the command ``cxx``, as nvcc's -ccbin wants it: one program, no launcher before it."""
    return shutil.which(cxx[-1]) or cxx[-1]


def find_ninja() -> str:
    """Returns the ninja of this environment's package, else the one on PATH; raises BuildError if there is none."""
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if not found:
        raise BuildError("ninja is not installed. Run: pip install ninja")
    return found


def num_jobs(environ: Mapping[str, str]) -> str:
    """Returns how many compilers run at once: MAX_JOBS, else one per CPU but at most one per 2 GiB of memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return environ.get("MAX_JOBS") or str(max(1, min(os.cpu_count() or 1, memory // 2**31)))


def find_torch() -> Path:
    """Returns the folder of the installed torch without importing it; raises BuildError unless it is >= 2.10."""
    spec = importlib.util.find_spec("torch")
    root = Path(spec.origin).parent if spec and spec.origin else None
    if root is None or not (root / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
        raise BuildError(
            "building needs the headers of torch >= 2.10, and this environment has none. Install torch first "
            "(pip install torch==2.13.0), then install fastattn with --no-build-isolation, so that the build sees it."
        )
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 10):
        raise BuildError(f"building needs torch >= 2.10; this environment has torch {version}. Upgrade it first.")
    return root
