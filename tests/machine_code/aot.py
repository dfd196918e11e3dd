"""Compiles the Triton kernels ahead of time, without a GPU, and reports facts about their machine code.

Each module ``aot_<kernels>.py`` in this folder has a function ``builds() -> list[Build]``. ``aot.py aot_decode 80``
compiles that module's builds for GPUs 8.x (without the number all of them), and prints a JSON list of `Report` fields.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from emulator import static_facts

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Build:
    """One compilation of ``kernel`` (a ``triton.jit`` function) for compute capability ``arch`` (80, 90, 100).

    ``types`` maps every argument that is no constexpr to its type, as Triton spells it, with ``:16`` where the launcher
    guarantees divisibility by 16 (``"*fp16:16"``, ``"i32"``, ``"fp32"``), or ``"none"`` for an absent tensor. A tuple
    has a tuple of types, in which ``"1"`` is the number 1, a constant to Triton. ``constexprs`` are the arguments that
    the launcher passes by name, launch options included. ``shared_limit`` is in bytes.
    """

    name: str
    kernel: Any
    arch: int
    types: Mapping[str, str | tuple[str, ...]]
    constexprs: Mapping[str, Any]
    shared_limit: int


def each(value: Any, names: str) -> dict[str, Any]:
    """Returns the same type, or the same value of a constexpr, for each of the names, which spaces separate."""
    return dict.fromkeys(names.split(), value)


@dataclass(frozen=True)
class Report:
    """Facts about the compiled kernel: see `KernelFacts`."""

    name: str
    registers: int
    shared_bytes: int
    shared_limit: int
    num_warps: int
    tensor_core: dict[str, int]
    main_loops: list[int]  # instructions in each loop
    local_in_loops: int
    local_outside: int


def compile_build(build: Build) -> Any:
    """Returns Triton's compiled kernel, with ``.asm["cubin"]`` and ``.metadata``."""
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
        kind = build.types[name]
        if kind == "none":
            signature[name], constexprs[name] = "constexpr", None
            continue
        parts = kind if isinstance(kind, tuple) else (kind,)
        spelt = ["constexpr" if part == "1" else part.partition(":")[0] for part in parts]
        signature[name] = tuple(spelt) if isinstance(kind, tuple) else spelt[0]
        for i, part in enumerate(parts):
            path = (index, i) if isinstance(kind, tuple) else (index,)
            if part == "1":
                constexprs[path] = 1
            elif part.endswith(":16"):
                attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(build.kernel, signature, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", build.arch, 32), options=options)


def inspect(build: Build, kernel: Any) -> Report:
    (facts,) = static_facts.of_cubin(kernel.asm["cubin"]).values()
    return Report(
        name=build.name,
        registers=facts.registers,
        shared_bytes=kernel.metadata.shared,
        shared_limit=build.shared_limit,
        num_warps=kernel.metadata.num_warps,
        tensor_core=facts.tensor_core,
        main_loops=[len(facts.opcodes_of(body)) for body in facts.main_loops],
        local_in_loops=facts.local_in_loops,
        local_outside=facts.local_outside,
    )


def main(module: str, arch: str = "") -> None:
    every: list[Build] = importlib.import_module(module).builds()
    builds = [build for build in every if not arch or build.arch // 10 == int(arch) // 10]
    with ThreadPoolExecutor(2) as pool:  # ptxas is another process, and the compiler releases the GIL
        reports = list(pool.map(lambda build: inspect(build, compile_build(build)), builds))
    json.dump([asdict(report) for report in reports], sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
