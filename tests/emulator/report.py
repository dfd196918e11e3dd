"""What a launch counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class InstructionCounts:
    """Of one instruction of the PTX text."""

    kind: str  # "integer", "float", "global", "shared", "tensor core", …
    opcode: str
    line: int  # of the PTX
    source: str  # "file:line", or empty
    warps: int  # times that a warp executed it
    lanes: int  # lanes that took part, summed over these
    global_bytes: int
    global_sectors: int  # 32-byte sectors touched, summed over requests
    shared_wavefronts: int
    bank_conflicts: int  # wavefronts beyond those that the width of the access needs


@dataclass(frozen=True)
class Report:
    """``rows``: each instruction that was executed, in the order of the text; the rest are sums over them."""

    kernel: str
    rows: tuple[InstructionCounts, ...]
    shared_bytes: int  # of a CTA, static and dynamic
    barrier_waits: int  # times that a warp waited at a barrier
    mbarrier_waits: int  # and for a phase of an mbarrier

    @classmethod
    def of(cls, kernel: str, counted: dict[str, Any]) -> Report:
        """From what the C++ part returns."""
        rows = []
        for kind, opcode, line, file, source_line, *counts in counted["rows"]:
            rows.append(InstructionCounts(kind, opcode, line, f"{file}:{source_line}" if file else "", *counts))
        return cls(kernel, tuple(rows), counted["shared_bytes"], counted["barrier_waits"], counted["mbarrier_waits"])

    @cached_property
    def instructions(self) -> dict[str, int]:
        """Warp instructions by class."""
        return dict(self._sum("kind", "warps").most_common())

    @cached_property
    def by_source_line(self) -> dict[str, int]:
        """Warp instructions by ``"file:line"`` of the kernel's source."""
        return dict(self._sum("source", "warps").most_common())

    @cached_property
    def tensor_core(self) -> dict[str, int]:
        """Matrix instructions by opcode."""
        found: Counter[str] = Counter()
        for row in self.rows:
            if row.kind == "tensor core":
                found[row.opcode] += row.warps
        return dict(found)

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

    def _sum(self, key: str, value: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for row in self.rows:
            found[getattr(row, key)] += getattr(row, value)
        return found

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {sum(self.instructions.values())} warp instructions"]
        lines += [f"  {kind:12s} {count:12d}" for kind, count in self.instructions.items()]
        lines += [f"  {opcode} {count}" for opcode, count in self.tensor_core.items()]
        lines.append(f"  global memory {self.global_bytes} bytes in {self.global_sectors} sectors")
        lines.append(
            f"  shared memory {self.shared_wavefronts} wavefronts, {self.bank_conflicts} of them bank conflicts"
        )
        lines.append(f"  shared memory of a CTA {self.shared_bytes} bytes")
        lines.append(f"  waits at barriers {self.barrier_waits}, for mbarriers {self.mbarrier_waits}")
        return "\n".join(lines)
