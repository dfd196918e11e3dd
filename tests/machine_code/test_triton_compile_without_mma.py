"""Tests the machine code of the Triton kernels without matrix instructions: shared memory fits, and no loop spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


def test_fits_and_does_not_spill() -> None:
    """Only the append kernel, which has no loops, may spill a few words."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, Path(__file__).parent / "aot.py", "aot_without_mma"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    reports = json.loads(result.stdout)
    assert reports
    assert not [r["name"] for r in reports if r["shared_bytes"] > r["shared_limit"]]
    with_loops = [r for r in reports if not r["name"].startswith("append")]
    assert not [(r["name"], r["local_outside"]) for r in with_loops if r["local_in_loops"] or r["local_outside"]]
