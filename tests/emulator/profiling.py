"""``python -m emulator profile``: facts about kernels for comparing them before and after a change, without a GPU.

profile kernel.cu -I csrc --arch sm_80    prints what ptxas and the disassembler report of each kernel; also of a .ptx
profile --arch sm_90 script.py …          runs a script as ``run`` does, and prints for each kernel that it launched
                                          the emulator's counts next to the facts of its machine code
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from emulator import launches, run, static_facts
from emulator.launches import Launched
from emulator.nvcc_compile import compile_ptx
from emulator.report import InstructionCounts, Report
from emulator.static_facts import KernelFacts

SOURCES = (".ptx", ".cu")  # suffixes of kernel sources; other files are scripts


@dataclass(frozen=True)
class KernelProfile:
    """A kernel of a PTX text: the sum of its launches' reports, and facts of its machine code. Either may be None."""

    kernel: str
    report: Report | None
    facts: KernelFacts | None
    grids: dict[str, int]  # "(4, 1, 1) of (128, 1, 1)": launches


def facts_of(ptx: str, kernel: str) -> KernelFacts | None:
    """Returns the facts of a kernel's machine code, or None if a tool is missing or too old for this PTX."""
    if not static_facts.has_tools():
        return None
    try:
        return static_facts.of_ptx(ptx).get(kernel)
    except RuntimeError:
        return None


def of_launches(launched: Iterable[Launched]) -> list[KernelProfile]:
    """Returns a profile for each kernel, in the order of first launches."""
    groups: dict[tuple[str, str], list[Launched]] = {}
    for one in launched:
        groups.setdefault((one.report.kernel, one.ptx), []).append(one)
    found = []
    for (kernel, ptx), group in groups.items():
        report = Report.total(one.report for one in group)
        facts = facts_of(ptx, kernel)
        if facts is not None:
            report = replace(report, registers=facts.registers)
        grids = Counter(f"{one.grid} of {one.block}" for one in group)
        found.append(KernelProfile(kernel, report, facts, dict(grids)))
    return found


def of_source(file: Path, arch: str | None, include: Iterable[Path] = ()) -> list[KernelProfile]:
    """Returns a profile of each kernel in a ``.ptx`` or ``.cu`` file. ``arch``, such as ``"sm_80"``, defaults to the
    target of the PTX, or to sm_80 for a ``.cu`` file."""
    if file.suffix == ".cu":
        ptx = compile_ptx(file, (arch or "sm_80").replace("sm_", "compute_"), list(include))
    else:
        ptx = file.read_text()
    facts = static_facts.of_ptx(ptx, arch)
    return [KernelProfile(name, None, facts[name], {}) for name in sorted(facts)]


# --- Tables -----------------------------------------------------------------------------------------------------------


@functools.cache
def demangled(name: str) -> str:
    """Returns a name such as ``fastattn::attention_forward_sm80<128, …>``; without c++filt, the mangled name."""
    tool = shutil.which("c++filt")
    if tool is None or not name.startswith("_Z"):
        return name
    text = subprocess.run([tool, "-p", name], capture_output=True, text=True).stdout.strip()
    return text.removeprefix("void ") or name


def short(source: str) -> str:
    """Shortens ``"file:line"`` to a path relative to the working directory if the file is in it."""
    file, _, line = source.rpartition(":")
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}:{line}"


def table(header: list[str], rows: Iterable[list[Any]]) -> list[str]:
    """Returns the lines of a table. The first column is left-aligned, the others right-aligned."""
    cells = [header] + [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: list[str]) -> str:
        columns = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        return "  ".join([f"  {row[0].ljust(widths[0])}", *columns]).rstrip()

    return [line(row) for row in cells]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if part else ""


def facts_lines(profile: KernelProfile) -> list[str]:
    report, facts = profile.report, profile.facts
    if facts is None:
        lines = ["  registers, spills, machine code: not known, ptxas or a disassembler is missing here, or is too old"]
    else:
        spills = f"spilled {facts.spill_store_bytes} bytes, reloaded {facts.spill_load_bytes}"
        places = f"accesses to local memory: {facts.local_in_loops} in main loops, {facts.local_outside} elsewhere"
        lines = [
            f"  registers {facts.registers}, {spills}, stack {facts.stack_bytes} bytes, {places}",
            f"  instructions in the machine code {len(facts.instructions):,}, static shared memory "
            f"{facts.static_shared_bytes:,} bytes",
        ]
    if report is not None:
        lines.append(f"  shared memory of a CTA {report.shared_bytes:,} bytes, static and dynamic")
        for types, operations in report.tensor_core.items():
            lines.append(
                f"  tensor cores: {types}: {operations.multiply_adds:,} multiply-adds in "
                f"{operations.instructions:,} instructions"
            )
        waits = ", ".join(f"{name} {count:,}" for name, count in sorted(report.waits.items()))
        lines.append(f"  waits of warps: {waits or 'none'}")
        lines += [f"  warning: {text} ({count:,} CTAs)" for text, count in sorted(report.warnings.items())]
    return lines


def instruction_table(report: Report | None, facts: KernelFacts | None) -> list[str]:
    """Returns a table of warp instructions by class: those executed, and those of each main loop in machine code."""
    header, columns = ["instructions"], []
    if report is not None:
        header += ["executed (PTX)", ""]
        columns.append(report.instructions)
    loops = [] if facts is None else [facts.opcodes_of(body) for body in facts.main_loops]
    for number, opcodes in enumerate(loops, 1):
        header += [f"main loop {number}" if len(loops) > 1 else "main loop", ""]
        columns.append(static_facts.mix(opcodes))
    if not columns:
        return []
    totals = [sum(column.values()) for column in columns]
    names = sorted({name for column in columns for name in column}, key=lambda name: -columns[0].get(name, 0))
    rows: list[list[Any]] = []
    for name in names:
        rows.append([name])
        for column, total in zip(columns, totals, strict=True):
            rows[-1] += [column.get(name) or "", share(column.get(name, 0), total)]
    rows.append(["all", *(cell for total in totals for cell in (total, ""))])
    return table(header, rows)


def memory_tables(report: Report, most: int) -> list[str]:
    """Returns tables of the ``most`` largest users of global and of shared memory, by opcode and source line."""
    places: dict[str, list[InstructionCounts]] = {}
    for row in report.rows:
        if row.global_sectors or row.shared_wavefronts:
            place = f"{row.opcode} {short(row.source) if row.source else f'PTX line {row.line}'}"
            places.setdefault(place, []).append(row)

    def most_of(key: str) -> list[list[Any]]:
        """Returns [place, sum of ``key``, rows] of the places with the highest sums."""
        found = [[place, sum(getattr(row, key) for row in rows), rows] for place, rows in places.items()]
        return sorted((entry for entry in found if entry[1]), key=lambda entry: -entry[1])[:most]

    lines, in_global, in_shared = [], [], []
    for place, sectors, rows in most_of("global_sectors"):
        requests, moved = sum(row.warps for row in rows), sum(row.global_bytes for row in rows)
        in_global.append([place, requests, f"{moved / requests:.1f}", f"{sectors / requests:.1f}", moved])
    for place, wavefronts, rows in most_of("shared_wavefronts"):
        conflicts = sum(row.bank_conflicts for row in rows)
        in_shared.append([place, sum(row.warps for row in rows), wavefronts, conflicts])
    if in_global:
        lines += ["", *table(["global memory", "requests", "bytes each", "sectors each", "bytes"], in_global)]
    if in_shared:
        lines += ["", *table(["shared memory", "requests", "wavefronts", "bank conflicts"], in_shared)]
    return lines


def source_table(report: Report, most: int) -> list[str]:
    total = sum(report.instructions.values())
    known = [(source, count) for source, count in report.by_source_line.items() if source][:most]
    if not known:
        return []
    rows = [[short(source), count, share(count, total)] for source, count in known]
    return ["", *table(["source line", "executed", ""], rows)]


def render(profile: KernelProfile, most: int) -> str:
    """Returns the tables of a kernel. ``most`` limits the rows of the long tables."""
    lines = [demangled(profile.kernel)]
    if profile.report is not None:
        grids = ", ".join(f"{count} with {grid} threads" for grid, count in profile.grids.items())
        lines.append(f"  launches {profile.report.launches}: {grids}")
    lines += [*facts_lines(profile), "", *instruction_table(profile.report, profile.facts)]
    if profile.report is not None:
        lines += memory_tables(profile.report, most) + source_table(profile.report, most)
    return "\n".join(lines)


def as_json(profile: KernelProfile) -> dict[str, Any]:
    facts, report = profile.facts, profile.report
    found: dict[str, Any] = {"kernel": profile.kernel, "name": demangled(profile.kernel)}
    if report is not None:
        found["launches"] = profile.grids
        found["counted"] = asdict(report) | {
            "instructions": report.instructions,
            "tensor_core": {types: asdict(operations) for types, operations in report.tensor_core.items()},
        }
    if facts is not None:
        found["machine_code"] = {
            "registers": facts.registers,
            "spill_store_bytes": facts.spill_store_bytes,
            "spill_load_bytes": facts.spill_load_bytes,
            "stack_bytes": facts.stack_bytes,
            "static_shared_bytes": facts.static_shared_bytes,
            "main_loops": [static_facts.mix(facts.opcodes_of(body)) for body in facts.main_loops],
        }
    return found


# --- The command ------------------------------------------------------------------------------------------------------


def pattern(text: str) -> re.Pattern[str]:
    """Parses a command-line argument that is a regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is no regular expression: {error}") from None


def _add_options(parser: argparse.ArgumentParser) -> None:
    run.add_options(parser)
    parser.add_argument("--kernel", type=pattern, help="only kernels whose name matches this regular expression")
    parser.add_argument("--lines", type=int, default=10, help="rows of the long tables (default 10)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("-I", dest="include", type=Path, action="append", default=[], help="of a .cu file")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="what kernels execute, and what their machine code is made of",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    run.add_kernels(parser)
    parser.add_argument("script", type=run.existing_file, help="a Python script, or a .ptx or .cu file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's")
    parser.set_defaults(function=main)


def show(profiles: list[KernelProfile], arguments: argparse.Namespace) -> None:
    """Prints the profiles that ``--kernel`` selects, and writes them to the file of ``--json``."""
    chosen = profiles
    if arguments.kernel is not None:
        chosen = [p for p in profiles if any(map(arguments.kernel.search, (demangled(p.kernel), p.kernel)))]
    if chosen:
        print("\n\n".join(render(profile, arguments.lines) for profile in chosen))
    elif profiles:
        names = ", ".join(dict.fromkeys(demangled(profile.kernel) for profile in profiles))
        print(f"no kernel has a name that matches {arguments.kernel.pattern}: there are {names}")
    else:
        print("no kernel was launched" if arguments.script.suffix not in SOURCES else "there is no kernel in it")
    if arguments.json:
        arguments.json.write_text(json.dumps([as_json(profile) for profile in chosen], indent=2) + "\n")


def main(arguments: argparse.Namespace) -> None:
    if arguments.script.suffix in SOURCES:
        if not static_facts.has_tools():
            raise SystemExit("ptxas, cuobjdump and nvdisasm are needed for this: they come with the CUDA toolkit")
        behind = argparse.ArgumentParser(
            prog="python -m emulator profile", usage=f"%(prog)s {arguments.script} [options]"
        )
        _add_options(behind)
        behind.parse_args(arguments.arguments, arguments)  # options after a kernel source are this command's
        try:
            profiles = of_source(arguments.script, arguments.arch, arguments.include)
        except RuntimeError as error:  # the compiler's output
            raise SystemExit(str(error)) from None
        show(profiles, arguments)
        return
    with launches.recorded() as launched:
        try:
            run.run_script(arguments)
        finally:  # also if the script calls sys.exit or fails
            show(of_launches(launched), arguments)
