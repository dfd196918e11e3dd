"""The native library: its ninja file, and the run that makes it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from native_build.cuda import CudaToolkit, check_host_compiler, find_nvcc
from native_build.errors import BuildError
from native_build.instances import Instance, instances_for
from native_build.targets import parse_targets
from native_build.tools import find_cxx, find_ninja, find_torch, host_compiler, num_jobs

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_NAME = "libfastattn.so"
NAMESPACE = "fastattn"

# The oldest torch that can load the library, 2.10: one byte for each number, see torch/headeronly/version.h.
TORCH_TARGET_VERSION = "0x020a000000000000"


def ninja_path(path: Path) -> str:
    """``path`` as an input or output in a ninja file."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def shell(arguments: Iterable[str | Path]) -> str:
    """``arguments`` as a command line in a ninja file."""
    return shlex.join(map(str, arguments)).replace("$", "$$")


def write_if_changed(path: Path, text: str) -> None:
    """Leaves an unchanged file and its time alone."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


@dataclass(frozen=True)
class NativeBuild:
    """All that decides what the native library becomes. ``toolkit`` is None in a build without CUDA kernels.

    With ``emulated_runtime``, a library that stands in for the CUDA runtime, this is the build of the tests' emulator:
    kernels are PTX alone, with the lines of their sources, and the ops are registered for CPU tensors, or with
    ``takes_cuda_tensors`` as in every other build. Both take their kernels from the same ``output``.

    ``namespace``: that of the operators in ``torch.ops``. Only ``bindings.o`` depends on it: a library with another one
    takes every other object from the same ``output`` as it is.
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

    @property
    def architectures(self) -> list[str]:
        """Those that kernels in the library are written for."""
        return list(self.code)

    @property
    def code(self) -> dict[str, list[str]]:
        """Architecture → what is embedded for its kernels: for every one of them, or some."""
        found: dict[str, dict[str, None]] = {}
        for instance in self.instances:
            found.setdefault(instance.architecture, {}).update(dict.fromkeys(instance.code))
        return {architecture: list(code) for architecture, code in found.items()}

    @property
    def own_output(self) -> Path:
        """The folder of the library and of what depends on the namespace."""
        return self.api_output if self.namespace == NAMESPACE else self.output / self.namespace

    @property
    def api_output(self) -> Path:
        """The folder of what depends on the tensors that the ops take."""
        return self.output / "cuda_tensors" if self.takes_cuda_tensors else self.output

    def description(self) -> dict[str, object]:
        """What ``fastattn_build_info()`` of the library returns, as JSON."""
        nvcc = self.toolkit.version if self.toolkit else None
        return {
            "version": self.version,
            "archs": self.architectures,
            "code": self.code,
            "cuda": ".".join(nvcc.split(".")[:2]) if nvcc else None,
            "nvcc": nvcc,
            "torch": importlib.metadata.version("torch"),
        }

    def ninja_file(self) -> str:
        """The text of build.ninja: one edge per source file, and one that links them."""
        include: list[str | Path] = ["-I", self.source]
        defines: list[str] = []
        cuda_libraries: list[str | Path] = []
        system_include: list[str | Path] = ["-isystem", self.torch / "include"]
        if self.toolkit:
            defines += ["-DFASTATTN_WITH_CUDA", *(f"-DFASTATTN_ARCH_{name.upper()}" for name in self.architectures)]
            system_include += ["-isystem", self.toolkit.include]
            cuda_libraries = [self.toolkit.library / "libcudart_static.a", "-ldl", "-lrt", "-lpthread"]
        api_defines = list(defines)
        if self.emulated_runtime:
            api_defines += [] if self.takes_cuda_tensors else ["-DFASTATTN_EMULATED"]
            cuda_libraries = [self.emulated_runtime]
        # Assertions carry their file's name: keep the paths of this machine out of the library.
        names = [f"-ffile-prefix-map={folder}/=" for folder in (self.source, self.torch / "include")]
        build_info = json.dumps(json.dumps(self.description()))
        cxx_flags: list[str | Path] = [
            *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
            *("-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra", "-Werror=return-type", *names),
            *(f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", f"-DFASTATTN_BUILD_INFO={build_info}", *api_defines),
            *(*include, *system_include),
        ]
        link_flags = [
            # All that is undefined must come from the libraries named here: nothing from Python, and nothing from
            # torch's CUDA libraries, which a CPU-only torch lacks.
            *("-shared", "-Wl,-z,defs", "-Wl,--as-needed", "-Wl,--strip-all"),
            # Without kernels no op reaches the functions that launch them: they go, with what they would need.
            "-Wl,--gc-sections",
            # What is exported is what python/fastattn/native.py asks.
            *(f"-Wl,--version-script={self.output / 'exports.map'}", f"-Wl,-soname,{LIBRARY_NAME}"),
        ]
        # No run path: at run time torch has loaded its library already, and the soname finds it.
        libraries: list[str | Path] = [*cuda_libraries, "-L", self.torch / "lib", "-l:libtorch_cpu.so"]
        lines = [
            "ninja_required_version = 1.5",
            "rule cxx",
            f"  command = {shell(self.cxx)} -MD -MF $out.d {shell(cxx_flags)} $defines -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = C++ $in",
            "rule link",
            f"  command = {shell(self.cxx)} {shell(link_flags)} @$out.rsp {shell(libraries)} -o $out",
            "  rspfile = $out.rsp",
            "  rspfile_content = $in",
            "  description = link $out",
        ]
        if self.toolkit:
            nvcc_flags: list[str | Path] = [
                *(self.toolkit.nvcc, "-ccbin", host_compiler(self.cxx)),
                *("-std=c++17", "-O3", "--expt-relaxed-constexpr"),
                *("-Xcompiler", ",".join(["-fPIC", "-fvisibility=hidden", "-Wall", names[0]])),
                *(*defines, *include),
            ]
            if self.emulated_runtime:
                nvcc_flags += ["--no-compress", "-lineinfo"]
            lines += [
                "rule cuda",
                f"  command = {shell(nvcc_flags)} $defines $gencode -MD -MF $out.d -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = CUDA $out",
            ]
        objects = [ninja_path(self.own_output / "bindings.o")]
        lines += [f"build {objects[0]}: cxx {ninja_path(self.source / 'bindings.cpp')}"]
        lines += [f"  defines = -DFASTATTN_NAMESPACE={self.namespace}"]
        for path in sorted(self.source.glob("api/*.cpp")):
            objects.append(ninja_path(self.api_output / path.relative_to(self.source).with_suffix(".o")))
            lines += [f"build {objects[-1]}: cxx {ninja_path(path)}"]
        for instance in self.instances:
            objects.append(ninja_path(self.output / instance.object_path))
            gencodes = instance.gencodes(instance.ptx if self.emulated_runtime else None)
            lines += [
                f"build {objects[-1]}: cuda {ninja_path(self.source / instance.source)}",
                f"  gencode = {shell([part for each in gencodes for part in ('-gencode', each)])}",
                f"  defines = {shell(instance.defines)}",
            ]
        library, exports = ninja_path(self.own_output / LIBRARY_NAME), ninja_path(self.output / "exports.map")
        return "\n".join([*lines, f"build {library}: link {' '.join(objects)} | {exports}", ""])

    def run(self, quiet: bool = False) -> Path:
        """Compiles what has changed since the last call and returns the library's path.

        ``quiet``: what the compilers say is shown only where they fail.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        write_if_changed(self.output / "exports.map", "{ global: fastattn_*; local: *; };\n")
        ninja_file = self.own_output / "build.ninja"
        ninja_file.parent.mkdir(exist_ok=True)
        write_if_changed(ninja_file, self.ninja_file())
        command = [find_ninja(), "-C", str(self.output), "-f", str(ninja_file), "-j", num_jobs(os.environ)]
        result = subprocess.run(command, capture_output=quiet, text=True)
        if result.returncode:
            said = f"the compiler says:\n\n{result.stdout}" if quiet else "the compiler's own message stands above."
            raise BuildError(f"the native library did not compile; {said}")
        return self.own_output / LIBRARY_NAME


def configure(version: str, environ: Mapping[str, str]) -> NativeBuild:
    """Finds the tools and decides what to compile."""
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
        output=ROOT / "build" / "native",
        version=version,
        cxx=cxx,
        torch=torch,
        toolkit=toolkit,
        instances=instances if toolkit else [],
    )
