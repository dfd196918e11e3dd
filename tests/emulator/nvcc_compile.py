"""PTX of CUDA C++ sources, and libraries with host code. Compiled again only when a source or header has changed."""

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
    """What nvcc makes of one file with these flags."""
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
        part.replace(target)  # whole, or not there, for others that look at the same time
    return target


def compile_ptx(source: Path, arch: str, include: Sequence[Path] = ()) -> str:
    """The PTX of one file for ``arch`` (``"compute_80"``), with the lines of its source."""
    return compiled(source, "ptx", ["-ptx", f"-arch={arch}"], include).read_text()


def compile_library(
    source: Path, archs: Sequence[str], include: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """A shared library of one file with its host code, PTX for ``archs``, and the emulated CUDA runtime.

    It can be loaded where `emulator.cuda_runtime` is. ``flags`` are nvcc's, besides those that this needs.
    """
    gencodes = [flag for arch in archs for flag in ("-gencode", f"arch={arch},code={arch}")]
    # Its symbols are found by the name of the library that has them; nvcc itself takes no file of that suffix.
    runtime = ["-cudart", "none", "-Xlinker", str(build()[0])]
    return compiled(
        source, "so", ["-shared", "-Xcompiler", "-fPIC", "--no-compress", *gencodes, *runtime, *flags], include
    )


def compile_all(sources: Sequence[Path], arch: str, include: Sequence[Path] = ()) -> list[str]:
    """`compile_ptx` of each, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_ptx(source, arch, include), sources))
