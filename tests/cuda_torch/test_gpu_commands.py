"""Tests the commands that need a GPU: benchmarks with torch's kernels as peers, gpu-check, the profiler, the report."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fastattn
from benchmark_cases import ATTENTION_CASES, DECODE_CASES, INT8_CASES
from benchmarks.measure import benchmarks, harness, results, timing
from fastattn.profiler import limits

ROOT = Path(__file__).parents[2]

# The function that lists a benchmark's cases, and one small case whose head dims torch's kernels take, too.
BENCHMARKS: dict[str, tuple[str, str, Any]] = {
    "attention_forward": ("attention", "forward_cases", dataclasses.replace(ATTENTION_CASES[1], head_dim=64)),
    "attention_backward": ("attention", "backward_cases", dataclasses.replace(ATTENTION_CASES[1], head_dim=64)),
    "decode": ("decode", "chosen", dataclasses.replace(DECODE_CASES[0], head_dim=64)),
    "int8_matmul": ("int8", "chosen", INT8_CASES[0]),
}
# Peers that come with torch and run on the emulated device.
PEERS = {
    "attention_forward": ["SDPA flash", "SDPA math"],
    "attention_backward": ["SDPA flash", "SDPA math"],
    "decode": ["SDPA flash", "SDPA math"],
    "int8_matmul": ["cuBLAS"],
}
USES_GRAPHS = {"attention_forward", "decode", "int8_matmul"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_measures_every_backend_beside_torchs_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark runs from the limits to the JSON, with events and CUDA graphs. Its times say nothing about a GPU."""
    cases, function, case = BENCHMARKS[name]
    monkeypatch.setattr(importlib.import_module(f"benchmarks.measure.cases.{cases}"), function, lambda options: [case])
    for module, constant, small in (
        (limits, "_COPY_BYTES", 1 << 16),
        (limits, "_MATMUL_SIZE", 64),
        (timing, "WARM_UP_S", 1e-3),
        (timing, "FEWEST_SAMPLES", 2),
        (timing, "MOST_SAMPLES", 2),
        (timing, "MOST_SETS", 2),
        (harness, "GRAPH_BELOW_S", 60.0),
    ):
        monkeypatch.setattr(module, constant, small)
    words = ["--minutes", "5", "--seconds-per-figure", "0.001", "--peer", "SDPA", "--peer", "cuBLAS"]
    benchmarks.main(name, ["--json", str(tmp_path), *words])
    document = results.read(tmp_path / f"{name}.json")
    rows = {row["implementation"]: row for row in document["rows"]}
    assert document["complete"]
    for own in ("fastattn cuda", "fastattn triton"):
        assert rows[own]["status"] == "ok" and (rows[own]["graph"] is not None) == (name in USES_GRAPHS), rows[own]
    for peer in PEERS[name]:
        (row,) = (row for implementation, row in rows.items() if peer in implementation)
        assert row["status"] == "ok", row
    assert "Limits measured in the same run" in capsys.readouterr().out


def run(*arguments: str, **environment: str) -> str:
    """Returns what a command prints in a new process."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_report_names_both_gpus() -> None:
    text = run("-m", "fastattn", "--short")
    assert "sm_90" in text and "sm_80" in text and "CUDA C++ kernels in machine code for sm_90a" in text


def test_gpu_check_goes_through_its_stages(tmp_path: Path) -> None:
    """One kernel test runs here. The test above runs the benchmarks, and tests/bench/test_sanitizer_cases.py the cases
    for compute-sanitizer. The emulator's own tests would compare it with itself."""
    out = tmp_path / "out"
    run(
        *("-m", "benchmarks", "gpu-check", "--out", str(out), "--stages", "library,tests"),
        *("--jobs", "1", "--limits", "tests=300"),
        PYTEST_ADDOPTS="--ignore-glob=*/test_[!m]*.py -k test_merge_attention_and_its_gradients",
    )
    stages = {stage["stage"]: stage for stage in json.loads((out / "gpu_check.json").read_text())["stages"]}
    assert stages["library"]["status"] == "passed" and stages["tests"]["status"] == "passed"


def test_a_profile_without_cupti_says_so() -> None:
    tensors = [torch.randn(1, 2, 40, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    with fastattn.profile() as profile:
        fastattn.attention(*tensors)
    assert not profile.kernels and any("fastattn::attention_forward" in op.name for op in profile.operators)
    text = str(profile)
    assert text.startswith("No kernel was recorded") and "No kernel ran" not in text


def test_explain_and_record_name_the_kernel_that_ran() -> None:
    tensors = [torch.randn(1, 2, 40, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    explained = fastattn.explain(fastattn.attention, *tensors, causal=True)
    with fastattn.record() as calls:
        fastattn.attention(*tensors, causal=True)
    assert [call.kernel for call in calls] == [explained.kernel] and "sm90" in explained.kernel
