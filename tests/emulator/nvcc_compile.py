"""PTX of CUDA C++ sources. Compiled again only when something in the include folders has changed."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from emulator.build import BUILD

ROOT = Path(__file__).parents[2]
HEADERS = (".h", ".cuh", ".hpp")


@functools.cache
def nvcc() -> Path | None:
    """The compiler that the package itself would be built with; None if there is none."""
    sys.path.insert(0, str(ROOT))
    try:
        from setup import find_nvcc
    finally:
        sys.path.pop(0)
    found: Path | None = find_nvcc()
    return found


def compile_ptx(source: Path, arch: str, include: Sequence[Path] = ()) -> str:
    """The PTX of one file for ``arch`` (``"compute_80"``), with the lines of its source."""
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("no nvcc here: see setup.py")
    headers = (file for folder in include for file in sorted(folder.rglob("*")) if file.suffix in HEADERS)
    digest = hashlib.sha256(f"{compiler} {arch} {list(include)}".encode())
    for file in (source, *headers):
        digest.update(file.read_bytes())
    target = BUILD / "ptx" / f"{source.stem}-{digest.hexdigest()[:24]}.ptx"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{id(digest)}.part")
        flags = ["-std=c++17", "-ptx", "-lineinfo", f"-arch={arch}", *(f"-I{folder}" for folder in include)]
        done = subprocess.run([compiler, *flags, source, "-o", part], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"nvcc failed on {source}:\n{done.stderr[-4000:]}")
        part.replace(target)  # whole, or not there, for others that look at the same time
    return target.read_text()


def compile_all(sources: Sequence[Path], arch: str, include: Sequence[Path] = ()) -> list[str]:
    """`compile_ptx` of each, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_ptx(source, arch, include), sources))
