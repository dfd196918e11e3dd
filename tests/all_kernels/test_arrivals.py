"""Tests csrc/scheduler/arrivals.cuh alone, on the emulator: one CTA of each group is the last, and sees what the others
stored, for any old contents of the counters and any order of arrival. A GPU runs it as part of the kernels."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from emulator import EmulatorError, Module, Report
from emulator.nvcc_compile import compiled, nvcc

pytestmark = pytest.mark.skipif(nvcc() is None, reason="no nvcc: see setup.py")

THREADS = 64
TOKEN = 0x123456789A000000
ADD, OPEN, ASK = "atom.acq_rel.gpu.global.add.u64", "atom.relaxed.gpu.global.cas.b64", "ld.acquire.gpu.global.b64"


@functools.cache
def compiled_module() -> Module:
    folder = Path(__file__).resolve().parent
    flags = ["-ptx", "-arch=compute_80", "-O3", "--expt-relaxed-constexpr"]  # the flags of setup.py
    return Module(compiled(folder / "arrivals.cu", "ptx", flags, [folder.parents[1] / "csrc"]).read_text())


class Groups:
    """The memory of a launch of ``groups`` times ``per_group`` CTAs. Its counters hold old numbers."""

    def __init__(self, groups: int, per_group: int, most: int = 1, contents: int | None = None) -> None:
        generator = torch.Generator().manual_seed(groups)
        one_group = torch.randint(1, most + 1, (per_group,), generator=generator, dtype=torch.int32)
        self.brought, self.all = one_group.repeat(groups), int(one_group.sum())
        self.shape = groups, per_group
        self.counters = torch.randint(-(2**62), 2**62, (groups,), generator=generator)
        if contents is not None:
            self.counters.fill_((contents + 2**63) % 2**64 - 2**63)

    def run(self, seed: int, asks: bool = False, module: Module | None = None) -> Report:
        """Launches the kernel. The emulator reports races and reads of memory that nothing has written."""
        groups, per_group = self.shape
        self.sums, self.lasts = torch.zeros(2, groups, dtype=torch.int32)
        left = torch.empty(groups * per_group, dtype=torch.int32)
        args = (self.brought, per_group, self.all, self.counters, TOKEN, int(asks), left, self.sums, self.lasts)
        launch = (module or compiled_module()).launch
        return launch("arrive", (groups * per_group,), (THREADS,), args, seed=seed, num_sms=4, uninitialised=True)

    def check(self, seed: int, asks: bool = False) -> Report:
        report = self.run(seed, asks)
        numbers = self.brought * torch.arange(1, len(self.brought) + 1)
        assert torch.equal(self.sums, numbers.view(self.shape).sum(1).int())
        assert bool((self.lasts == 1).all()) and bool((self.counters == 0).all())
        return report


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("groups, per_group", [(1, 2), (3, 5), (2, 17), (5, 1)])
def test_one_is_the_last(groups: int, per_group: int, asks: bool, seed: int) -> None:
    Groups(groups, per_group).check(seed, asks)


@pytest.mark.parametrize("seed", range(4))
def test_ctas_that_bring_several(seed: int) -> None:
    Groups(4, 6, most=5).check(seed)


@pytest.mark.parametrize("contents", [0, -1, 1, TOKEN - 1, TOKEN - 2**24, TOKEN + 2**24, TOKEN + 2**24 + 5])
@pytest.mark.parametrize("asks", [False, True])
def test_whatever_stood_in_the_counters(contents: int, asks: bool) -> None:
    for seed in range(3):
        Groups(2, 7, contents=contents).check(seed, asks)


@pytest.mark.parametrize("asks", [False, True])
def test_launches_that_follow_each_other_with_one_token(asks: bool) -> None:
    """Replays of a CUDA graph reuse one launch ID in this way."""
    groups = Groups(3, 5)
    for seed in range(5):
        groups.check(seed, asks)


@pytest.mark.parametrize("contents", [0, 77])
def test_an_arrival_is_one_trip(contents: int) -> None:
    """Arriving is one atomic in any order. Opening takes a second one where the counter held another number than 0."""
    groups, per_group = 3, 9
    report = Groups(groups, per_group, contents=contents).check(seed=1)
    assert report.opcodes[ADD] == groups * per_group  # one per CTA: the emulator counts warps
    assert report.opcodes[OPEN] <= (1 if contents == 0 else 2) * groups * per_group
    assert ASK not in report.opcodes


FAULTS = {
    "arrivals tell nothing": (ADD, ADD.replace("acq_rel", "relaxed"), False),
    "asking tells nothing": (ASK, ASK.replace("acquire", "relaxed"), True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_count_is_found(fault: str) -> None:
    instruction, instead, asks = FAULTS[fault]
    assert instruction in compiled_module().ptx
    faulty = Module(compiled_module().ptx.replace(instruction, instead))
    for seed in range(4):
        with pytest.raises(EmulatorError) as caught:
            for _ in range(4):  # in at least one launch, a CTA asks at the moment of the race
                Groups(8, 4).run(seed, asks, faulty)
        assert caught.value.kind == "race"
