"""Finds the CUDA toolkit, and asks its nvcc what it can do."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from native_build.errors import WITHOUT_CUDA, BuildError
from native_build.instances import Instance


def this_site_packages() -> list[str]:
    """Returns the folders where this Python finds installed packages, most specific first."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), *user]


def find_nvcc(
    environ: Mapping[str, str] = os.environ,
    site_packages: Iterable[str | Path] | None = None,
    default_toolkit: Path = Path("/usr/local/cuda"),
) -> Path | None:
    """Returns the first nvcc in CUDA_HOME, PATH, the toolkit's usual folder and this Python's wheels, else None."""
    folders = [*environ.get("PATH", "").split(os.pathsep), str(default_toolkit / "bin")]
    if environ.get("CUDA_HOME"):
        folders.insert(0, str(Path(environ["CUDA_HOME"]) / "bin"))
    for packages in this_site_packages() if site_packages is None else site_packages:
        # The wheels of CUDA 13 install a whole toolkit here, but not on PATH.
        folders += map(str, sorted(Path(packages).glob("nvidia/cu[0-9][0-9]/bin"), reverse=True))
    found = shutil.which("nvcc", path=os.pathsep.join(filter(None, folders)))
    return Path(found) if found else None


@dataclass(frozen=True)
class CudaToolkit:
    """Holds an nvcc and the folders of its headers and of the static CUDA runtime."""

    nvcc: Path
    version: str
    include: Path
    library: Path

    @property
    def compress(self) -> list[str]:
        """Returns nvcc's options for the smallest embedded code that all drivers for this major CUDA version load."""
        # This mode uses zstd, which came with CUDA 12.8: drivers of earlier CUDA 12 cannot read it.
        mode = ["-Xfatbin", "-compress-mode=size"] if int(self.version.partition(".")[0]) >= 13 else []
        return ["-Xfatbin", "-compress-all", *mode]

    @classmethod
    def of(cls, nvcc: Path) -> CudaToolkit:
        """Returns the toolkit of ``nvcc``, which may be a link or a script; raises BuildError if it is incomplete."""
        release = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
        version = re.search(r"\bV(\d+\.\d+\.\d+)", release.stdout)
        dryrun = subprocess.run([nvcc, "--dryrun", "-c", "none.cu"], capture_output=True, text=True)
        top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
        if not version or not top:
            raise BuildError(f"{nvcc} does not work: {(release.stderr or dryrun.stderr).strip()}")
        root = Path(top[1].strip()).resolve()
        # A toolkit from an installer has lib64; the wheels on PyPI have lib.
        libraries = [folder for folder in (root / "lib64", root / "lib") if (folder / "libcudart_static.a").exists()]
        if not (root / "include" / "cuda_runtime.h").exists() or not libraries:
            raise BuildError(
                f"the CUDA toolkit of {nvcc} is incomplete: {root} lacks include/cuda_runtime.h or libcudart_static.a. "
                f"Add the CUDA runtime's development files, or set CUDA_HOME to a complete toolkit, or {WITHOUT_CUDA}."
            )
        return cls(nvcc=nvcc, version=version[1], include=root / "include", library=libraries[0])


def check_host_compiler(toolkit: CudaToolkit, cxx: str, instances: Sequence[Instance]) -> None:
    """Raises BuildError if this nvcc does not support the C++ compiler or an instance's architecture."""
    gencodes = list(dict.fromkeys(each for instance in instances for each in instance.gencodes()))
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cu"
        probe.write_text("__global__ void probe() {}\n")
        options = ["-ccbin", cxx, *(f"-gencode={each}" for each in gencodes)]
        command: list[str | Path] = [toolkit.nvcc, *options, "-c", probe, "-o", probe.with_suffix(".o")]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(
            f"nvcc {toolkit.version} ({toolkit.nvcc}) does not compile for {' and '.join(gencodes)} "
            f"with the C++ compiler {cxx}:\n\n{(result.stderr or result.stdout).strip()}\n\n"
            "Set CXX to a compiler that this nvcc accepts, or CUDA_HOME to a toolkit that accepts this compiler, or "
            f"{WITHOUT_CUDA}."
        )
