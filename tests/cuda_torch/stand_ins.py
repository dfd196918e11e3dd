"""Makes libraries that stand in for NVIDIA's, with which torch's CUDA build is linked.

The loader needs every symbol. The CUDA runtime and the driver are the emulator. In all other libraries (cuBLAS, cuDNN,
NCCL, …) each function returns an error, and prints its name where FASTATTN_TRACE_STAND_INS is set.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

DRIVER = "libcuda.so.1"

# Prefixes of functions whose symbol versions do not name a library → the first letters of their library's name.
_PREFIXES = {
    "cusparseLt": "libcusparseLt.",
    "cuFile": "libcufile.",
    "nccl": "libnccl.",
    "nvshmem": "libnvshmem_host.",
    "cudnn": "libcudnn.",
    "cupti": "libcupti.",
}

_SOURCE = """
#include <stdio.h>
#include <stdlib.h>
static int is_not_here(const char* name) {{
    if (getenv("FASTATTN_TRACE_STAND_INS")) fprintf(stderr, "%s was called: {library} is a stand-in\\n", name);
    return 1;
}}
"""


# Functions whose results matter: torch requires the release of cuDNN that it was built with, and prints CUPTI's
# results.
_ANSWERS = {
    "cudnnGetVersion": "long cudnnGetVersion(void) { return {cudnn}; }",
    "cudnnGetProperty": """int cudnnGetProperty(int which, int* value) {
        *value = which == 0 ? {cudnn} / 10000 : which == 1 ? {cudnn} / 100 % 100 : {cudnn} % 100;
        return 0;
    }""",
    "cuptiGetResultString": """int cuptiGetResultString(int code, const char** text) {
        *text = "CUPTI is a stand-in";
        return 0;
    }""",
}


def _lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed(libraries: Iterable[Path]) -> set[str]:
    """Returns the names of the libraries that ``libraries`` are linked with."""
    found = set()
    for library in libraries:
        for line in _lines("readelf", "-d", library):
            if "(NEEDED)" in line:
                found.add(line.partition("[")[2].rstrip("]"))
    return found


def wanted(libraries: list[Path]) -> dict[str, dict[str, str]]:
    """Returns for each library of NVIDIA's the functions that ``libraries`` need, with symbol versions or ""."""
    own = {library.name for library in libraries}
    names = {name for name in needed(libraries) - own if re.match(r"lib(cu|nccl|nv)", name)}
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for line in _lines("nm", "-D", "--undefined-only", "--with-symbol-versions", *libraries):
        if not line.strip() or line.endswith(":"):
            continue
        symbol, _, version = line.split()[-1].partition("@")
        owner: str | None = version
        if version not in names:
            start = next((file for prefix, file in _PREFIXES.items() if symbol.startswith(prefix)), None)
            owner = next((name for name in names if start is not None and name.startswith(start)), None)
        if owner is not None:
            found[owner][symbol] = version
    return found


def _compile(library: Path, source: str, *options: str | Path) -> None:
    subprocess.run(
        [
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            "-x",
            "c",
            "-",
            "-x",
            "none",
            "-o",
            library,
            f"-Wl,-soname,{library.name}",
            *options,
        ],
        input=source,
        text=True,
        check=True,
    )


def make(libraries: list[Path], cudart: Path, folder: Path, cudnn: int) -> None:
    """Makes in ``folder`` all libraries that ``libraries`` are linked with; the runtime is a link to ``cudart``.

    ``cudnn``: the version that cuDNN reports, 91900 for 9.19.0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runtime = folder / cudart.name
    runtime.unlink(missing_ok=True)
    runtime.symlink_to(cudart)
    for name, functions in wanted(libraries).items():
        if name in (cudart.name, DRIVER):
            continue
        source = _SOURCE.format(library=name)
        for symbol in functions:
            answer = f'int {symbol}(void) {{ return is_not_here("{symbol}"); }}'
            source += _ANSWERS.get(symbol, answer).replace("{cudnn}", str(cudnn)) + "\n"
        by_version = defaultdict(list)
        for symbol, version in functions.items():
            by_version[version].append(symbol)
        options: list[str | Path] = []
        if any(by_version):
            versions = folder / "versions.map"
            nodes = (
                f"{version} {{ global: {'; '.join(symbols)}; }};" for version, symbols in by_version.items() if version
            )
            versions.write_text("\n".join(nodes) + "\n")
            options = [f"-Wl,--version-script={versions}"]
        _compile(folder / name, source, *options)
    (folder / "versions.map").unlink(missing_ok=True)
    # The driver's functions are in the runtime's library, which this library is linked with.
    _compile(folder / DRIVER, "", "-Wl,--no-as-needed", runtime)
