"""Builds the emulator's C++ libraries with ninja and loads them. Needs a C++17 compiler, ninja, pybind11 and torch.

The emulated CUDA runtime (src/runtime) is built only if CUDA's headers are found.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from emulator.toolkit import toolkit
from native_build.library import CACHED, shell, write_if_changed
from native_build.tools import version_of

SOURCES = Path(__file__).parent / "src"
TORCH_SOURCE = SOURCES / "torch_allocator.cpp"  # becomes a separate library: nothing else uses torch's headers
BINDINGS = SOURCES / "bindings.cpp"  # compiled with -O1, because it takes long to optimise and is not critical
RUNTIME = SOURCES / "runtime"
PRECOMPILED = "precompiled.h"  # saves most of the compile time of the other sources
BUILD = Path(__file__).parents[2] / "build" / "emulator"

# The name by which libraries link to the emulated CUDA runtime. The version of its symbols keeps them apart from the
# symbols of a real libcudart in the same process.
SONAME = "libemulated_cuda.so"
EXPORTED = "cu[A-Z]*; cuda*; __cuda*; PyInit__emulator"
VERSION = "EMULATED_CUDA"
# The same library under the name of CUDA's, which a CUDA build of torch loads (tests/cuda_torch).
CUDART = "libcudart.so.13"

# -ffp-contract=off: a contracted a * b + c would round once where the PTX rounds twice.
FLAGS = "-std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fPIC -fvisibility=hidden -pthread -Wall"


def ninja() -> str:
    """Returns ninja's path: next to this Python, else on PATH. Raises RuntimeError if it is not installed."""
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        raise RuntimeError("the emulator is built with ninja, which is not installed (pip install ninja)")
    return found


def cpu() -> str:
    """Returns a text that identifies the CPU, which determines the meaning of -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features")))
    return "CPU " + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def rules(library: Path, torch_library: Path) -> str:
    """Returns the text of the ninja file. ``torch_library`` is built from TORCH_SOURCE, ``library`` from all others."""
    import pybind11
    import torch

    includes = f"-I{BUILD} -I{SOURCES} -I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
    sources = set(SOURCES.rglob("*.cpp")) - {TORCH_SOURCE}
    found = toolkit()
    if found:
        includes += f" -isystem {found.include} -DEMULATOR_WITH_CUDA_HEADERS"
    else:
        sources -= set(RUNTIME.rglob("*.cpp"))
    cxx = os.environ.get("CXX", "c++")
    versions = f"Python {platform.python_version()}, pybind11 {pybind11.__version__}, torch {torch.__version__}"
    toolkit_version = f"nvcc {found.version}" if found else "no nvcc"
    about = f"{version_of(*shlex.split(cxx))}, {versions}, {toolkit_version}, {cpu()}"
    headers = BUILD / f"{PRECOMPILED}.gch"
    lines = [
        f"cxx = {cxx}",
        f"cached = {shell([os.path.realpath(sys.executable), '-I', CACHED])}",
        f"flags = {FLAGS}",
        f"includes = {includes}",
        f"torch = {Path(torch.__file__).parent}",
        "rule compile",
        f"  command = $cached $out {shell([about])} $in $also -- $cxx $flags $includes -MMD -MF $out.d -c $in -o $out",
        "  description = emulator: C++ $in",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule precompile",
        f"  command = : {shell([about])}; $cxx $flags $includes -MMD -MF $out.d -x c++-header $in -o $out",
        "  description = emulator: C++ headers",
        "  depfile = $out.d",
        "  deps = gcc",
        f"build {headers}: precompile {SOURCES / PRECOMPILED}",
        "rule link",
        "  command = $cxx -shared -pthread $in $options -o $out",
        "  description = emulator: link $out",
    ]
    objects = []
    for source in sorted(sources):
        objects.append(BUILD / source.relative_to(SOURCES).with_suffix(".o"))
        if source == BINDINGS:
            lines += [f"build {objects[-1]}: compile {source}", "  flags = $flags -O1"]
        else:
            # For -include NAME, the compiler uses the precompiled NAME.gch on the include path.
            lines += [
                f"build {objects[-1]}: compile {source} | {headers}",
                f"  flags = $flags -include {PRECOMPILED}",
                f"  also = {SOURCES / PRECOMPILED}",
            ]
    lines += [
        f"build {library}: link {' '.join(map(str, objects))} | {BUILD / 'exports.map'}",
        f"  options = -Wl,-soname,{SONAME} -Wl,--version-script={BUILD / 'exports.map'}",
    ]
    lines += [
        f"build {BUILD / CUDART}: link {' '.join(map(str, objects))} | {BUILD / 'cudart.map'}",
        f"  options = -Wl,-soname,{CUDART} -Wl,--version-script={BUILD / 'cudart.map'}",
    ]
    torch_object = BUILD / "torch_allocator.o"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    lines += [
        f"build {torch_object}: compile {TORCH_SOURCE}",
        f"  flags = {FLAGS} -std=c++20 {abi}",
        "  includes = -isystem $torch/include",
        f"build {torch_library}: link {torch_object}",
        "  options = -L$torch/lib -lc10",  # torch has loaded it already
    ]
    return "\n".join(lines) + "\n"


def _run(*targets: Path, quiet: bool = True) -> None:
    """Brings the targets up to date. A lock makes other processes that build at the same time wait.

    ``quiet``: shows the compiler's output only if it fails. Raises RuntimeError then.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, version in (("exports.map", VERSION), ("cudart.map", CUDART)):
            write_if_changed(BUILD / name, f"{version} {{ global: {EXPORTED}; local: *; }};\n")
        write_if_changed(BUILD / "build.ninja", rules(*_libraries()))
        command = [ninja(), "-C", BUILD, *targets]
        # ninja inherits the lock, so that it stays held if this process is killed and ninja goes on.
        done = subprocess.run(command, capture_output=quiet, text=True, pass_fds=[lock.fileno()])
    if done.returncode != 0:
        said = f"\n{done.stdout[-8000:]}{done.stderr[-2000:]}" if quiet else " the compiler's message stands above"
        raise RuntimeError(f"building the emulator failed:{said}")


def _libraries() -> tuple[Path, Path]:
    return BUILD / f"_emulator{sysconfig.get_config_var('EXT_SUFFIX')}", BUILD / "libtorch_allocator.so"


@functools.cache
def build(quiet: bool = True) -> tuple[Path, Path]:
    """Brings both libraries up to date, and returns the paths of the emulator and of the torch allocator."""
    _run(*_libraries(), quiet=quiet)
    return _libraries()


def build_cudart() -> Path:
    """Brings the library that replaces CUDA's libcudart up to date, and returns its path."""
    _run(BUILD / CUDART)
    return BUILD / CUDART


def load() -> ModuleType:
    """Builds the C++ library if it is not up to date, and returns it as a module.

    If torch has loaded the library that replaces libcudart, returns that one, so that the process has one device only.
    """
    cudart = BUILD / CUDART
    with open("/proc/self/maps") as maps:
        path = cudart if any(line.rstrip().endswith(str(cudart)) for line in maps) else build()[0]
    loader = importlib.machinery.ExtensionFileLoader("_emulator", str(path))  # whatever the file's suffix
    spec = importlib.util.spec_from_file_location("_emulator", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def load_torch_allocator() -> ctypes.CDLL:
    """Returns the library with ``start_tracking`` and ``stop_tracking``, which switch torch's CPU allocator."""
    import torch  # noqa: F401  (loads the libraries that this one needs)

    library = ctypes.CDLL(str(build()[1]))
    library.start_tracking.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.start_tracking.restype = library.stop_tracking.restype = None
    return library


if __name__ == "__main__":
    print(*build())
