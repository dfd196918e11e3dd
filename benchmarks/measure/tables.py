"""Makes tables of results for the terminal and for the page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks.measure.labels import figures, grouped_by_case, label, seconds_of
from benchmarks.measure.results import Document, Row
from fastattn.profiler.work import Work

SUMMARY_COLUMNS = ("TFLOP/s", "GB/s", "of limit", "bound by", "peak MB", "error", "to best peer")
_TEXT_COLUMNS = ("implementation", "bound by", "case", "kernel", "GPU", "backend", "best peer", "call")


def limits_line(document: Document) -> str:
    """Returns a line with the limits that were measured in the same run."""
    limits = document["limits"]
    matmuls = ", ".join(f"{dtype} matmul {rate / 1e12:.0f} TFLOP/s" for dtype, rate in limits["flops_per_s"].items())
    return (
        f"Limits measured in the same run: copy {limits['bytes_per_s'] / 1e9:.0f} GB/s, {matmuls}, empty kernel "
        f"{limits['eager_launch_s'] * 1e6:.1f} µs eager, {limits['graph_launch_s'] * 1e6:.1f} µs in a CUDA graph."
    )


def as_text(document: Document) -> str:
    """Returns the whole document as text for a terminal; rows without figures give their reason instead."""
    lines = [limits_line(document)]
    for case, rows in grouped_by_case(document["rows"]).items():
        measured = [figures(row) for row in rows if row["status"] == "ok"]
        lines += ["", case]
        if measured:
            lines.append(aligned(list(measured[0]), [tuple(cells.values()) for cells in measured]))
        lines += [f"{row['implementation']}: {row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    return "\n".join(lines)


def as_markdown(rows: Sequence[Row]) -> str:
    """Returns a table with one line for each case: the faster of fastattn's backends, and the best peer."""
    titles = ("case", "fastattn", "µs", *SUMMARY_COLUMNS, "best peer", "its µs")
    lines = []
    for case, of_case in grouped_by_case(rows).items():
        cells = [case]
        own, peer = (_fastest(row for row in of_case if row["is_peer"] is is_peer) for is_peer in (False, True))
        if own is None:
            cells += ["–"] * (2 + len(SUMMARY_COLUMNS))
        else:
            shown = figures(own)
            cells += [own["implementation"].removeprefix("fastattn "), f"{seconds_of(own) * 1e6:.1f}"]
            cells += [shown[title] for title in SUMMARY_COLUMNS]
        cells += ["–", "–"] if peer is None else [peer["implementation"], f"{seconds_of(peer) * 1e6:.1f}"]
        lines.append(cells)
    return aligned(titles, lines, "pipe")


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min((row for row in rows if row["status"] == "ok"), key=seconds_of, default=None)


def without_figures(rows: Sequence[Row]) -> str:
    """Returns a Markdown list of the rows without figures, with their reasons; empty if there are none."""
    counts = Counter(
        (row["implementation"], row["version"], row["status"], row["reason"]) for row in rows if row["status"] != "ok"
    )
    return "\n".join(
        f"- {name} ({version}), {count} {'case' if count == 1 else 'cases'}: {status}, {reason}"
        for (name, version, status, reason), count in counts.items()
    )


def work_table(cases: Iterable[Any], work: Callable[[Any], Work]) -> str:
    """Returns a table of the least work of each case, which is known without a GPU: FLOPs, bytes and their ratio."""
    rows: list[Sequence[str]] = []
    for case in cases:
        least = work(case)
        numbers = (f"{least.flops / 1e9:.3f}", f"{least.bytes / 1e6:.1f}", f"{least.intensity:.1f}")
        rows.append((label(dataclasses.asdict(case)), *numbers))
    return aligned(("case", "GFLOP", "MB", "FLOP/byte"), rows)


def overhead_table(rows: Iterable[Row], form: str = "simple") -> str:
    """Returns a table of what each call costs on the host."""
    names = ("public_us", "floor_us", "added_us")
    cells = [(row["call"], *(f"{row[name]:.2f}" for name in names), f"{row['aim_us']:.0f}") for row in rows]
    return aligned(("call", "public µs", "floor µs", "added µs", "aim µs"), cells, form)


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]], form: str = "simple") -> str:
    """Returns a table for a terminal, or as "pipe" in Markdown: text aligned to the left, numbers to the right."""
    sides = ["left" if title in _TEXT_COLUMNS else "right" for title in header]
    return tabulate(list(rows), header, tablefmt=form, disable_numparse=True, colalign=sides)
