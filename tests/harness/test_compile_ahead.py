"""The process that compiles kernels before the tests need them (compile_ahead.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compile_ahead

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, and nothing is compiled ahead")
def test_it_compiles_and_launches_nothing(tmp_path: Path) -> None:
    """The test itself fails there, for want of results."""
    test = TESTS / "int8" / "test_triton_int8.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", compile_ahead.OPTION, f"{test}::test_extreme_weights_are_exact"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "1 failed" in done.stdout, done.stdout
    assert {path.stem for path in tmp_path.rglob("*.ptx")} == {"forward_kernel"}


def test_the_modules_exist() -> None:
    found = {path.stem for path in TESTS.rglob("test_*.py")}
    assert found.issuperset(compile_ahead.MODULES)
