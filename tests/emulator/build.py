"""Builds the emulator's C++ part with ninja and loads it. Needs a C++17 compiler, ninja and pybind11."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "src"
BUILD = Path(__file__).parents[2] / "build" / "emulator"

# Contraction would turn a * b + c into one rounding where the PTX has two.
FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fPIC -fvisibility=hidden -pthread -Wall"


def ninja() -> str:
    """Ninja beside this Python, or on the path."""
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        raise RuntimeError("the emulator is built with ninja, which is not installed (pip install ninja)")
    return found


def rules(library: Path) -> str:
    """The ninja file that makes ``library`` of all sources."""
    import pybind11

    includes = f"-I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
    lines = [
        f"cxx = {os.environ.get('CXX', 'c++')}",
        f"flags = {FLAGS}",
        f"includes = {includes}",
        "rule compile",
        "  command = $cxx $flags $includes -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        "  command = $cxx -shared -pthread $in -o $out",
    ]
    objects = []
    for source in sorted(SOURCES.rglob("*.cpp")):
        objects.append(BUILD / source.relative_to(SOURCES).with_suffix(".o"))
        lines.append(f"build {objects[-1]}: compile {source}")
    lines.append(f"build {library}: link {' '.join(map(str, objects))}")
    return "\n".join(lines) + "\n"


def build() -> Path:
    """Bring the library up to date; processes that want it at the same time wait for the first."""
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / f"_emulator{sysconfig.get_config_var('EXT_SUFFIX')}"
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (BUILD / "build.ninja").write_text(rules(library))
        done = subprocess.run([ninja(), "-C", BUILD, "--quiet"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"building the emulator failed:\n{done.stdout[-8000:]}{done.stderr[-2000:]}")
    return library


def load() -> ModuleType:
    """The C++ part, built if need be."""
    spec = importlib.util.spec_from_file_location("_emulator", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(build())
