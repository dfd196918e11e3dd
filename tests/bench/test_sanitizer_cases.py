"""Tests that the cases for compute-sanitizer launch every kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fastattn
from benchmarks.evidence import sanitizer_cases
from fastattn.dispatch.support import KERNEL_BACKENDS
from kernel_device import DEVICE

pytestmark = pytest.mark.usefixtures("emulated_gpu")

ROOT = Path(__file__).parents[2]


def kernels_in(folder: str, suffixes: tuple[str, ...], pattern: str) -> set[str]:
    """Returns the names that the pattern matches in the sources of a folder."""
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    return {name for path in sources for name in re.findall(pattern, path.read_text())}


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="the emulator is who knows which kernels ran")
def test_every_kernel_runs() -> None:
    """Triton kernels and kernels for sm_80 run on an A100, kernels for sm_90a on a Hopper GPU, in clusters too."""
    from emulator import device, launches

    names, opcodes_on_hopper = set(), set()  # keeping the launches would keep gigabytes of PTX
    with launches.told(lambda launched: names.add(launched.report.kernel)):
        ran = {
            (backend, case): sanitizer_cases.run(backend, case, torch.device(DEVICE))
            for backend in KERNEL_BACKENDS
            for case in sanitizer_cases.CASES
        }

    def note(launched: launches.Launched) -> None:
        names.add(launched.report.kernel)
        opcodes_on_hopper.update(launched.report.opcodes)

    with launches.told(note), device.emulated(90, num_sms=2):
        for case in sanitizer_cases.CASES:
            if case.startswith(("forward", "backward", "prompts")) or case == "every option" or "in clusters" in case:
                sanitizer_cases.run("cuda", case, torch.device(DEVICE))
    expected = kernels_in("triton_kernels", (".py",), r"\ndef (\w+_kernel)\(")
    assert len(expected) >= 10
    if any(ran["cuda", case] for case in sanitizer_cases.CASES):
        native = kernels_in("csrc", (".cuh", ".cu"), r"__global__ void (?:__launch_bounds__\([^()]*\)\s+)?(\w+)\(")
        assert native
        expected |= native
        assert any("multicast" in opcode for opcode in opcodes_on_hopper)
    assert not {kernel for kernel in expected if not any(kernel in name for name in names)}
    without_triton = {case for case in sanitizer_cases.CASES if not ran["triton", case]}
    assert without_triton == {case for case in sanitizer_cases.CASES if case.startswith("int8 activations")}


def test_what_a_backend_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def case(device: torch.device) -> None:
        raise fastattn.InputError("use_backend('cuda'): the kernel lacks it.\nmore")

    monkeypatch.setitem(sanitizer_cases.CASES, "a case", case)
    assert not sanitizer_cases.run("cuda", "a case", torch.device(DEVICE))
    assert capsys.readouterr().out.endswith("a case: not taken: use_backend('cuda'): the kernel lacks it.\n")
