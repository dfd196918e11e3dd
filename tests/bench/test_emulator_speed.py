"""Runs ``python -m benchmarks emulator`` over few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.machine_code import HAS_NATIVE  # isort: skip  (before whatever imports fastattn)

from benchmarks.measure import emulator_speed


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, kernels run on it")
def test_figures_are_of_every_backend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(emulator_speed, "ROWS", 64)
    emulator_speed.main(["--repeats", "1", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    backends = ["native, sm_80"] * HAS_NATIVE + ["Triton, sm_80"]
    assert [(row["kernel"], row["workers"]) for row in rows] == [(name, n) for name in backends for n in (1, 2)]
    printed = capsys.readouterr().out
    for row in rows:
        assert row["seconds"] > 0 and row["warp_instructions"] > 0
        assert f"{row['warp_instructions']:,}" in printed
