"""Models how long a kernel takes on a GPU that is not available. Its figures are a PREDICTION, never a result.

In the model, every CTA has a load: warp instructions, multiply-adds on the tensor cores, special functions, wavefronts
of shared memory and bytes from the L2. The load of the busiest SM is ``max(longest CTA, ceil(CTAs / SMs) * mean CTA)``,
and the whole kernel loads bytes from device memory. Each resource alone would need load / rate; the predicted time is
the largest of these, and that resource binds:

    time = max(issue, tensor cores, special functions, shared memory, L2, device memory)

The model leaves out what makes a real GPU slower: latencies and dependences (it assumes that enough warps are resident
to hide them; occupancy is printed, but does not enter), barriers, the separate pipes for floats and integers, launches,
the power limit that lowers clocks, and operands that wgmma reads from shared memory. It has no caches either: what
several CTAs read is loaded once from device memory, and from the L2 once for each CTA or cluster that shares a copy.
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
    """A GPU with the rates of one SM per clock, unless a comment says otherwise."""

    name: str
    arch: int
    num_sms: int
    clock_hz: float
    issue: float  # warp instructions
    mma_macs: float  # 16-bit multiply-adds of mma.sync
    wgmma_macs: float  # 16-bit multiply-adds of wgmma; 0 if the GPU has none
    special: float  # lanes of ex2, rcp, …
    wavefronts: float  # 128 bytes of shared memory
    l2_bytes: float  # for the whole GPU per clock
    hbm_bytes_per_s: float  # for the whole GPU
    shared_bytes: int  # the shared memory of an SM for all its CTAs
    registers: int = 1 << 16
    warps: int = 64
    ctas: int = 32


# Sources of the figures:
# SMs, clock, device memory: NVIDIA's data sheets of the H200 SXM and the A100 SXM 80 GB. The H200's clock is the one at
#   which 132 SMs reach the data sheet's 989.4 TFLOP/s; under matmuls it is lower (770 to 800 TFLOP/s seen). Its maximum
#   is 1.98 GHz, the clock for which csrc/host/sm_rates.h gives the bytes of device memory per clock.
# issue, special, warps, ctas, registers, shared memory: CUDA Programming Guide, "Arithmetic Instructions" (4
#   schedulers, 16 results of special functions) and "Technical Specifications per Compute Capability".
# mma_macs, wgmma_macs: the data sheets' dense bf16 rates. NVIDIA gives no rate for mma.sync on Hopper: 5/8 of wgmma's
#   rate is assumed, as in csrc/host/sm_rates.h, which names the source.
# wavefronts: 32 banks of 4 bytes (Programming Guide, "Shared Memory").
# l2_bytes: NVIDIA's A100 white paper (5120 bytes per clock). None is published for the H200, so the same is assumed.
H200 = Machine("H200", 90, 132, 1.83e9, 4, 1280, 2048, 16, 1, 5120, 4.8e12, 228 * KIB)
A100 = Machine("A100", 80, 108, 1.41e9, 4, 1024, 0, 16, 1, 5120, 2.039e12, 164 * KIB)
MACHINES = (H200, A100)
RESERVED_SHARED_BYTES = KIB  # taken by the driver in each CTA (Programming Guide, "Shared Memory" of 8.x and 9.0)


@dataclass(frozen=True)
class Load:
    """The load that a CTA, or a part of it, puts on its SM."""

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
    """Returns the larger of the two loads for each resource."""
    return Load(*(max(a, b) for a, b in zip(astuple(first), astuple(second), strict=True)))


class Prediction(NamedTuple):
    """A predicted time: ``seconds_by`` has what each resource alone would need, and the largest is the time."""

    seconds_by: Mapping[str, float]

    @property
    def resource(self) -> str:
        return max(self.seconds_by, key=self.seconds_by.__getitem__)

    @property
    def seconds(self) -> float:
        return max(self.seconds_by.values())


def ctas_per_sm(machine: Machine, threads: int, registers: int, shared_bytes: int) -> int:
    """Returns how many CTAs fit in an SM by warps, registers (allocated per warp in units of 256) and shared memory."""
    warps = math.ceil(threads / 32)
    registers_of_warp = math.ceil(32 * max(registers, 1) / 256) * 256
    return min(
        machine.ctas,
        machine.warps // warps,
        machine.registers // registers_of_warp // warps,
        machine.shared_bytes // (shared_bytes + RESERVED_SHARED_BYTES),
    )


def of_busiest_sm(machine: Machine, ctas: int, mean: Load, longest: Load) -> Load:
    """Returns the load of the busiest SM if ``ctas`` CTAs are dealt to the SMs as evenly as whole CTAs can be."""
    return largest(longest, mean * math.ceil(ctas / machine.num_sms))


def predict(machine: Machine, ctas: int, mean: Load, longest: Load, hbm_bytes: float) -> Prediction:
    """Predicts the time of one kernel of ``ctas`` CTAs. Raises ``ValueError`` for wgmma on a machine without it."""
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
