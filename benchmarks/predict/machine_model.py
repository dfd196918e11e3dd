"""A model of how long a kernel takes on a GPU that is not there. What comes out is a PREDICTION, never a result.

The model. Every CTA has a load: warp instructions, multiply-adds on the tensor cores, special functions, wavefronts of
shared memory and bytes from the L2. The busiest SM has ``max(longest CTA, ceil(CTAs / SMs) * mean CTA)`` of it, and
the whole kernel has bytes from device memory. Each resource alone would need load / rate; the predicted time is the
largest of these, and that resource binds:

    time = max(issue, tensor cores, special functions, shared memory, L2, device memory)

What it leaves out, all of which makes a GPU slower than predicted: latencies and dependences (as if enough warps were
resident to hide them: occupancy is printed, and does not enter), barriers, the single pipes for floats and integers,
launches, the power limit that lowers clocks, operands that wgmma reads from shared memory, and caches: what several
CTAs read comes once from device memory and each time from the L2, or once for the CTAs of a cluster that share a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

KIB = 1024
ISSUE, TENSOR, SPECIAL, SHARED, L2, HBM = (
    "issue slots",
    "tensor cores",
    "special functions",
    "shared memory",
    "L2",
    "device memory",
)


@dataclass(frozen=True)
class Machine:
    """Rates of one SM per clock, unless they say otherwise."""

    name: str
    arch: int
    num_sms: int
    clock_hz: float
    issue: float  # warp instructions
    mma_macs: float  # 16-bit multiply-adds of mma.sync
    wgmma_macs: float  # the same of wgmma; 0 where there is none
    special: float  # lanes of ex2, rcp, …
    wavefronts: float  # 128 bytes of shared memory
    l2_bytes: float  # of the whole GPU per clock
    hbm_bytes_per_s: float  # of the whole GPU
    shared_bytes: int  # that all CTAs of an SM can have together
    registers: int = 1 << 16
    warps: int = 64
    ctas: int = 32


# Sources.
# SMs, clock, device memory: NVIDIA's data sheets of the H200 SXM and the A100 SXM 80 GB. The H200's clock is the one at
#   which 132 SMs give the 989.4 TFLOP/s of the data sheet; with matmuls running it is lower (770 to 800 TFLOP/s seen).
#   It rises to 1.98 GHz at most, the clock for which csrc/host/sm_rates.h gives the bytes of device memory in a clock.
# issue, special, warps, ctas, registers, shared memory: CUDA Programming Guide, "Arithmetic Instructions" (4
#   schedulers, 16 results of special functions) and "Technical Specifications per Compute Capability".
# mma_macs, wgmma_macs: the data sheets' dense bf16 rates. NVIDIA says nothing of mma.sync on Hopper: it counts 5/8 of
#   wgmma's rate, as in csrc/host/sm_rates.h, where the source stands.
# wavefronts: 32 banks of 4 bytes (Programming Guide, "Shared Memory").
# l2_bytes: NVIDIA's A100 white paper (5120 bytes a clock). None is published for the H200: the same is assumed.
H200 = Machine("H200", 90, 132, 1.83e9, 4, 1280, 2048, 16, 1, 5120, 4.8e12, 228 * KIB)
A100 = Machine("A100", 80, 108, 1.41e9, 4, 1024, 0, 16, 1, 5120, 2.039e12, 164 * KIB)
MACHINES = (H200, A100)
RESERVED_SHARED_BYTES = KIB  # of each CTA, by the driver (Programming Guide, "Shared Memory" of 8.x and 9.0)


@dataclass(frozen=True)
class Load:
    """What a CTA, or a part of it, asks of its SM."""

    instructions: float = 0.0  # of warps
    mma_macs: float = 0.0
    wgmma_macs: float = 0.0
    special: float = 0.0  # of warps
    wavefronts: float = 0.0
    l2_bytes: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Load:
        return Load(*(factor * part for part in astuple(self)))

    @property
    def macs(self) -> float:
        return self.mma_macs + self.wgmma_macs


def largest(first: Load, second: Load) -> Load:
    """The larger of the two, resource by resource."""
    return Load(*(max(a, b) for a, b in zip(astuple(first), astuple(second), strict=True)))


class Prediction(NamedTuple):
    """``seconds_by``: what each resource alone would need; the largest is the time."""

    seconds_by: Mapping[str, float]

    @property
    def resource(self) -> str:
        return max(self.seconds_by, key=self.seconds_by.__getitem__)

    @property
    def seconds(self) -> float:
        return max(self.seconds_by.values())


def ctas_per_sm(machine: Machine, threads: int, registers: int, shared_bytes: int) -> int:
    """How many CTAs fit in an SM: by warps, by registers (given out to warps in units of 256) and by shared memory."""
    warps = math.ceil(threads / 32)
    registers_of_warp = math.ceil(32 * max(registers, 1) / 256) * 256
    return min(
        machine.ctas,
        machine.warps // warps,
        machine.registers // registers_of_warp // warps,
        machine.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES),
    )


def of_busiest_sm(machine: Machine, ctas: int, mean: Load, longest: Load) -> Load:
    """Of ``ctas`` CTAs dealt to the SMs as evenly as whole CTAs can be."""
    return largest(longest, mean * math.ceil(ctas / machine.num_sms))


def predict(machine: Machine, ctas: int, mean: Load, longest: Load, hbm_bytes: float) -> Prediction:
    """One kernel of ``ctas`` CTAs. Raises ``ValueError`` for wgmma on a machine that has none."""
    load = of_busiest_sm(machine, ctas, mean, longest)
    if load.wgmma_macs and not machine.wgmma_macs:
        raise ValueError(f"{machine.name} has no wgmma")
    tensor = load.mma_macs / machine.mma_macs
    if load.wgmma_macs:
        tensor += load.wgmma_macs / machine.wgmma_macs
    clocks = {
        ISSUE: load.instructions / machine.issue,
        TENSOR: tensor,
        SPECIAL: 32 * load.special / machine.special,
        SHARED: load.wavefronts / machine.wavefronts,
        L2: load.l2_bytes / (machine.l2_bytes / machine.num_sms),
    }
    seconds = {resource: count / machine.clock_hz for resource, count in clocks.items()}
    return Prediction(seconds | {HBM: hbm_bytes / machine.hbm_bytes_per_s})
