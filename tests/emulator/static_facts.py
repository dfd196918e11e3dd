"""Reads facts of a kernel from ptxas and the disassembler: registers, spills, shared memory, instructions and loops.

The tools come with the CUDA toolkit, and all of them with Triton's wheel too. Nothing here needs the emulator or a GPU.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from emulator.toolkit import ROOT, nvcc

TAKEN_APART = ROOT / "build" / "machine_code"

TENSOR_CORE = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "OMMA", "UTCQMMA", "QMMA", "QGMMA", "DMMA")
JUMPS = ("BRA", "BSSY")
LOCAL_MEMORY = ("LDL", "STL")

# SASS opcodes by the class names of the emulator's report. Opcodes of the uniform datapath have the prefix U.
CLASSES = {
    "tensor core": " ".join(TENSOR_CORE),
    "matrix load": "LDSM STSM MOVM",
    "local": "LDL STL",
    "shared": "LDS STS",
    "atomic": "ATOM ATOMS ATOMG RED REDG REDAS UBLKRED UTMAREDG",
    "async": "LDGSTS UBLKCP UBLKPF UTMALDG UTMASTG UTMAPF UTMACMDFLUSH UTMACCTL",
    "global": "LD LDG ST STG",
    "param": "LDC LDCU",
    "barrier": "BAR DEPBAR LDGDEPBAR ARRIVES SYNCS MEMBAR FENCE ERRBAR CCTL CCTLL WARPGROUP WARPSYNC UCGABAR_ARV "
    "UCGABAR_WAIT",
    "warp": "SHFL VOTE REDUX MATCH ELECT",
    "special function": "MUFU",
    "compare": "ISETP FSETP DSETP HSETP2 FSET HSET2 FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 VIADDMNMX HMNMX2 FCHK FSEL SEL",
    "float": "FADD FADD2 FADD32I FMUL FMUL2 FMUL32I FFMA FFMA2 FFMA32I FRND FSWZADD DADD DMUL DFMA",
    "half": "HADD2 HADD2_32I HMUL2 HMUL2_32I HFMA2 HFMA2_32I",
    "convert": "F2F F2FP F2I F2IP I2F I2FP I2I I2IP",
    "logic": "LOP LOP3 LOP32I PLOP3 SHF SHL SHR BREV FLO POPC BMSK SGXT",
    "move": "MOV MOV32I PRMT R2UR UR2R R2P P2R CS2R S2R S2UR B2R R2B",
    "integer": "IADD IADD3 IADD32I IMAD IMAD32I IMUL LEA IABS IDP IDP4A VIADD VABSDIFF VABSDIFF4",
    "control": "BRA BRX JMP JMX CALL RET EXIT BSSY BSYNC BREAK BMOV NOP YIELD KILL WARPEXIT NANOSLEEP BPT SETMAXREG "
    "ACQBULK PREEXIT RPCMOV LEPC",
}
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}


def sass_class(opcode: str) -> str:
    """Returns the class of an opcode: ``"HMMA.16816.F32"`` → ``"tensor core"``; ``"other"`` without a table entry."""
    if opcode.startswith(("IMAD.MOV", "IMAD.SHL")):  # moves and shifts on the integer pipe
        return "move" if "MOV" in opcode else "logic"
    base = opcode.split(".")[0]
    return CLASS_OF.get(base) or CLASS_OF.get(base.removeprefix("U"), "other")


def candidates(name: str) -> list[Path]:
    """Returns the paths of a tool: next to nvcc, in CUDA_HOME, on PATH and in Triton's wheel, in this order."""
    compiler = nvcc()
    folders = [] if compiler is None else [str(compiler.parent)]
    folders += [str(Path(os.environ["CUDA_HOME"]) / "bin")] if os.environ.get("CUDA_HOME") else []
    folders += os.environ.get("PATH", "").split(os.pathsep)
    try:
        import triton
    except ImportError:
        pass
    else:
        folders.append(str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin"))
    # Triton's wheel has a second, newer ptxas for sm_90 and later, and for the PTX version that it emits for them.
    names = (name, "ptxas-blackwell") if name == "ptxas" else (name,)
    found = (shutil.which(one, path=folder) for one in names for folder in filter(None, folders))
    return list(dict.fromkeys(Path(path).resolve() for path in found if path))


def has_tools() -> bool:
    return all(candidates(name) for name in ("ptxas", "cuobjdump", "nvdisasm"))


def run(name: str, *arguments: str | Path, cwd: Path | None = None) -> tuple[str, str]:
    """Returns standard output and error of the first candidate that succeeds, because one may be too old for the file.
    Raises RuntimeError if none succeeds."""
    error = f"there is no {name}: it comes with the CUDA toolkit and with Triton"
    for path in candidates(name):
        # cuobjdump calls nvdisasm, which may be in another folder.
        nearby = [str(folder.parent) for folder in (path, *candidates("nvdisasm"))]
        environment = {**os.environ, "PATH": os.pathsep.join([*nearby, os.environ.get("PATH", "")])}
        done = subprocess.run([path, *arguments], capture_output=True, text=True, env=environment, cwd=cwd)
        if done.returncode == 0:
            return done.stdout, done.stderr
        error = f"{path} failed:\n{done.stderr[-2000:]}{done.stdout[-2000:]}"
    raise RuntimeError(error)


# --- SASS -------------------------------------------------------------------------------------------------------------


def full_opcode(line: str) -> str:
    """Returns a line's opcode with modifiers: ``@!P0 HMMA.16816.F32 R4, …;`` → ``HMMA.16816.F32``; label → ``""``."""
    words = line.replace("{", "").split()
    word = words[1] if words and words[0].startswith("@") and len(words) > 1 else (words or [""])[0]
    return "" if word.endswith(":") else word.rstrip(";")


def opcode(line: str) -> str:
    """Returns a line's opcode without modifiers: ``@!P0 HMMA.16816.F32 R4, …;`` → ``HMMA``."""
    return full_opcode(line).split(".")[0]


def loops(lines: Sequence[str]) -> list[frozenset[int]]:
    """Returns the line numbers of each natural loop: those that reach a backward branch without passing its target."""
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
    # Each kernel is followed by an unreachable jump to itself, which is no loop.
    return [frozenset(body) for body in found.values() if 0 not in body and len(body) > 2]


@dataclass(frozen=True)
class KernelFacts:
    """The facts of a compiled kernel. ``lines`` is its SASS: labels (``.L_x_1:``) and instructions. Spills are in bytes
    per thread, and None if only the machine code is known."""

    name: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    lines: tuple[str, ...]
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None

    @cached_property
    def instructions(self) -> list[str]:
        """The opcodes with their modifiers, without predicates and operands."""
        return list(filter(None, map(full_opcode, self.lines)))

    @cached_property
    def tensor_core(self) -> dict[str, int]:
        """The number of matrix instructions of each kind: ``{"HMMA": 512}``."""
        found = Counter(name.split(".")[0] for name in self.instructions)
        return {name: found[name] for name in TENSOR_CORE if name in found}

    @cached_property
    def main_loops(self) -> list[frozenset[int]]:
        """Indices in ``lines`` of the innermost loops with matrix instructions; if none has any, of all innermost."""
        found = loops(self.lines)
        with_mma = [body for body in found if any(opcode(self.lines[index]) in TENSOR_CORE for index in body)]
        found = with_mma if self.tensor_core else found
        return [body for body in found if not any(other < body for other in found)]

    @cached_property
    def main_loop(self) -> list[str]:
        """The instructions of the main loop with the most matrix instructions. If several have the most, it is the
        shortest: the copy that does not mask."""
        loops_of_mma = [self.opcodes_of(body) for body in self.main_loops]
        return max(
            loops_of_mma, key=lambda opcodes: (sum(opcode(name) in TENSOR_CORE for name in opcodes), -len(opcodes))
        )

    def opcodes_of(self, body: frozenset[int]) -> list[str]:
        """Returns the instructions of one of the loops, in the order of ``lines``."""
        return list(filter(None, (full_opcode(self.lines[index]) for index in sorted(body))))

    def shortest_round(self, body: frozenset[int], wanted: tuple[str, ...] = ()) -> list[str]:
        """Returns the opcodes of one iteration of a loop: on the path with the most opcodes that begin with one of
        ``wanted``, and on the shortest one of those. Opcodes of loops inside this loop do not count as wanted, because
        any number of them would be better."""
        target = {line.rstrip(":"): index for index, line in enumerate(self.lines) if line.endswith(":")}
        start = min(body)
        inner: frozenset[int] = frozenset().union(*(other for other in loops(self.lines) if other < body))
        best: dict[int, tuple[int, int]] = {start: (0, 0)}  # to each line: (-number of wanted opcodes, length)
        before: dict[int, int] = {}
        ends: list[int] = []
        pending = [start]
        while pending:
            at = pending.pop(0)
            line = self.lines[at]
            # A jump of lanes that have diverged (BRA.DIV) leads out of the usual path.
            jumps = opcode(line) in ("BRA", "BRX") and ".DIV" not in full_opcode(line)
            following = [target[label] for label in re.findall(r"\.L[\w.]*", line)] if jumps else []
            if not jumps or line.startswith("@"):
                following.append(at + 1)
            for after in following:
                if after == start:
                    ends.append(at)
                if after == start or after not in body:
                    continue
                name = full_opcode(self.lines[after])
                is_wanted = name.startswith(wanted) and after not in inner
                way = (best[at][0] - is_wanted, best[at][1] + bool(name))
                if after not in best or way < best[after]:
                    best[after], before[after] = way, at
                    pending.append(after)
        path = [min(ends, key=best.__getitem__)]
        while path[-1] != start:
            path.append(before[path[-1]])
        return [name for name in (full_opcode(self.lines[index]) for index in reversed(path)) if name]

    @cached_property
    def local_in_loops(self) -> int:
        """The number of accesses to local memory in the main loops."""
        inside: frozenset[int] = frozenset().union(*self.main_loops)
        return sum(opcode(self.lines[index]) in LOCAL_MEMORY for index in inside)

    @property
    def local_outside(self) -> int:
        """The number of accesses to local memory outside of the main loops."""
        return sum(name.split(".")[0] in LOCAL_MEMORY for name in self.instructions) - self.local_in_loops


def product_waits(opcodes: Sequence[str]) -> int:
    """Returns the number of waits for wgmma groups; ptxas adds waits to the source's if it serialises the products."""
    return sum(name.startswith("WARPGROUP.DEPBAR") for name in opcodes)


def exponentials_beside_products(opcodes: Sequence[str]) -> int:
    """Returns the number of exponentials in a loop's iteration that overlap with a product of their own warpgroup. They
    are between the first wait after the products, for the scores, and the second one."""
    waits, found = 0, 0
    for index, name in enumerate([*opcodes, *opcodes]):  # twice, because `opcodes` may begin anywhere in a step
        if opcode(name) in TENSOR_CORE:
            waits = 0
        waits += name.startswith("WARPGROUP.DEPBAR")
        found += name == "MUFU.EX2" and waits == 1 and index >= len(opcodes)
    return found


def mix(opcodes: Sequence[str]) -> dict[str, int]:
    """Returns the number of opcodes of each class, in falling order."""
    return dict(Counter(map(sass_class, opcodes)).most_common())


def of_cubin(cubin: bytes) -> dict[str, KernelFacts]:
    """Returns the facts of each kernel of a cubin, by its mangled name."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text, _ = run("nvdisasm", "-c", file.name)
        usage, _ = run("cuobjdump", "-res-usage", file.name)
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if heading := re.match(r"//-+ \.text\.(\S+) ", line):
            current = sections[heading.group(1)] = []
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if re.match(r"^\.L[\w.]*:", line) or (line.endswith(";") and not line.startswith(".")):
            current.append(line)
    kernels = {}
    for name, text in re.findall(r"Function ([^\s:]+):\s*(.*)", usage):
        numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
        if name in sections:
            kernels[name] = KernelFacts(
                name,
                numbers["REG"],
                numbers["STACK"],
                numbers["SHARED"],
                tuple(map(sys.intern, sections[name])),  # interned, because half of all lines are duplicates
            )
    return kernels


@functools.cache
def of_library(library: Path, arch: str) -> dict[str, KernelFacts]:
    """Returns the facts of each kernel for which a shared library has machine code of ``arch`` (``"sm_80"``).

    Disassembling a library takes a minute, so that all processes share the result in build/.
    """
    digest = hashlib.sha256(library.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    TAKEN_APART.mkdir(parents=True, exist_ok=True)
    kept = TAKEN_APART / f"{digest}-{arch}.pickle"
    with open(TAKEN_APART / f"{arch}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            for of_earlier_library in TAKEN_APART.glob(f"*-{arch}.pickle"):
                of_earlier_library.unlink()
            unfinished = kept.with_suffix(".unfinished")
            unfinished.write_bytes(pickle.dumps(_take_apart(library, arch)))
            unfinished.rename(kept)
        kernels: dict[str, KernelFacts] = pickle.loads(kept.read_bytes())
    return kernels


def _take_apart(library: Path, arch: str) -> dict[str, KernelFacts]:
    kernels: dict[str, KernelFacts] = {}
    with tempfile.TemporaryDirectory() as folder:
        run("cuobjdump", "-arch", arch, "-xelf", "all", library.resolve(), cwd=Path(folder))
        for file in sorted(Path(folder).glob(f"*.{arch}.cubin")):
            kernels |= of_cubin(file.read_bytes())
    return kernels


def kernels_of_library(library: Path) -> set[str]:
    """Returns the mangled names of the kernels for which a shared library has machine code, from its symbol tables."""
    return set(re.findall(r"^STT_FUNC .* STO_ENTRY +(\S+)", run("cuobjdump", "-symbols", library)[0], re.MULTILINE))


def ptx_of_library(library: Path) -> list[str]:
    """Returns the PTX texts that a shared library contains."""
    with tempfile.TemporaryDirectory() as folder:
        run("cuobjdump", "-xptx", "all", library.resolve(), cwd=Path(folder))
        return [file.read_text() for file in sorted(Path(folder).glob("*.ptx"))]


def target_of(ptx: str) -> str:
    """Returns the ``.target`` of a PTX text, such as ``"sm_90a"``. Raises ValueError if it has none."""
    found = re.search(r"^\s*\.target\s+(\w+)", ptx, re.MULTILINE)
    if found is None:
        raise ValueError("the PTX has no .target")
    return found.group(1)


@functools.lru_cache(64)
def of_ptx(ptx: str, arch: str | None = None) -> dict[str, KernelFacts]:
    """Compiles a PTX text with ptxas, for its own target or for ``arch``, and returns the facts of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        _, said = run("ptxas", "-v", f"-arch={arch or target_of(ptx)}", source, "-o", cubin)
        kernels = of_cubin(cubin.read_bytes())
    for name, text in re.findall(r"Function properties for (\S+)\n(.*)", said):
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        if name in kernels and spills is not None:
            stores, loads = map(int, spills.groups())
            kernels[name] = replace(kernels[name], spill_store_bytes=stores, spill_load_bytes=loads)
    return kernels
