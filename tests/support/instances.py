"""What csrc/instances.json says is compiled, for tests that run every instance. Not a test module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "csrc" / "instances.json"
DTYPES = ["kFloat16", "kBFloat16"]


def compiled(folder: str) -> dict[str, dict[str, Any]]:
    """The kernels of ``csrc/<folder>`` → name → values, of which every combination is an instance."""
    rows = [row for row in json.loads(TABLE.read_text())["kernels"] if row["source"].startswith(f"{folder}/")]
    others = ("source", "architecture", "code")
    return {Path(row["source"]).stem: {name: row[name] for name in row if name not in others} for row in rows}
