"""Checks which native library a test process takes: tests/conftest.py decides by the modules to be collected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # importing the emulator builds it
    from emulator.toolkit import toolkit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available() or toolkit() is None, reason="there is one library alone"),
]

TESTS = Path(__file__).parents[1]
PURE = """
import sys

from fastattn import native

def test_the_library():
    assert native.TAKES_CPU_TENSORS is ("emulator" in sys.modules)
    print("emulated" if native.TAKES_CPU_TENSORS else "installed")
"""
KERNELS = "from kernel_device import DEVICE\n\ndef test_nothing():\n    pass\n"
UNFORESEEN = "import importlib\n\nimportlib.import_module('kernel_device')\n"


def run(folder: Path, **modules: str) -> str:
    """Returns what pytest prints for these modules, collected in the order of their names."""
    for name, text in modules.items():
        (folder / f"test_{name}.py").write_text(text)
    path = os.pathsep.join([str(TESTS), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "conftest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            folder,
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.stdout + done.stderr


def test_a_module_without_kernels_takes_the_installed_one(tmp_path: Path) -> None:
    output = run(tmp_path, a=PURE)
    assert "installed" in output and "1 passed" in output, output


def test_one_module_with_kernels_decides_for_all_before_the_first_is_imported(tmp_path: Path) -> None:
    output = run(tmp_path, a=PURE, b=KERNELS)
    assert "emulated" in output and "2 passed" in output, output


def test_a_module_that_does_not_say_that_it_runs_kernels_fails(tmp_path: Path) -> None:
    output = run(tmp_path, a=PURE, b=UNFORESEEN)
    assert "fastattn was imported before" in output and "1 error" in output, output
