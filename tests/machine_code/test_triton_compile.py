"""Tests the Triton kernels' machine code for sm_80, sm_90 and sm_100, compiled without a GPU.

Every tile must use tensor cores, fit into shared memory, and keep its main loops (innermost loops with matrix
instructions) free of local memory. Spills outside of them are printed (``pytest -s``, or on failure).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
BUILDS = [
    pytest.param(
        {"module": module, "arch": arch}, marks=pytest.mark.xdist_group(f"{module} {arch}"), id=f"{module}-sm_{arch}"
    )
    for module in ("aot_attention", "aot_decode", "aot_int8_matmul")
    for arch in (80, 90, 100)
]


@pytest.fixture(scope="module", params=BUILDS)
def reports(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Returns the reports of a module's builds, compiled in another process with Triton's usual backend."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(
        [sys.executable, FOLDER / "aot.py", request.param["module"], str(request.param["arch"])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(result.stdout)
    for r in found:
        print(
            f"{r['name']:75s} {r['registers']:3d} registers, {r['shared_bytes'] // 1024:3d} KB shared, local memory "
            f"accesses {r['local_in_loops']} in main loops {r['main_loops']}, {r['local_outside']} outside"
        )
    return found


def test_tensor_cores(reports: list[dict[str, Any]]) -> None:
    without = [r["name"] for r in reports if not r["tensor_core"] or not r["main_loops"]]
    assert not without, f"no matrix instructions, or none in a loop: {without}"


def test_shared_memory(reports: list[dict[str, Any]]) -> None:
    too_large = [
        (r["name"], r["shared_bytes"], r["shared_limit"]) for r in reports if r["shared_bytes"] > r["shared_limit"]
    ]
    assert not too_large


def test_no_local_memory_in_main_loops(reports: list[dict[str, Any]]) -> None:
    spilling = [(r["name"], r["local_in_loops"], r["registers"]) for r in reports if r["local_in_loops"]]
    assert not spilling
