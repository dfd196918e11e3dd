"""Reports: the counters of launches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple


@dataclass(frozen=True)
class InstructionCounts:
    """The counters of one instruction of the PTX text."""

    kind: str  # "integer", "float", "global", "shared", "tensor core", …
    opcode: str
    line: int  # in the PTX text
    source: str  # "file:line" of the kernel's source, or empty
    warps: int  # times that a warp executed it; for a memory access, the number of requests
    lanes: int  # lanes that took part, summed over those executions
    global_bytes: int
    global_sectors: int  # 32-byte sectors touched, summed over requests
    shared_wavefronts: int
    bank_conflicts: int  # wavefronts beyond those that the width of the access needs
    kernel: str = ""

    @property
    def bytes_per_request(self) -> float:
        """Bytes of global memory that the lanes of a request access."""
        return self.global_bytes / self.warps

    @property
    def sectors_per_request(self) -> float:
        """32-byte sectors of global memory that a request touches; the ideal is ``bytes_per_request / 32``."""
        return self.global_sectors / self.warps

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all executions of a matrix instruction, m·n·k each; a warpgroup's wgmma counts once."""
        shape = re.search(r"\.m(\d+)n(\d+)k(\d+)", self.opcode)
        if self.kind != "tensor core" or shape is None:
            return 0
        m, n, k = map(int, shape.groups())
        return m * n * k * self.warps // (4 if self.opcode.startswith("wgmma") else 1)

    @property
    def matrix_types(self) -> str:
        """The types of a matrix product, such as ``"bf16 * bf16 + f32"``; ``""`` for other instructions."""
        if self.multiply_adds == 0:
            return ""
        # The last modifiers are the types of d, a, b and c; wgmma does not state that of c, which is d's.
        types = re.findall(r"\.((?:f|bf|tf|s|u|b|e\dm)\d+)(?=\.|$)", self.opcode)
        if self.opcode.startswith("wgmma"):
            types = [*types, types[0]]
        return f"{types[1]} * {types[2]} + {types[3]}"


@dataclass(frozen=True)
class TensorCoreOperations:
    """The multiplications of one combination of types."""

    instructions: int  # executed by a warp; for wgmma, by a warpgroup
    multiply_adds: int


class GlobalWrite(NamedTuple):
    """A store, atomic or reduction of a warp to global memory."""

    cta: int  # linear index in the grid, x fastest
    line: int  # in the PTX text
    address: int  # of the first lane that took part


COUNTS = ("warps", "lanes", "global_bytes", "global_sectors", "shared_wavefronts", "bank_conflicts")


@dataclass(frozen=True)
class Report:
    """The counters of a launch or of several. ``rows`` has each executed instruction, in the order of the PTX."""

    kernel: str
    rows: tuple[InstructionCounts, ...]
    shared_bytes: int  # shared memory of a CTA, static and dynamic; the maximum of all launches
    waits: dict[str, int]  # times that a warp waited at "barrier 0" to "barrier 15", "cluster barrier", "mbarrier"
    registers: int | None = None  # of a thread, according to ptxas; the maximum of all launches
    launches: int = 1
    warnings: dict[str, int] = field(default_factory=dict)  # suspicious but allowed by PTX: text to number of CTAs
    writes: tuple[GlobalWrite, ...] = ()  # of the whole grid, in the order of execution; only with ``log_writes``

    @classmethod
    def of(cls, kernel: str, counted: dict[str, Any]) -> Report:
        """Converts the dict that the C++ library returns."""
        rows = []
        for kind, opcode, line, file, source_line, *counts in counted["rows"]:
            source = f"{file}:{source_line}" if file else ""
            rows.append(InstructionCounts(kind, opcode, line, source, *counts, kernel))
        writes = tuple(GlobalWrite(*write) for write in counted["writes"])
        return cls(
            kernel, tuple(rows), counted["shared_bytes"], counted["waits"], warnings=counted["warnings"], writes=writes
        )

    @classmethod
    def total(cls, reports: Iterable[Report]) -> Report:
        """Sums the reports of several launches, also of different kernels; an instruction's rows become one row."""
        names: dict[str, None] = {}
        rows: dict[tuple[Any, ...], InstructionCounts] = {}
        waits: Counter[str] = Counter()
        warnings: Counter[str] = Counter()
        shared_bytes, registers, launches = 0, None, 0
        for report in reports:
            names[report.kernel] = None
            for row in report.rows:
                key = (row.kernel, row.line, row.opcode, row.source)
                known = rows.get(key)
                sums = {name: getattr(known, name, 0) + getattr(row, name) for name in COUNTS}
                rows[key] = replace(row, **sums)
            waits.update(report.waits)
            warnings.update(report.warnings)
            shared_bytes = max(shared_bytes, report.shared_bytes)
            registers = max((n for n in (registers, report.registers) if n is not None), default=None)
            launches += report.launches
        order = {name: place for place, name in enumerate(names)}
        ordered = sorted(rows.values(), key=lambda row: (order.get(row.kernel, -1), row.line))
        return cls(", ".join(names), tuple(ordered), shared_bytes, dict(waits), registers, launches, dict(warnings))

    @cached_property
    def instructions(self) -> dict[str, int]:
        """Warp instructions by class."""
        return dict(self._sum("kind").most_common())

    @cached_property
    def by_source_line(self) -> dict[str, int]:
        """Warp instructions by ``"file:line"`` of the kernel's source."""
        return dict(self._sum("source").most_common())

    @cached_property
    def opcodes(self) -> dict[str, int]:
        """Warp instructions by opcode with its modifiers."""
        return dict(self._sum("opcode").most_common())

    @cached_property
    def tensor_core(self) -> dict[str, TensorCoreOperations]:
        """Multiplications by types, such as ``"bf16 * bf16 + f32"``."""
        found: dict[str, TensorCoreOperations] = {}
        for row in self.rows:
            if row.multiply_adds > 0:
                known = found.get(row.matrix_types, TensorCoreOperations(0, 0))
                instructions = row.warps // (4 if row.opcode.startswith("wgmma") else 1)
                found[row.matrix_types] = TensorCoreOperations(
                    known.instructions + instructions, known.multiply_adds + row.multiply_adds
                )
        return found

    @property
    def global_bytes(self) -> int:
        return sum(row.global_bytes for row in self.rows)

    @property
    def global_sectors(self) -> int:
        return sum(row.global_sectors for row in self.rows)

    @property
    def shared_wavefronts(self) -> int:
        return sum(row.shared_wavefronts for row in self.rows)

    @property
    def bank_conflicts(self) -> int:
        return sum(row.bank_conflicts for row in self.rows)

    def _sum(self, key: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in self.rows:
            found[getattr(row, key)] += row.warps
        return found

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {sum(self.instructions.values())} warp instructions in {self.launches} launches"]
        lines += [f"  {kind:12s} {count:12d}" for kind, count in self.instructions.items()]
        for types, operations in self.tensor_core.items():
            lines.append(f"  {types}: {operations.multiply_adds} multiply-adds in {operations.instructions}")
        lines.append(f"  global memory {self.global_bytes} bytes in {self.global_sectors} sectors")
        lines.append(
            f"  shared memory {self.shared_wavefronts} wavefronts, {self.bank_conflicts} of them bank conflicts"
        )
        waits = ", ".join(f"{name} {count}" for name, count in self.waits.items()) or "none"
        lines.append(f"  shared memory of a CTA {self.shared_bytes} bytes, waits of warps: {waits}")
        if self.registers is not None:
            lines.append(f"  registers of a thread {self.registers}")
        lines += [f"  warning: {text} ({count} CTAs)" for text, count in self.warnings.items()]
        return "\n".join(lines)
