"""Defines, validates, reads and writes the JSON of a benchmark.

A document holds one run of one benchmark. `_TOP` and the tables below it list its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from fastattn.profiler.roofline import COMPUTE, LAUNCH, MEMORY, Limits

SCHEMA = 1
BENCHMARKS = ("attention_forward", "attention_backward", "decode", "int8_matmul")
STATUSES = ("ok", "unsupported", "failed", "wrong")
FOLDER = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
Document = dict[str, Any]

_NUMBER = (int, float)
_NAMES = ("gpu", "compute_capability", "driver", "cuda", "torch", "triton", "python", "fastattn", "nvcc")
ENVIRONMENT: dict[str, type] = {
    **dict.fromkeys(_NAMES, str),
    **dict.fromkeys(("num_sms", "memory_bytes", "l2_bytes"), int),
}
_TOP: dict[str, Any] = {
    "schema": int,
    "benchmark": str,  # one of BENCHMARKS
    "date": str,  # UTC: "2030-01-31T12:00:00+00:00"
    "commit": str,  # of this repository; "+changes" if files differed from the commit
    "complete": bool,  # false: the time limit or a lost device ended the run early
    "environment": dict,
    "limits": dict,  # fastattn.profiler.roofline.Limits, measured in this run
    "rows": list,
}
_LIMITS: dict[str, Any] = {
    "bytes_per_s": _NUMBER,
    "flops_per_s": dict,  # by dtype
    "eager_launch_s": _NUMBER,
    "graph_launch_s": _NUMBER,
}
_TIMING: dict[str, Any] = {"median_s": _NUMBER, "lower_s": _NUMBER, "upper_s": _NUMBER, "samples": int}
_NONE = type(None)
_ROW: dict[str, Any] = {
    "case": dict,  # the shape and options, by name; rows of the same case are compared
    "implementation": str,
    "version": str,
    "is_peer": bool,
    "status": str,  # one of STATUSES; only an "ok" row has times
    "reason": (str, _NONE),  # why the status is not "ok", or why an "ok" row lacks a figure
    "flops": int,  # the least work of a call
    "bytes": int,
    "error": (*_NUMBER, _NONE),  # the worst difference from float64, relative to the largest value
    "eager": (dict, _NONE),
    "graph": (dict, _NONE),  # per call within a CUDA graph
    "peak_bytes": (int, _NONE),  # the most memory that a call allocates
    "resource": (str, _NONE),  # the limit that binds the call: COMPUTE, MEMORY or LAUNCH
    "fraction": (*_NUMBER, _NONE),  # the speed as a fraction of that limit
    "ratio_to_best_peer": (*_NUMBER, _NONE),  # the best peer's time over this row's; None without a peer
}


class BadResult(ValueError):
    """Raised when a document does not follow the schema; says where."""


def validate(document: Any) -> Document:
    """Returns the document. Raises ``BadResult`` if it does not follow the schema."""
    _check(document, _TOP, "document")
    if document["schema"] != SCHEMA:
        raise BadResult(f"document.schema: expected {SCHEMA}, got {document['schema']}")
    if document["benchmark"] not in BENCHMARKS:
        raise BadResult(f"document.benchmark: expected one of {BENCHMARKS}, got {document['benchmark']!r}")
    _check(document["environment"], ENVIRONMENT, "environment")
    _check(document["limits"], _LIMITS, "limits")
    for index, row in enumerate(document["rows"]):
        where = f"rows[{index}]"
        _check(row, _ROW, where)
        if row["status"] not in STATUSES:
            raise BadResult(f"{where}.status: expected one of {STATUSES}, got {row['status']!r}")
        for kind in ("eager", "graph"):
            if row[kind] is not None:
                _check(row[kind], _TIMING, f"{where}.{kind}")
        if row["status"] == "ok" and (row["eager"] is None or row["error"] is None):
            raise BadResult(f"{where}: status ok needs eager and error, got {row['eager']} and {row['error']}")
        if row["status"] != "ok" and (row["eager"] is not None or not row["reason"]):
            came = f"{row['eager']} and {row['reason']!r}"
            raise BadResult(f"{where}: status {row['status']} needs a reason and no eager, got eager and reason {came}")
        if row["resource"] not in (None, COMPUTE, MEMORY, LAUNCH):
            known = (None, COMPUTE, MEMORY, LAUNCH)
            raise BadResult(f"{where}.resource: expected one of {known}, got {row['resource']!r}")
    return dict(document)


def _check(value: Any, fields: Mapping[str, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise BadResult(f"{where}: expected an object, got {type(value).__name__}")
    if value.keys() != fields.keys():
        missing, unknown = fields.keys() - value.keys(), value.keys() - fields.keys()
        raise BadResult(f"{where}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    for name, kind in fields.items():
        is_misplaced_bool = isinstance(value[name], bool) and kind is not bool
        if not isinstance(value[name], kind) or is_misplaced_bool:
            raise BadResult(f"{where}.{name}: expected {kind}, got {value[name]!r}")


def limits_of(document: Document) -> Limits:
    """Returns the limits in a validated document."""
    return Limits(**document["limits"])


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows, each "ok" one with the best peer's time on the same case over its own time.

    It compares times within CUDA graphs if the row and a peer have them, else eager times.
    """
    return [{**row, "ratio_to_best_peer": _ratio(row, rows)} for row in rows]


def _ratio(row: Row, rows: Iterable[Row]) -> float | None:
    if row["status"] != "ok":
        return None
    peers = [
        other
        for other in rows
        if other is not row and other["case"] == row["case"] and other["is_peer"] and other["status"] == "ok"
    ]
    for kind in ("graph", "eager"):
        best = min((other[kind]["median_s"] for other in peers if other[kind]), default=None)
        if best is not None and row[kind] is not None:
            return float(best / row[kind]["median_s"])
    return None


def folder_name(gpu: str) -> str:
    """Returns the name of a GPU's folder under ``benchmarks/results``: ``nvidia-h200`` for ``NVIDIA H200``."""
    return "-".join(gpu.lower().split())


def write(document: Document, path: Path) -> Path:
    """Validates the document and writes it to ``path``, or if ``path`` is a folder, to ``<benchmark>.json`` in it.

    Returns the path of the file.
    """
    validate(document)
    if path.suffix != ".json":
        path.mkdir(parents=True, exist_ok=True)
        path = path / f"{document['benchmark']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def read(path: Path) -> Document:
    """Returns the validated document in a file. Raises ``BadResult``, which names the file."""
    try:
        return validate(json.loads(path.read_text()))
    except ValueError as error:
        raise BadResult(f"{path}: {error}; measure it again with --save") from error
