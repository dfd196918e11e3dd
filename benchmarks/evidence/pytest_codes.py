"""What `pytest_record` writes, and how its processes end, for those who read it: importable without pytest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GPU_LOST = 99  # the exit code where the GPU is in an error
# pytest's own exit codes: all passed, some failed, interrupted, internal error, usage error, nothing collected.
ORDINARY = frozenset(range(6))


Line = dict[str, Any]


def was_cut_off(code: int, record: Path) -> bool:
    """Whether a process ended before its tests did. (faulthandler, at a test's limit, ends it with pytest's own 1.)"""
    lines = read(record)
    ended = {line["test"] for line in lines if "test" in line}
    last = [line["start"] for line in lines if "start" in line][-1:]
    return code not in ORDINARY or not ended.issuperset(last)


def read(path: Path) -> list[Line]:
    """The lines of a record; a last one that is cut off does not count."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
