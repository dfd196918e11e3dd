"""Replaces the PTX in the object of a CUDA source by the machine code and PTX to embed in a library.

    python machine_code.py unit.o with_code.o arch=compute_80,code=[sm_80,compute_80] … -- nvcc option …

With this step, each kernel passes the compiler's front end once, however many libraries contain it. The PTX in unit.o
has line information and is not compressed (nvcc -lineinfo --no-compress); the code in with_code.o has neither lines nor
paths. The build fails if ptxas serialises the wgmma of a kernel, which costs most of the kernel's speed.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SECTION = ".nv_fatbin"
# The container that nvcc embeds; tests/emulator/src/runtime/fat_binary.cpp describes its layout.
CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of what follows
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of the header, of what follows, when compressed, …, arch
MAGIC, PTX = 0xBA55ED50, 1
# Matches ptxas's messages that it waits after each wgmma (C7510 and others: "Potential Performance Loss:
# wgmma.mma_async instructions are serialized due to …"), or adds a warpgroup.arrive that the source lacks (C7519).
WGMMA_ADVICE = re.compile(r"^.*\(C75\d\d\).*\b(?:serialized|injected)\b.*$", re.MULTILINE)


def entries(container: bytes) -> bytes:
    """Returns the entries of a container, with their headers."""
    magic, _, header_bytes, num_bytes = CONTAINER.unpack_from(container)
    if magic != MAGIC:
        raise SystemExit("nvcc wrote device code in a container that fastattn's build does not know")
    return container[header_bytes : header_bytes + num_bytes]


def ptx_texts(container: bytes) -> Iterator[str]:
    """Yields the PTX in a container, which must not be compressed."""
    rest = entries(container)
    while rest:
        kind, _, header_bytes, num_bytes, compressed_bytes, *_ = ENTRY.unpack_from(rest)
        if kind == PTX:
            if compressed_bytes:
                raise SystemExit("the PTX is compressed: this nvcc does not know --no-compress")
            yield rest[header_bytes : header_bytes + num_bytes].rstrip(b"\0").decode()
        rest = rest[header_bytes + num_bytes :]


def without_lines(ptx: str) -> str:
    """Returns the PTX as nvcc writes it without -lineinfo, except for empty lines."""
    ptx = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}$", "", ptx, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^\s*(\.(loc|file)\b.*)?\n", "", ptx, flags=re.MULTILINE)


def architecture(ptx: str) -> str:
    """Returns the architecture of PTX, for example ``80`` for compute_80."""
    target = re.search(r"^\.target sm_(\w+)", ptx, re.MULTILINE)
    if target is None:
        raise SystemExit("nvcc wrote PTX without a target")
    return target[1]


def assemble(ptx: Path, code: Path, gencode: str, nvcc: Sequence[str]) -> None:
    """Compiles ``ptx`` to ``code``; raises SystemExit if nvcc fails or serialises wgmma."""
    command = [*nvcc, "-gencode", gencode, "-fatbin", str(ptx), "-o", str(code)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="")
    if done.returncode:
        raise SystemExit(done.returncode)
    if advice := WGMMA_ADVICE.findall(done.stdout):
        raise SystemExit("ptxas serialises the wgmma of a kernel:\n" + "\n".join(advice))


def replace_code(unit: Path, result: Path, gencodes: Sequence[str], nvcc: Sequence[str], folder: Path) -> None:
    """Writes ``result``, ``unit`` with code for ``gencodes`` instead of its PTX; temporary files go to ``folder``."""
    section, ptx, code = folder / "section", folder / "unit.ptx", folder / "unit.fatbin"
    subprocess.run(["objcopy", f"--dump-section={SECTION}={section}", unit, folder / "unit.o"], check=True)
    container = section.read_bytes()
    texts = {architecture(text): text for text in ptx_texts(container)}
    embedded = b""
    for gencode in gencodes:
        ptx.write_text(without_lines(texts[gencode.partition(",")[0].removeprefix("arch=compute_")]))
        assemble(ptx, code, gencode, nvcc)
        embedded += entries(code.read_bytes())
    _, version, header_bytes, _ = CONTAINER.unpack_from(container)
    section.write_bytes(CONTAINER.pack(MAGIC, version, header_bytes, len(embedded)) + embedded)
    subprocess.run(["objcopy", f"--update-section={SECTION}={section}", unit, result], check=True)


if __name__ == "__main__":
    end = sys.argv.index("--")
    with tempfile.TemporaryDirectory() as temporary:
        replace_code(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:end], sys.argv[end + 1 :], Path(temporary))
