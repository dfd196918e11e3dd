"""Writes the ninja file of the native library, and runs it.

    python -m native_build.library

This command builds the library in build/native, as setup.py does. csrc/ must be on PYTHONPATH.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from native_build import cached
from native_build.cuda import CudaToolkit, check_host_compiler, find_nvcc
from native_build.errors import BuildError
from native_build.instances import Instance, all_instances, instances_for
from native_build.targets import parse_targets
from native_build.tools import find_cxx, find_ninja, find_torch, host_compiler, num_jobs, version_of

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_NAME = "libfastattn.so"
MACHINE_CODE = Path(__file__).with_name("machine_code.py")
CACHED = Path(__file__).with_name("cached.py")
NAMESPACE = "fastattn"

# The oldest torch that can load the library: 2.10, with one byte for each number (torch/headeronly/version.h).
TORCH_TARGET_VERSION = "0x020a000000000000"


def ninja_path(path: Path) -> str:
    """Returns ``path`` as an input or output in a ninja file."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def shell(arguments: Iterable[str | Path]) -> str:
    """Returns ``arguments`` as a command line in a ninja file."""
    return shlex.join(map(str, arguments)).replace("$", "$$")


def write_if_changed(path: Path, text: str) -> None:
    """Writes ``text`` unless the file holds it already, so that its modification time stays."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


@dataclass(frozen=True)
class NativeBuild:
    """Describes a native library to build. ``toolkit`` is None in a build without CUDA kernels.

    All libraries take their kernels and most other objects from the same ``output``, where each object is compiled
    once. An instance has two objects: one with only PTX and line information, and one with the instance's ``code``
    instead. ``variant`` is the folder in ``output`` for the library and for the objects that no other library uses.

    ``emulated_runtime`` is a library that replaces the CUDA runtime in a build for the tests' emulator, which runs the
    PTX. Ops are then registered for CPU tensors, unless ``takes_cuda_tensors``.

    ``namespace`` is the namespace of the operators in ``torch.ops``.
    """

    source: Path
    output: Path
    version: str
    cxx: Sequence[str]
    torch: Path
    toolkit: CudaToolkit | None
    instances: Sequence[Instance]
    emulated_runtime: Path | None = None
    takes_cuda_tensors: bool = False
    namespace: str = NAMESPACE
    variant: str = ""

    @property
    def code(self) -> dict[str, list[str]]:
        """Maps each architecture to all code that any of its kernels has."""
        found: dict[str, dict[str, None]] = {}
        for instance in self.instances:
            found.setdefault(instance.architecture, {}).update(dict.fromkeys(instance.code))
        return {architecture: list(code) for architecture, code in found.items()}

    @property
    def library(self) -> Path:
        return self.output / self.variant / LIBRARY_NAME

    def description(self) -> dict[str, object]:
        """Returns the content of the JSON that ``fastattn_build_info()`` of the library returns."""
        nvcc = self.toolkit.version if self.toolkit else None
        return {
            "version": self.version,
            "archs": list(self.code),
            "code": self.code,
            "cuda": ".".join(nvcc.split(".")[:2]) if nvcc else None,
            "nvcc": nvcc,
            "torch": importlib.metadata.version("torch"),
        }

    def ninja_file(self) -> str:
        """Returns build.ninja: one edge per source file, one per instance with machine code, one that links them.

        Its outputs are relative to ``output``. It also has edges for instances that the library lacks: without them,
        ninja would sometimes forget which headers the objects of these instances were made from.
        """
        include: list[str | Path] = ["-I", self.source]
        cuda_libraries: list[str | Path] = []
        system_include: list[str | Path] = ["-isystem", self.torch / "include"]
        if self.toolkit:
            system_include += ["-isystem", self.toolkit.include]
            cuda_libraries = [self.toolkit.library / "libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
        if self.emulated_runtime:
            cuda_libraries = [self.emulated_runtime]
        # Assertions contain the name of their source file. These options keep this machine's paths out of the library.
        names = [f"-ffile-prefix-map={folder}/=" for folder in (self.source, self.torch / "include")]
        cxx_flags: list[str | Path] = [
            *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
            # g++ 12 warns that torch's own optional tensors are uninitialised where they are destroyed.
            *("-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
            *("-Werror=return-type", *names),
            *(f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", *include, *system_include),
        ]
        link_flags = [
            # Undefined symbols must come from the libraries named here: nothing from Python, and nothing from
            # torch's CUDA libraries, which a CPU-only torch lacks.
            *("-shared", "-Wl,-z,defs", "-Wl,--as-needed", "-Wl,--strip-all", "-Wl,--gc-sections"),
            # Export only the functions that python/fastattn/native.py calls.
            *("-Wl,--version-script=exports.map", f"-Wl,-soname,{LIBRARY_NAME}"),
        ]
        # A run path is not needed: at run time torch has loaded libtorch_cpu.so already, and its soname finds it.
        libraries: list[str | Path] = [*cuda_libraries, "-L", self.torch / "lib", "-l:libtorch_cpu.so"]
        python = [os.path.realpath(sys.executable), "-I"]
        toolkit = f"nvcc {self.toolkit.version}" if self.toolkit else "no nvcc"
        about = f"{version_of(*self.cxx)}, {toolkit}"
        about_torch = f"{about}, torch {importlib.metadata.version('torch')}"
        lines = [
            "ninja_required_version = 1.5",
            f"cached = {shell([*python, CACHED])}",
            "rule cxx",
            f"  command = $cached $out {shell([about_torch])} $in -- {shell(self.cxx)} {shell(cxx_flags)} "
            "$defines -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = C++ $out",
            "rule link",
            f"  command = {shell(self.cxx)} {shell(link_flags)} @$out.rsp {shell(libraries)} -o $out",
            "  rspfile = $out.rsp",
            "  rspfile_content = $in",
            "  description = link $out",
        ]
        build_info = json.dumps(json.dumps(self.description()))
        key = "CPU" if self.emulated_runtime and not self.takes_cuda_tensors else "CUDA"
        defines = {
            "bindings.cpp": [
                *(f"-DFASTATTN_NAMESPACE={self.namespace}", f"-DFASTATTN_DISPATCH_KEY={key}"),
                *(["-DFASTATTN_WITH_CUDA"] if self.toolkit else []),
            ],
            "build_info.cpp": [f"-DFASTATTN_BUILD_INFO={build_info}"],
        }
        objects = []
        for name, own_defines in defines.items():
            objects.append(ninja_path(Path(self.variant, name).with_suffix(".o")))
            lines += [f"build {objects[-1]}: cxx {ninja_path(self.source / name)}", f"  defines = {shell(own_defines)}"]
        if self.toolkit:
            nvcc: list[str | Path] = [self.toolkit.nvcc, "-ccbin", host_compiler(self.cxx)]
            nvcc_flags: list[str | Path] = [
                # -O1 is enough for host code that only launches. Line information and no compression let the emulator
                # read the PTX and name source lines in its messages.
                *("-std=c++20", "-O1", "--expt-relaxed-constexpr", "-lineinfo", "--no-compress"),
                *("-Xcompiler", ",".join(["-fPIC", "-fvisibility=hidden", "-Wall", names[0]]), *include),
            ]
            lines += [
                "rule cuda",
                f"  command = $cached $out {shell([about])} $in -- {shell([*nvcc, *nvcc_flags])} "
                "$defines $gencode -MD -MF $out.d -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = CUDA $out",
                "rule machine_code",
                f"  command = $cached $out {shell([about])} $in {shell([MACHINE_CODE])} -- "
                f"{shell([*python, MACHINE_CODE])} $in $out $gencode -- {shell([*nvcc, *self.toolkit.compress])}",
                "  description = machine code $out",
            ]
            for path in sorted(
                path for room in ("api", "host", "scheduler") for path in self.source.glob(f"{room}/*.cpp")
            ):
                objects.append(ninja_path(path.relative_to(self.source).with_suffix(".o")))
                lines += [f"build {objects[-1]}: cxx {ninja_path(path)}"]
            for instance in all_instances(self.source):
                lines += [
                    f"build {ninja_path(instance.object_path)}: cuda {ninja_path(self.source / instance.source)}",
                    f"  gencode = {shell(f'-gencode={each}' for each in instance.gencodes(instance.ptx))}",
                    f"  defines = {shell(instance.defines)}",
                ]
            for instance in self.instances:
                objects.append(ninja_path(instance.object_path))
                if not self.emulated_runtime:
                    ptx, objects[-1] = objects[-1], ninja_path(instance.machine_code_path)
                    lines += [
                        f"build {objects[-1]}: machine_code {ptx} | {ninja_path(MACHINE_CODE)}",
                        f"  gencode = {shell(instance.gencodes())}",
                    ]
        library = ninja_path(self.library.relative_to(self.output))
        return "\n".join([*lines, f"build {library}: link {' '.join(objects)} | exports.map", ""])

    def run(self, quiet: bool = False) -> Path:
        """Compiles what has changed since the last call and returns the library's path.

        If several processes build in ``output``, they do so one after another. With ``quiet``, the compilers' output is
        shown only if they fail. Raises BuildError.
        """
        self.library.parent.mkdir(parents=True, exist_ok=True)
        with open(self.output / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_if_changed(self.output / "exports.map", "{ global: fastattn_*; local: *; };\n")
            ninja_file = self.library.with_name("build.ninja")
            write_if_changed(ninja_file, self.ninja_file())
            command: list[str | Path] = [find_ninja(), "-C", self.output, "-f", ninja_file, "-j", num_jobs(os.environ)]
            target = self.library.relative_to(self.output)
            # ninja inherits the lock, and keeps it if this process is killed.
            result = subprocess.run([*command, target], capture_output=quiet, text=True, pass_fds=[lock.fileno()])
        cached.forget_unused()
        if result.returncode:
            said = f"the compiler says:\n\n{result.stdout}" if quiet else "the compiler's own message stands above."
            raise BuildError(f"the native library did not compile; {said}")
        return self.library


def configure(version: str, environ: Mapping[str, str]) -> NativeBuild:
    """Finds the tools and returns the build for FASTATTN_ARCHS of ``environ``; raises BuildError."""
    targets = parse_targets(environ.get("FASTATTN_ARCHS", "80;90a"), environ)
    torch = find_torch()
    cxx = find_cxx(environ)
    instances = instances_for(ROOT / "csrc", targets)
    nvcc = find_nvcc(environ) if instances else None
    toolkit = CudaToolkit.of(nvcc) if nvcc else None
    if toolkit:
        check_host_compiler(toolkit, host_compiler(cxx), instances)
    return NativeBuild(
        source=ROOT / "csrc",
        output=ROOT / "build" / ("native" if toolkit else "native-cpu"),
        version=version,
        cxx=cxx,
        torch=torch,
        toolkit=toolkit,
        instances=instances if toolkit else [],
    )


if __name__ == "__main__":
    print(configure(importlib.metadata.version("fastattn"), os.environ).run())
