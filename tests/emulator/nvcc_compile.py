"""Compiles CUDA C++ to PTX or to libraries with host code, and only again after a source or header has changed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emulator.build import BUILD, build
from emulator.toolkit import nvcc

HEADERS = (".h", ".cuh", ".hpp")


def compiled(source: Path, suffix: str, flags: Sequence[str | Path], include: Sequence[Path]) -> Path:
    """Returns the file that nvcc compiles ``source`` to, from a cache if possible. Raises RuntimeError on failure."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("no nvcc here: see setup.py")
    headers = (file for folder in include for file in sorted(folder.rglob("*")) if file.suffix in HEADERS)
    digest = hashlib.sha256(f"{compiler} {list(flags)} {list(include)}".encode())
    for file in (source, *headers):
        digest.update(file.read_bytes())
    target = BUILD / suffix / f"{source.stem}-{digest.hexdigest()[:24]}.{suffix}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}-{id(digest)}.part")
        command = [compiler, "-std=c++20", "-lineinfo", *(f"-I{folder}" for folder in include), *flags]
        done = subprocess.run([*command, source, "-o", part], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc failed on {source}:\n{done.stderr[-4000:]}")
        part.replace(target)  # atomic, so that other processes never see an incomplete file
    return target


def compile_ptx(source: Path, arch: str, include: Sequence[Path] = ()) -> str:
    """Returns the PTX of a file for ``arch`` (``"compute_80"``), with source line information."""
    return compiled(source, "ptx", ["-ptx", f"-arch={arch}"], include).read_text()


def compile_library(
    source: Path, archs: Sequence[str], include: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """Compiles a file with its host code to a shared library with PTX for ``archs``, and returns its path.

    It can be loaded after `emulator.cuda_runtime`, to which it is linked. ``flags`` are additional flags for nvcc.
    """
    gencodes = [flag for arch in archs for flag in ("-gencode", f"arch={arch},code={arch}")]
    # The library goes to the linker directly, because nvcc rejects a file with its suffix.
    runtime = ["-cudart", "none", "-Xlinker", str(build()[0])]
    return compiled(
        source, "so", ["-shared", "-Xcompiler", "-fPIC", "--no-compress", *gencodes, *runtime, *flags], include
    )


def compile_all(sources: Sequence[Path], arch: str, include: Sequence[Path] = ()) -> list[str]:
    """Runs `compile_ptx` for each source, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_ptx(source, arch, include), sources))
