"""Formats a profile as text."""

from __future__ import annotations

from collections.abc import Sequence

from fastattn.profiler.kernels import KernelProfile
from fastattn.profiler.trace import CpuOperator, Region

_ROWS_SHOWN = 20


def kernel_table(kernels: Sequence[KernelProfile]) -> str:
    """Returns a table of the kernels. ``≤`` marks an upper bound, ``–`` an unknown figure."""
    rows = [("kernel", "operator", "launches", "ms", "share", "GFLOP", "MB", "TFLOP/s", "GB/s", "of limit", "bound by")]
    for each in kernels[:_ROWS_SHOWN]:
        rows.append(
            (
                _shortened(each.name),
                {None: "(not fastattn)", "": "(CUDA graph)"}.get(each.operator, each.operator or ""),
                str(each.launches),
                f"{each.seconds * 1e3:.3f}",
                f"{each.share:.1%}",
                _number(each.flops, 1e9, each.is_upper_bound),
                _number(each.bytes, 1e6, each.is_upper_bound),
                _number(each.flops, 1e12 * each.seconds, each.is_upper_bound),
                _number(each.bytes, 1e9 * each.seconds, each.is_upper_bound),
                _number(each.fraction, 0.01, each.is_upper_bound, "%"),
                each.resource or "–",
            )
        )
    rest = kernels[_ROWS_SHOWN:]
    table = _aligned(rows)
    if rest:
        table += f"\n… and {len(rest)} more kernels, {sum(each.share for each in rest):.1%} of the time"
    return table


def operator_table(operators: Sequence[CpuOperator]) -> str:
    """Returns the operators on the CPU as text."""
    total = sum(each.self_seconds for each in operators) or 1.0
    rows = [("operator", "calls", "own CPU ms", "share")]
    for each in operators[:_ROWS_SHOWN]:
        share = f"{each.self_seconds / total:.1%}"
        rows.append((_shortened(each.name), str(each.calls), f"{each.self_seconds * 1e3:.3f}", share))
    return _aligned(rows)


def region_table(regions: Sequence[Region]) -> str:
    """Returns the regions' memory as text, in MB (10^6 bytes)."""
    rows = [("region", "device", "allocated MB", "peak MB", "delta MB")]
    for each in regions:
        numbers = (f"{each.allocated / 1e6:.3f}", f"{each.peak / 1e6:.3f}", f"{each.delta / 1e6:+.3f}")
        rows.append((each.name, each.device, *numbers))
    return _aligned(rows)


def _number(value: float | None, unit: float, is_upper_bound: bool, suffix: str = "") -> str:
    if value is None or not unit:
        return "–"
    return f"{'≤' if is_upper_bound else ''}{value / unit:.1f}{suffix}"


def _shortened(name: str) -> str:
    return name if len(name) <= 60 else name[:59] + "…"


_TEXT_COLUMNS = ("kernel", "operator", "region", "device", "bound by")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns text to the left and numbers to the right; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if title in _TEXT_COLUMNS else cell.rjust(width)
            for title, cell, width in zip(rows[0], row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
