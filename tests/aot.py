"""Ahead-of-time compilation of the Triton kernels, without a GPU, and what the machine code says.

A module ``aot_<kernels>.py`` beside this one has a function ``builds() -> list[Build]``. This file, run as a program in
a process of its own (a process in which Triton's interpreter is on cannot compile), compiles the builds of the modules
that are named on its command line, and prints a JSON list of `Report` fields.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TENSOR_CORE = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "OMMA", "UTCQMMA")
JUMPS = ("BRA", "BSSY")
LOCAL_MEMORY = ("LDL", "STL")
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Build:
    """One compilation of ``kernel`` (a ``triton.jit`` function) for compute capability ``arch`` (80, 90, 100).

    ``types`` gives the type of every argument that is no constexpr, as Triton spells it, with ``:16`` where the
    launcher guarantees divisibility by 16 (``"*fp16:16"``, ``"i32"``, ``"fp32"``), or ``"none"`` for an absent tensor.
    ``constexprs`` are what the launcher passes by name, launch options included. ``shared_limit`` is in bytes.
    """

    name: str
    kernel: Any
    arch: int
    types: Mapping[str, str]
    constexprs: Mapping[str, Any]
    shared_limit: int


@dataclass(frozen=True)
class Report:
    """What came out: counts of instructions in the whole kernel and in its main loops (innermost loops with MMAs)."""

    name: str
    registers: int
    shared_bytes: int
    shared_limit: int
    num_warps: int
    tensor_core: dict[str, int]
    main_loops: list[int]  # instructions in each
    local_in_loops: int
    local_outside: int


def compile_build(build: Build) -> Any:
    """Triton's compiled kernel: ``.asm["cubin"]``, ``.metadata``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constexprs = dict(build.constexprs)
    options = {name: constexprs.pop(name) for name in OPTIONS if name in constexprs}
    signature, attributes = {}, {}
    for index, name in enumerate(build.kernel.arg_names):
        if name in constexprs:
            signature[name] = "constexpr"
            continue
        kind, _, divisible = build.types[name].partition(":")
        if kind == "none":
            signature[name], constexprs[name] = "constexpr", None
            continue
        signature[name] = kind
        if divisible:
            attributes[(index,)] = [["tt.divisibility", int(divisible)]]
    source = ASTSource(build.kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", build.arch, 32), options=options)


@functools.cache
def tool(name: str) -> Path:
    """One of the binary utilities that Triton's wheel carries."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def disassemble(cubin: bytes) -> tuple[list[str], int]:
    """Lines of SASS, labels (``.L_x_1:``) and instructions, and how many registers a thread has."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool("nvdisasm"), "-c", file.name], check=True, capture_output=True, text=True).stdout
        usage = subprocess.run(
            [tool("cuobjdump"), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    lines = []
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if re.match(r"^\.L[\w.]*:", line) or (line.endswith(";") and not line.startswith(".")):
            lines.append(line)
    return lines, int(registers.group(1))


def opcode(line: str) -> str:
    """``@!P0 HMMA.16816.F32 R4, …;`` → ``HMMA``."""
    words = line.replace("{", "").split()
    word = words[1] if words and words[0].startswith("@") and len(words) > 1 else (words or [""])[0]
    return word.rstrip(";").split(".")[0]


def loops(lines: list[str]) -> list[frozenset[int]]:
    """The lines of each natural loop: what reaches a backward branch without passing the label that it goes back to."""
    label = {line.rstrip(":"): index for index, line in enumerate(lines) if line.startswith(".L")}
    targets = [re.findall(r"\(?(\.L[\w.]*)\)?", line) if opcode(line) in JUMPS else [] for line in lines]
    before: list[list[int]] = [[] for _ in lines]
    for index, line in enumerate(lines):
        ends = opcode(line) in ("BRA", "EXIT", "RET", "BRX") and not line.startswith("@") and "," not in line
        if not ends and index + 1 < len(lines):
            before[index + 1].append(index)
        for name in targets[index]:
            before[label[name]].append(index)
    found: dict[int, set[int]] = {}
    for source, names in enumerate(targets):
        for header in (label[name] for name in names if label[name] < source):
            body, pending = found.setdefault(header, {header}), [source]
            while pending:
                line_index = pending.pop()
                if line_index not in body:
                    body.add(line_index)
                    pending += before[line_index]
    return [frozenset(body) for body in found.values() if 0 not in body]


def inspect(build: Build, kernel: Any) -> Report:
    lines, registers = disassemble(kernel.asm["cubin"])
    opcodes = [opcode(line) for line in lines]
    with_mma = [body for body in loops(lines) if any(opcodes[index] in TENSOR_CORE for index in body)]
    innermost = [body for body in with_mma if not any(other < body for other in with_mma)]
    inside = frozenset().union(*innermost)
    local = [index for index, op in enumerate(opcodes) if op in LOCAL_MEMORY]
    return Report(
        name=build.name,
        registers=registers,
        shared_bytes=kernel.metadata.shared,
        shared_limit=build.shared_limit,
        num_warps=kernel.metadata.num_warps,
        tensor_core={op: opcodes.count(op) for op in TENSOR_CORE if op in opcodes},
        main_loops=[len(body) for body in innermost],
        local_in_loops=sum(index in inside for index in local),
        local_outside=sum(index not in inside for index in local),
    )


def main(modules: list[str]) -> None:
    builds = [build for name in modules for build in importlib.import_module(name).builds()]
    with ThreadPoolExecutor(2) as pool:  # ptxas is a process of its own, and the compiler lets go of the GIL
        reports = list(pool.map(lambda build: inspect(build, compile_build(build)), builds))
    json.dump([asdict(report) for report in reports], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
