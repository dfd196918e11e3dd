"""Tests the example that spreads sequences over processes: it runs under torchrun, and its checks fail on mistakes."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import overlap
import train_long_context
from checks import CheckList

TINY = {"length": 32, "batch": 2, "steps": 6, "layers": 2, "dim": 32}
OPTIONS = train_long_context.Options(**TINY, dtype="float32")  # on CPUs, even if there is a GPU


# --- On each rank -----------------------------------------------------------------------------------------------------


def mistakes_fail_the_checks(rank: int, mesh: DeviceMesh) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    module = train_long_context
    attend, parallel = module.context_parallel_attention, module.DistributedDataParallel
    text = torch.randint(256, (200,), generator=torch.Generator().manual_seed(3))
    mesh = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("data", "context"))

    def failed(seed: int) -> list[bool]:
        """Returns whether the checks of the loss and of the gradients fail."""
        trainer, checks = module.Trainer(replace(OPTIONS, seed=seed), mesh), CheckList()
        with torch.no_grad():  # makes attention far from uniform
            for parameter in trainer.model.parameters():
                parameter.mul_(2.0)
        generator = torch.Generator().manual_seed(seed)
        module.check_against_one_process(trainer, module.Batch.draw(text, 2, 32, generator), checks)
        return [not check.held for check in checks.checks]

    def of_own_keys(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def without_averages(model: nn.Module) -> nn.Module:
        return model

    first = rank == 0
    assert failed(seed=11) == [False, False] * first
    mistakes: list[tuple[str, Callable[..., object], list[bool]]] = [
        ("context_parallel_attention", of_own_keys, [True, True]),
        ("context_parallel_attention", lambda *qkv, **o: attend(*qkv, **{**o, "layout": "contiguous"}), [True, True]),
        ("DistributedDataParallel", without_averages, [False, True]),
    ]
    for name, mistake, expected in mistakes:
        setattr(module, name, mistake)
        assert failed(seed=12) == expected * first, name
        module.context_parallel_attention, module.DistributedDataParallel = attend, parallel


# --- Here -------------------------------------------------------------------------------------------------------------


def start(*arguments: str, processes: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [train_long_context.__file__, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # there is no GPU for each process
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_four_processes_train_as_one_and_are_profiled(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{number} squared is {number * number}." for number in range(99)))
    given = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    done = start(*given, "--text", str(text), "--out", str(tmp_path), "--profile", "--checkpoint", processes=4)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "train_long_context: ok"
    assert "2 x 2 ranks (data x context) on cpu" in done.stdout
    assert sum(line.endswith("  ok") for line in lines) == 3
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
    header = next(place for place, line in enumerate(lines) if line.split()[:1] == ["rank"])
    for rank in range(4):
        events = json.loads((tmp_path / f"trace_rank{rank}.json").read_text())["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"gloo:send", "gloo:recv", "gloo:all_reduce", "_RingAttentionBackward"} <= names
        place, compute, messages, *_ = lines[header + 1 + rank].split()
        assert int(place) == rank
        assert float(compute) > 0
        assert float(messages) > 0


@pytest.mark.slow
def test_the_checks_fail_where_something_is_wrong() -> None:
    ranks.run(__name__, mistakes_fail_the_checks.__name__, emulated=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": 3}, r"--context: expected a divisor of the 4 processes, got 3"),
        ({"batch": 3}, r"--batch: expected a multiple of 2, got 3"),
        ({"length": 30}, r"--length: expected a multiple of 4, got 30"),
    ],
)
def test_ranks_that_cannot_share_evenly(given: dict[str, int], message: str) -> None:
    OPTIONS.check(4)
    with pytest.raises(ValueError, match=message):
        replace(OPTIONS, **given).check(4)


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["train_long_context.py"])
    with pytest.raises(SystemExit, match="2"):
        train_long_context.main()
    assert "torchrun --nproc-per-node 4 examples/train_long_context.py" in capsys.readouterr().err


def event(name: str, begin: float, end: float, **others: object) -> SimpleNamespace:
    given = {"cpu_children": [], "device_type": torch.autograd.DeviceType.CPU, "is_user_annotation": False, **others}
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=begin, end=end), **given)


def test_what_overlaps_by_hand() -> None:
    on_gpu = functools.partial(event, device_type=torch.autograd.DeviceType.CUDA)
    events = {
        "cpu": [
            event("aten::linear", 10, 40, cpu_children=["aten::mm"]),
            event("aten::mm", 12, 20),
            event("aten::add", 18, 22),
            event("gloo:recv", 15, 35),
            event("gloo:send", 14, 16),
            event("c10d::recv_", 15, 16),
        ],
        "cuda": [
            event("aten::mm", 0, 90),
            on_gpu("nccl:send", 0, 90, is_user_annotation=True),
            on_gpu("attention_forward_sm90", 12, 22),
            on_gpu("ncclDevKernel_SendRecv(…)", 14, 35),
        ],
    }
    for device, seen in events.items():
        timeline = overlap.Timeline.of(seen, torch.device(device))
        assert timeline.compute == [(0, 10)]
        assert timeline.communication == [(2, 23)]
        assert timeline.hidden == 8
    assert overlap.Timeline.of([], torch.device("cpu")).hidden == 0
