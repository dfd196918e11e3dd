"""Makes the page and the JSON of a GPU check, which say what ran with which results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.machine import Facts
from benchmarks.evidence.stages import Result
from benchmarks.measure.labels import figures, grouped_by_case, seconds_of

SCHEMA = 1
_CASES = 6  # shown for each benchmark, whose first cases are the most informative
_MOST_DETAILS = 16


def documents(folder: Path) -> list[dict[str, Any]]:
    """Returns the benchmark results in a folder, sorted by file name; measure/results.py describes their format."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def as_document(
    results: Sequence[Result], facts: Facts, commit: str, date: str, bundled: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of gpu_check.json."""
    return {
        "schema": SCHEMA,
        "date": date,
        "commit": commit,
        "machine": facts,
        "stages": [{**dataclasses.asdict(result), "seconds": round(result.seconds, 1)} for result in results],
        "left_out": list(bundled),
    }


def as_markdown(document: dict[str, Any], benchmarks: Sequence[dict[str, Any]]) -> str:
    """Returns the page: what ran where, each stage's result with its first failures, and the main figures."""
    machine = document["machine"]
    gpu = machine["gpu"] or "none (dry run)"
    if machine["compute_capability"]:
        gpu += f", compute capability {machine['compute_capability']}, driver {machine['driver']}"
    lines = [
        "# GPU check",
        "",
        f"- {document['date']}, commit {document['commit']}",
        f"- GPU: {gpu}",
        f"- Python {machine['python']}, torch {machine['torch']}, CUDA {machine['cuda']}, triton {machine['triton']}",
        "",
        "| stage | result | time | limit | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for stage in document["stages"]:
        cells = (stage["stage"], stage["status"], f"{stage['seconds']:.0f} s", f"{stage['limit_s']:g} s")
        lines.append(f"| {' | '.join(map(_cell, (*cells, stage['headline'])))} |")
    for stage in document["stages"]:
        if stage["details"]:
            shown = stage["details"][:_MOST_DETAILS]
            lines += ["", f"## {stage['stage']}", "", "```text", *shown, "```"]
    for benchmark in benchmarks:
        lines += ["", f"## {benchmark['benchmark']}", "", *_main_rows(benchmark)]
    if document["left_out"]:
        lines += ["", f"Left out for their size: {', '.join(document['left_out'])}"]
    return "\n".join(lines) + "\n"


def _main_rows(benchmark: dict[str, Any]) -> list[str]:
    """Returns a table of the first cases, with fastattn's rows and the best peer's, and counts of all rows."""
    cases = grouped_by_case(benchmark["rows"])
    lines = [
        "| case | implementation | µs | TFLOP/s | GB/s | of limit | bound by | to best peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, rows in list(cases.items())[:_CASES]:
        peers = [row for row in rows if row["is_peer"] and row["status"] == "ok"]
        chosen = [row for row in rows if not row["is_peer"] and row["status"] != "unsupported"]
        chosen += sorted(peers, key=seconds_of)[:1]
        lines += [f"| {' | '.join(map(_cell, (case, *_figures(row))))} |" for row in chosen]
    statuses = [row["status"] for row in benchmark["rows"]]
    counted = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "none"
    complete = "" if benchmark["complete"] else "; the time was up before the last case"
    return [*lines, "", f"Rows: {counted}{complete}. {len(cases)} cases in the JSON."]


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return row["implementation"], f"{row['status']}: {row['reason']}", *([""] * 5)
    cells = figures(row)
    shown = (cells[name] for name in ("TFLOP/s", "GB/s", "of limit", "bound by", "to best peer"))
    return row["implementation"], f"{seconds_of(row) * 1e6:.1f}", *shown


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]
