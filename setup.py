"""Builds fastattn: one native library, compiled by ninja, that serves every Python >= 3.10 and every torch >= 2.10.

C++ sources (op schemas and argument checks) need a C++ compiler alone. CUDA kernels also need nvcc; without one,
the package is built without them. Environment variables:

    FASTATTN_ARCHS   GPU architectures of the CUDA kernels, default "80;90a"; "none" builds without CUDA kernels
    CUDA_HOME        CUDA toolkit whose nvcc is used first
    CXX              C++ compiler, also nvcc's host compiler
    MAX_JOBS         how many compilers run at once, by default one per core and 2 GiB of memory
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
LIBRARY_NAME = "libfastattn.so"

# The oldest torch that can load the library, 2.10: one byte for each number, see torch/headeronly/version.h.
TORCH_TARGET_VERSION = "0x020a000000000000"


WITHOUT_CUDA = "set FASTATTN_ARCHS=none to build without CUDA C++ kernels"


class BuildError(SystemExit):
    """Ends the build with a sentence for the person who started it, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nfastattn: {message}\n")


# --- Architectures ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A value of FASTATTN_ARCHS: the instance files that it compiles, and what nvcc embeds for it."""

    name: str
    instance_suffix: str
    gencode: str

    @property
    def ptx_gencode(self) -> str:
        """PTX alone."""
        return f"arch=compute_{self.name},code=compute_{self.name}"


ARCHITECTURES = (
    # PTX beside the machine code: GPUs without kernels of their own run it, compiled by the driver.
    Architecture("80", "_sm80.cu", "arch=compute_80,code=[sm_80,compute_80]"),
    # Instructions of "a" targets exist on that GPU alone, so PTX would help no other.
    Architecture("90a", "_sm90.cu", "arch=compute_90a,code=sm_90a"),
)


def parse_architectures(text: str) -> list[Architecture]:
    """The architectures that ``text`` (a value of FASTATTN_ARCHS) names, in the order of ``ARCHITECTURES``."""
    names = [name for name in re.split(r"[;,\s]+", text) if name]
    if names == ["none"]:
        return []
    known = [architecture.name for architecture in ARCHITECTURES]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise BuildError(
            f"FASTATTN_ARCHS={text!r}: expected one or more of {', '.join(known)}, separated by semicolons, or none; "
            f"got {', '.join(unknown) or 'nothing'}. Code for 80 also runs on every later GPU."
        )
    return [architecture for architecture in ARCHITECTURES if architecture.name in names]


def instance_files(csrc: Path, architectures: Sequence[Architecture]) -> dict[Path, Architecture]:
    """The kernel files ``csrc/*/instances/*.cu`` to compile, each with the one architecture that it is written for."""
    instances = {}
    for path in sorted(csrc.glob("*/instances/*.cu")):
        owner = [architecture for architecture in ARCHITECTURES if path.name.endswith(architecture.instance_suffix)]
        if not owner:
            suffixes = " or ".join(architecture.instance_suffix for architecture in ARCHITECTURES)
            raise BuildError(f"{path} must end in {suffixes}, which tells the architecture that it is compiled for.")
        if owner[0] in architectures:
            instances[path] = owner[0]
    return instances


# --- Tools ------------------------------------------------------------------------------------------------------------


def this_site_packages() -> list[str]:
    """Where this Python finds installed packages, most specific first."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), *user]


def find_nvcc(
    environ: Mapping[str, str] = os.environ,
    site_packages: Iterable[str | Path] | None = None,
    default_toolkit: Path = Path("/usr/local/cuda"),
) -> Path | None:
    """The first nvcc of: CUDA_HOME, PATH, the toolkit's usual folder, the registry wheels in this Python's packages."""
    folders = [*environ.get("PATH", "").split(os.pathsep), str(default_toolkit / "bin")]
    if environ.get("CUDA_HOME"):
        folders.insert(0, str(Path(environ["CUDA_HOME"]) / "bin"))
    for packages in this_site_packages() if site_packages is None else site_packages:
        # The wheels of CUDA 13 put a whole toolkit here, which nobody has on PATH.
        folders += map(str, sorted(Path(packages).glob("nvidia/cu[0-9][0-9]/bin"), reverse=True))
    found = shutil.which("nvcc", path=os.pathsep.join(filter(None, folders)))
    return Path(found) if found else None


@dataclass(frozen=True)
class CudaToolkit:
    """An nvcc and the folders of its headers and of the static CUDA runtime."""

    nvcc: Path
    version: str
    include: Path
    library: Path

    @classmethod
    def of(cls, nvcc: Path) -> CudaToolkit:
        """Asks ``nvcc`` for its version and its root: the file may be a link or a script that starts another."""
        release = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        version = re.search(r"\bV(\d+\.\d+\.\d+)", release.stdout)
        plan = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
        if not version or not top:
            raise BuildError(f"{nvcc} does not work: {(release.stderr or plan.stderr).strip()}")
        root = Path(top[1].strip()).resolve()
        # A toolkit installed as a whole has lib64; the registry wheels have lib.
        libraries = [folder for folder in (root / "lib64", root / "lib") if (folder / "libcudart_static.a").exists()]
        if not (root / "include" / "cuda_runtime.h").exists() or not libraries:
            raise BuildError(
                f"the CUDA toolkit of {nvcc} is incomplete: {root} lacks include/cuda_runtime.h or libcudart_static.a. "
                f"Add the CUDA runtime's development files, or set CUDA_HOME to a complete toolkit, or {WITHOUT_CUDA}."
            )
        return cls(nvcc=nvcc, version=version[1], include=root / "include", library=libraries[0])


def find_cxx(environ: Mapping[str, str]) -> list[str]:
    """The command of the C++ compiler, as a list: ``CXX`` may hold a launcher such as ccache before it."""
    if environ.get("CXX"):
        return shlex.split(environ["CXX"])
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name, path=environ.get("PATH")):
            return [path]
    raise BuildError("no C++ compiler found. Install one (for example the package g++), or set CXX to its command.")


def host_compiler(cxx: Sequence[str]) -> str:
    """The compiler in the command ``cxx``, as nvcc's -ccbin wants it: one program, no launcher before it."""
    return shutil.which(cxx[-1]) or cxx[-1]


def find_ninja() -> str:
    """The ninja of this environment's package, else the one on PATH."""
    found = shutil.which("ninja", path=sysconfig.get_path("scripts")) or shutil.which("ninja")
    if not found:
        raise BuildError("ninja is not installed. Run: pip install ninja")
    return found


def num_jobs(environ: Mapping[str, str]) -> str:
    """How many compilers run at once: a kernel's can take 2 GiB, and a machine out of memory helps nobody."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return environ.get("MAX_JOBS") or str(max(1, min(os.cpu_count() or 1, memory // 2**31)))


def find_torch() -> Path:
    """The folder of the installed torch, which is not imported: only its headers and libraries are used."""
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


def check_host_compiler(toolkit: CudaToolkit, cxx: str, architectures: Sequence[Architecture]) -> None:
    """Compiles an empty kernel: an nvcc supports a certain range of C++ compilers and of architectures."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text("__global__ void probe() {}\n")
        gencodes = [argument for architecture in architectures for argument in ("-gencode", architecture.gencode)]
        command = [str(toolkit.nvcc), "-ccbin", cxx, *gencodes, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(
            f"nvcc {toolkit.version} ({toolkit.nvcc}) does not compile for "
            f"{', '.join(architecture.name for architecture in architectures)} with the C++ compiler {cxx}:\n\n"
            f"{(result.stderr or result.stdout).strip()}\n\n"
            "Set CXX to a compiler that this nvcc accepts, or CUDA_HOME to a toolkit that accepts this compiler, or "
            f"{WITHOUT_CUDA}."
        )


# --- The build --------------------------------------------------------------------------------------------------------


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
    kernels are PTX alone, with the lines of their sources, and the ops are registered for CPU tensors.
    """

    source: Path
    output: Path
    version: str
    cxx: Sequence[str]
    torch: Path
    toolkit: CudaToolkit | None
    instances: Mapping[Path, Architecture]
    emulated_runtime: Path | None = None

    @property
    def architectures(self) -> list[str]:
        """Names of the architectures that have kernels in the library."""
        return [architecture.name for architecture in ARCHITECTURES if architecture in self.instances.values()]

    def description(self) -> dict[str, object]:
        """What ``fastattn_build_info()`` of the library returns, as JSON."""
        nvcc = self.toolkit.version if self.toolkit else None
        return {
            "version": self.version,
            "archs": self.architectures,
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
        if self.emulated_runtime:
            defines += ["-DFASTATTN_EMULATED"]
            cuda_libraries = [self.emulated_runtime]
        # Assertions carry their file's name: keep the paths of this machine out of the library.
        names = [f"-ffile-prefix-map={folder}/=" for folder in (self.source, self.torch / "include")]
        build_info = json.dumps(json.dumps(self.description()))
        cxx_flags: list[str | Path] = [
            *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
            *("-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra", "-Werror=return-type", *names),
            *(f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", f"-DFASTATTN_BUILD_INFO={build_info}", *defines),
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
            f"  command = {shell(self.cxx)} -MD -MF $out.d {shell(cxx_flags)} -c $in -o $out",
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
                f"  command = {shell(nvcc_flags)} -gencode $gencode -MD -MF $out.d -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = CUDA $in",
            ]
        objects = []
        for path in [self.source / "bindings.cpp", *sorted(self.source.glob("api/*.cpp")), *self.instances]:
            target = self.output / path.relative_to(self.source).with_suffix(".o")
            objects.append(ninja_path(target))
            if path in self.instances:
                architecture = self.instances[path]
                gencode = shell([architecture.ptx_gencode if self.emulated_runtime else architecture.gencode])
                lines += [f"build {objects[-1]}: cuda {ninja_path(path)}", f"  gencode = {gencode}"]
            else:
                lines += [f"build {objects[-1]}: cxx {ninja_path(path)}"]
        library, exports = ninja_path(self.output / LIBRARY_NAME), ninja_path(self.output / "exports.map")
        return "\n".join([*lines, f"build {library}: link {' '.join(objects)} | {exports}", ""])

    def run(self, quiet: bool = False) -> Path:
        """Compiles what has changed since the last call and returns the library's path.

        ``quiet``: what the compilers say is shown only where they fail.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        exported = ("fastattn_build_info", "fastattn_tiles", "fastattn_dealt_int8_matmul", "fastattn_dealt_decode")
        write_if_changed(self.output / "exports.map", f"{{ global: {'; '.join(exported)}; local: *; }};\n")
        write_if_changed(self.output / "build.ninja", self.ninja_file())
        command = [find_ninja(), "-C", str(self.output), "-j", num_jobs(os.environ)]
        result = subprocess.run(command, capture_output=quiet, text=True)
        if result.returncode:
            said = f"the compiler says:\n\n{result.stdout}" if quiet else "the compiler's own message stands above."
            raise BuildError(f"the native library did not compile; {said}")
        return self.output / LIBRARY_NAME


def configure(version: str, environ: Mapping[str, str]) -> NativeBuild:
    """Finds the tools and decides what to compile."""
    architectures = parse_architectures(environ.get("FASTATTN_ARCHS", "80;90a"))
    torch = find_torch()
    cxx = find_cxx(environ)
    instances = instance_files(ROOT / "csrc", architectures)
    nvcc = find_nvcc(environ) if instances else None
    toolkit = CudaToolkit.of(nvcc) if nvcc else None
    if toolkit:
        check_host_compiler(toolkit, host_compiler(cxx), architectures)
    return NativeBuild(
        source=ROOT / "csrc",
        output=ROOT / "build" / "native",
        version=version,
        cxx=cxx,
        torch=torch,
        toolkit=toolkit,
        instances=instances if toolkit else {},
    )


# --- The wheel's tag --------------------------------------------------------------------------------------------------

# The newest versions that manylinux_2_28 (PEP 600) allows a library to need: those of its oldest distribution.
MANYLINUX_2_28 = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


def needed_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """The highest version of each family (GLIBC, GLIBCXX, ...) that a 64-bit little-endian ELF library needs.

    Read from the section .gnu.version_r: System V ABI, symbol versioning (verneed and vernaux entries).
    """
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is not a 64-bit little-endian ELF file")
    section_table, *_, section_size, num_sections, _ = struct.unpack_from("<QIHHHHHH", data, 40)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_table + i * section_size) for i in range(num_sections)]
    newest: dict[str, tuple[int, ...]] = {}
    for _, kind, _, _, offset, _, link, num_needed, _, _ in sections:
        if kind != 0x6FFFFFFE:  # SHT_GNU_verneed
            continue
        names = sections[link][4]
        for _ in range(num_needed):
            _, num_entries, _, first_entry, next_needed = struct.unpack_from("<HHIII", data, offset)
            entry = offset + first_entry
            for _ in range(num_entries):
                _, _, _, name, next_entry = struct.unpack_from("<IHHII", data, entry)
                text = data[names + name : data.index(b"\0", names + name)].decode()
                family, _, version = text.rpartition("_")
                if re.fullmatch(r"\d+(\.\d+)*", version):
                    number = tuple(map(int, version.split(".")))
                    newest[family] = max(newest.get(family, ()), number)
                entry += next_entry
            offset += next_needed
    return newest


def wheel_platform(platform: str, needed: Mapping[str, tuple[int, ...]]) -> str:
    """``platform`` (such as linux_x86_64), or its manylinux_2_28 form where the needed versions allow that."""
    allowed = all(version <= MANYLINUX_2_28.get(family, ()) for family, version in needed.items())
    return re.sub(r"^linux_", "manylinux_2_28_", platform) if allowed else platform


# --- setuptools commands ----------------------------------------------------------------------------------------------


class BuildNative(build_ext):
    """Runs ninja and puts the library where setuptools expects the package's one extension."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY_NAME))

    def build_extension(self, extension: Extension) -> None:
        build = configure(self.distribution.get_version(), os.environ)
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build.run(), target)
        if build.toolkit:
            print(f"fastattn: CUDA C++ kernels for {', '.join(build.architectures)}, by nvcc {build.toolkit.version}")
        else:
            print("fastattn: built WITHOUT CUDA C++ kernels; `python -m fastattn` says what to do", file=sys.stderr)


class BuildPython(build_py):
    """Starts from an empty folder, so that a module that was deleted from the tree is not in the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "fastattn", ignore_errors=True)
        super().run()


class TaggedWheel(bdist_wheel):
    """A wheel for any Python 3 (the library uses no Python C API), for the platform that the library needs."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = ROOT / "build" / "native" / LIBRARY_NAME
        return "py3", "none", wheel_platform(platform, needed_versions(library)) if library.exists() else platform


if __name__ == "__main__":
    setup(
        packages=[*find_packages("python"), "fastattn.triton_kernels"],
        ext_modules=[Extension("fastattn.libfastattn", sources=[])],
        cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": TaggedWheel},
    )
