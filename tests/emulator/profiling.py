"""``python -m emulator profile``: what a developer looks at before and after a change when no GPU is at hand.

profile kernel.cu -I csrc --arch sm_80    what ptxas and the disassembly say of each kernel; also of a .ptx file
profile --arch sm_90 script.py …          runs a script as ``run`` does, and prints for each kernel that it launched
                                          what was counted, and beside it what the machine code has
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

SOURCES = (".ptx", ".cu")  # of files that are not scripts


@dataclass(frozen=True)
class KernelProfile:
    """A kernel of one PTX text: its launches' counts added up, and its machine code; either may be unknown."""

    kernel: str
    report: Report | None
    facts: KernelFacts | None
    grids: dict[str, int]  # "(4, 1, 1) of (128, 1, 1)": launches


def facts_of(ptx: str, kernel: str) -> KernelFacts | None:
    """None where a tool is missing, or too old for this PTX: what was counted is worth printing without it."""
    if not static_facts.has_tools():
        return None
    try:
        return static_facts.of_ptx(ptx).get(kernel)
    except RuntimeError:
        return None


def of_launches(launched: Iterable[Launched]) -> list[KernelProfile]:
    """One profile for each kernel, in the order in which they were first launched."""
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
    """Of each kernel in a ``.ptx`` or ``.cu`` file; ``arch``: ``"sm_80"``, by default what the PTX says."""
    if file.suffix == ".cu":
        ptx = compile_ptx(file, (arch or "sm_80").replace("sm_", "compute_"), list(include))
    else:
        ptx = file.read_text()
    facts = static_facts.of_ptx(ptx, arch)
    return [KernelProfile(name, None, facts[name], {}) for name in sorted(facts)]


# --- Tables -----------------------------------------------------------------------------------------------------------


@functools.cache
def demangled(name: str) -> str:
    """``fastattn::attention_forward_sm80<128, …>``, where there is a c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not name.startswith("_Z"):
        return name
    text = subprocess.run([tool, "-p", name], capture_output=True, text=True).stdout.strip()
    return text.removeprefix("void ") or name


def short(source: str) -> str:
    """``csrc/attention/forward_sm80.cuh:77``: relative to the working folder where the file is in it."""
    file, _, line = source.rpartition(":")
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if relative.startswith('..') else relative}:{line}"


def table(header: list[str], rows: Iterable[list[Any]]) -> list[str]:
    """Lines with columns below their heads, the first to the left and numbers to the right."""
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
    """Warp instructions by class: executed, and in each main loop of the machine code."""
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
    """Of what touches most of global and of shared memory; unrolled copies of an instruction count as one."""
    places: dict[str, list[InstructionCounts]] = {}
    for row in report.rows:
        if row.global_sectors or row.shared_wavefronts:
            place = f"{row.opcode} {short(row.source) if row.source else f'PTX line {row.line}'}"
            places.setdefault(place, []).append(row)

    def most_of(key: str) -> list[list[Any]]:
        """[place, count of ``key``, rows], of the places with the highest counts."""
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
    """The tables of one kernel; ``most``: rows of those that could be long."""
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
    """A command's argument that is a regular expression."""
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
    """The subcommand."""
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
    """Print those that ``--kernel`` chooses, and write them to the file of ``--json``."""
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
        behind.parse_args(arguments.arguments, arguments)  # what stands behind a kernel is no script's
        try:
            profiles = of_source(arguments.script, arguments.arch, arguments.include)
        except RuntimeError as error:  # a compiler's words
            raise SystemExit(str(error)) from None
        show(profiles, arguments)
        return
    with launches.recorded() as launched:
        try:
            run.run_script(arguments)
        finally:  # also when the script ends in sys.exit or by an error
            show(of_launches(launched), arguments)
