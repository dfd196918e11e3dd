"""Reads the records and the exit codes of processes that ran with `pytest_record`. This module does not need pytest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GPU_LOST = 99  # the exit code of a process that ended because the GPU is in an error state
# pytest's own exit codes: all passed, some failed, interrupted, internal error, usage error, nothing collected.
ORDINARY = frozenset(range(6))


Line = dict[str, Any]


def was_cut_off(code: int, record: Path) -> bool:
    """Returns whether a process ended before its tests did: with an exit code that is not pytest's, or within a test.

    The exit code alone does not tell: at a test's time limit, faulthandler ends the process with 1, as pytest itself
    does when tests fail.
    """
    lines = read(record)
    ended = {line["test"] for line in lines if "test" in line}
    last = [line["start"] for line in lines if "start" in line][-1:]
    return code not in ORDINARY or not ended.issuperset(last)


def read(path: Path) -> list[Line]:
    """Returns the lines of a record, without a last line that is cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
