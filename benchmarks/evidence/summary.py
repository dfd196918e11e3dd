"""Makes the page of a GPU check, which says what ran with which results, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.machine import Facts
from benchmarks.evidence.stages import Result, as_json
from benchmarks.measure.labels import label

SCHEMA = 1
_CASES = 6  # shown of each benchmark, which has the most informative cases first
_MOST_DETAILS = 16


def documents(folder: Path) -> list[dict[str, Any]]:
    """Returns the benchmark results in a folder, sorted by file name; measure/results.py describes their format."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def as_document(
    results: Sequence[Result], facts: Facts, commit: str, date: str, bundled: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of gpu_check.json, the JSON beside the page."""
    return {
        "schema": SCHEMA,
        "date": date,
        "commit": commit,
        "machine": facts,
        "stages": [as_json(result) for result in results],
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
    """Returns a table of the first cases, with fastattn's rows and that of the best peer, and counts of all rows."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in benchmark["rows"]:
        cases.setdefault(label(row["case"]), []).append(row)
    lines = [
        "| case | implementation | µs | TFLOP/s | GB/s | of limit | bound by | to best peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, rows in list(cases.items())[:_CASES]:
        peers = [row for row in rows if row["is_peer"] and row["status"] == "ok"]
        chosen = [row for row in rows if not row["is_peer"] and row["status"] != "unsupported"]
        chosen += sorted(peers, key=_seconds)[:1]
        lines += [f"| {' | '.join(map(_cell, (case, *_figures(row))))} |" for row in chosen]
    statuses = [row["status"] for row in benchmark["rows"]]
    counted = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)) or "none"
    complete = "" if benchmark["complete"] else "; the time was up before the last case"
    return [*lines, "", f"Rows: {counted}{complete}. {len(cases)} cases in the JSON."]


def _figures(row: dict[str, Any]) -> tuple[str, ...]:
    if row["status"] != "ok":
        return row["implementation"], f"{row['status']}: {row['reason']}", *([""] * 5)
    seconds = _seconds(row)
    ratio = row["ratio_to_best_peer"]
    return (
        row["implementation"],
        f"{seconds * 1e6:.1f}",
        f"{row['flops'] / seconds / 1e12:.1f}",
        f"{row['bytes'] / seconds / 1e9:.0f}",
        f"{row['fraction']:.0%}",
        str(row["resource"]),
        "–" if ratio is None else f"{ratio:.2f}",
    )


def _seconds(row: dict[str, Any]) -> float:
    """Returns what results.seconds_of does, which needs torch: the time in a CUDA graph if measured, else eager."""
    return float((row["graph"] or row["eager"])["median_s"])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]
